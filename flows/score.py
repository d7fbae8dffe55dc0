"""Score a file with a reward model behind vLLM, which runs for as long as that takes. Order only."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from flows.console import say, told_while_waiting
from flows.form import described_flow
from flows.pipeline import link_on_page, open_store, places, shown_path
from rmcore.reporting.html.markdown import escape
from rmcore.reporting.html.note import run_note
from tasks.served_scoring import (
    OverLength,
    model_to_serve,
    read_data,
    rewards_table,
    score_served,
    scores_key,
    short_name,
    summarise,
    write_scores,
)
from tasks.stages import run_step
from tasks.tracking import RunTracker

STUDY = "scores"
"""All scored files are one experiment in MLflow, whatever study their model is of: so they can be compared."""
METRICS = {
    "rows_per_second": "cost/rows_per_second",
    "tokens_per_second": "cost/tokens_per_second",
    "seconds": "cost/score_seconds",
    "start_seconds": "cost/start_seconds",
    "num_rows": "scores/num_rows",
    "num_cut": "scores/num_cut",
    "pairwise_accuracy": "eval/pairwise_accuracy",
}


@described_flow(
    "score",
    "start vLLM with the model ──> score every row ──> write the rewards ──> end vLLM",
    lambda given: f"score-{short_name(given['model'])}",
)
def score(
    data: str,
    model: str,
    split: str = "train",
    limit: Annotated[int | None, Field(ge=1)] = None,
    over_length: OverLength = "cut",
) -> dict[str, Any]:
    """Start vLLM with a reward model, score every row of a file by it, write the rewards and end vLLM.

    Args:
        data: preference pairs, or rows with columns prompt and response: a file, a datasets folder or a hub name, as
            the worker's machine sees it.
        model: a version in MLflow's registry, such as models:/rm-demo/3 or models:/rm-demo@candidate; or a checkpoint
            folder; or the hub name of a reward model.
        split: which split of a folder or hub data set; a file has none.
        limit: stop after this many pairs or rows; left out, all of them.
        over_length: what happens to a side longer than the model was trained to read: it is cut, and its tokens
            counted, or the whole run is refused.

    Returns:
        {"results": the summary, "rewards": path of the Parquet file, "mlflow_url": address or None}.

    Raises:
        RmcoreError: the model is not there, nothing in the data can be scored, or vLLM is absent or did not start.
    """
    store = open_store()
    store.hold_around(model)
    with model_to_serve(model) as served:
        read = run_step("read", lambda: read_data(data, split, limit), [])
        rows = read.found
        settings = {"split": split, "limit": limit, "over_length": over_length}
        with RunTracker.start(
            study=STUDY,
            run_name=served.name,
            tags={"rm.kind": "scores", "rm.model": served.name, "prefect.flow_run_id": str(runtime.flow_run.id)},
            params={"data": data, "model": model, **settings},
        ) as tracker:
            waiting = partial(told_while_waiting, "score")
            name = f"score of {served.name}"
            score = partial(score_served, store, served, rows, over_length, run=name, waiting=waiting)
            answered = run_step("score", score, [read.handed])
            scored = answered.found

            def write() -> tuple[dict[str, Any], Path]:
                table = rewards_table(rows, scored.answer.rewards, scored.answer.num_cut)
                summary = summarise(served, rows, table, scored)
                key = scores_key(summary, rows, **settings)
                folder = write_scores(table, summary, key)
                tracker.log_dataset(name=Path(data).name, fingerprint=rows.digest, source=data, num_rows=len(table))
                tracker.log_metrics({METRICS[name]: summary[name] for name in METRICS if summary[name] is not None})
                tracker.log_file(folder / "summary.json", "")
                tracker.set_tags({"rm.key": key, "rm.checkpoint_digest": summary["checkpoint_digest"]})
                tracker.describe(run_note(f"{len(table)} rows of {Path(data).name} scored", *places(None)))
                return summary, folder

            summary, folder = run_step("write", write, [answered.handed]).found
    rewards = str(folder / "rewards.parquet")
    say(f"{summary['num_rows']} rows scored at {summary['rows_per_second']:.1f} a second  {shown_path(rewards)}")
    create_markdown_artifact(markdown=scores_markdown(summary), description=f"Rewards: {rewards}")
    if tracker.url is not None and tracker.url.startswith("http"):
        link_on_page(tracker.url, "This run in MLflow")
    return {"results": summary, "rewards": rewards, "mlflow_url": tracker.url}


def scores_markdown(summary: dict[str, Any]) -> str:
    """Describe what was found, for Prefect's artifact view."""
    accuracy = summary["pairwise_accuracy"]
    found = {
        "model": summary["model"],
        "weights": f"version {summary['weight_version']}, {summary['checkpoint_digest'][:12]}, {summary['dtype']}",
        "data": summary["data"],
        "rows": f"{summary['num_rows']} scored, {summary['num_unusable']} unusable",
        "sides cut to the model's limit": summary["num_cut"],
        "speed": f"{summary['rows_per_second']:.1f} rows/s, {summary['tokens_per_second']:.0f} tokens/s",
        "seconds": f"{summary['seconds']:.1f}, after {summary['start_seconds']:.1f} until vLLM answered",
        **({} if accuracy is None else {"pairwise accuracy": f"{accuracy:.4f}, ties half"}),
    }
    lines = [f"# Rewards by {escape(summary['model'])} behind vLLM", "", "| | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {escape(str(value))} |" for name, value in found.items())]) + "\n"
