"""The pipeline: prepare, train, evaluate, readiness, report, register. Order only."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import runtime
from prefect.artifacts import create_markdown_artifact

from experiments.presets import PRESETS
from flows.console import say, say_notices, shown_while_waiting
from flows.form import FIELDS, Form, configured_flow, presets_for
from flows.prefect_api import api_is_embedded
from flows.prefect_client import reap_dead_runs
from flows.requirements import require_run
from flows.settings import OPTIONAL_GROUPS, named_changes
from flows.unfinished import unfinished
from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import INTERRUPTED, ServiceError
from rmcore.core.files import write_json
from rmcore.core.processes import terminate_children
from rmcore.core.progress import below_the_echo, progress_bar
from rmcore.core.store import ArtifactRef, Store
from rmcore.readiness.verdict import verdict_tags
from rmcore.reporting.html.note import RUN_FILES, linked, numbers_line, verdict_note
from rmcore.reporting.html.report import summary_markdown, write_report
from rmcore.reporting.runs import KEY_DIGITS, list_runs, write_index
from rmcore.reporting.schema import Results
from rmcore.stages.order import drawn, only_starts_reward_model, pipeline_stages, request
from rmcore.stages.results import figures, gather_results, run_key
from rmcore.stages.stage import Stage
from tasks.stages import StageRun, run_stage, run_step
from tasks.tracking import RunTracker

REPORT_FOLDER = "report"
"""Folder of the report among a run's files in MLflow."""
REPORT_FILE = "report.html"
FORM = Form("demo", FIELDS, tuple(name for name in GROUPS if name and "." not in name), presets_for("run"), require_run)
DRAWN = PRESETS["policy"].model_copy(
    update={name: group() for name, group in OPTIONAL_GROUPS.items() if name != "policy" and "." not in name}
)
"""With every section that may be left out."""


@configured_flow("pipeline", FORM, drawn(pipeline_stages(DRAWN), DRAWN))
def pipeline(config: PipelineConfig) -> dict[str, Any]:
    """Train a reward model on preference pairs, measure it, judge it and register it.

    Every stage is cached by what can affect its outcome; a second run with the same config computes nothing.

    Args:
        config: data, model, training, measurement and verdict of this run.

    Returns:
        {"results": everything the report shows, "report": path, "checkpoint": path, "mlflow_url": address or None,
        "pages": addresses of this run in MLflow and Prefect, where servers show them,
        "executed": names of the stages that ran, "model_version": registry version or None}.

    Raises:
        ConfigError: something that the config names is not there, see `require_run`.
        DataError: the judged answers that are named tell nothing.
    """
    if only_starts_reward_model(config):
        say("policy     the reward model starts from it; its samples have no judge, so labelled pairs alone decide")
    return run_pipeline(config, pipeline_stages(config), kind="pipeline", run_name=run_name_of(config))


def run_name_of(config: PipelineConfig, kind: str = "") -> str:
    """Name a run by study, seed, kind and the file of given samples; reports add the first digits of its key."""
    given = None if config.policy is None else config.policy.samples
    samples = "" if given is None else file_words(given)
    return "-".join(filter(None, (config.study, f"seed{config.seed}", kind, samples)))


def file_words(path: str) -> str:
    """Give a file's name without its suffix, and its folder's, as a part of a run's name."""
    return re.sub(r"[^\w.-]+", "_", "_".join(Path(path).with_suffix("").parts[-2:]))[-40:].strip("_")


def run_pipeline(config: PipelineConfig, names: Sequence[str], *, kind: str, run_name: str) -> dict[str, Any]:
    """Run the stages `names` inside a flow, with tracking, report and registration; returns what `pipeline` returns.

    They must include the stages of a pipeline without a policy.
    """
    store = begin_flow_run()
    with (
        unfinished(run_name, config),
        RunTracker.start(
            study=config.study,
            run_name=run_name,
            tags={"rm.kind": kind, "rm.seed": str(config.seed), "prefect.flow_run_id": str(runtime.flow_run.id)},
            params=config,
        ) as tracker,
    ):
        # Three runs of one study with one name cannot be told apart in MLflow's lists and legends.
        changes = named_changes(config.model_dump(mode="json"))
        tracker.tell(run_name=changes, is_watched=True)
        say_pages(tracker)
        runs = run_stages(names, config, store, tracker)
        refs = {name: run.ref for name, run in runs.items()}
        cached = {name: run.cached for name, run in runs.items()}
        folder = home() / "reports" / f"{run_name}-{run_key(refs)[:12]}"
        checkpoint = Path(refs["train"].path) / "best"

        def tell() -> tuple[Results, Path]:
            alike = [one for one in list_runs(folder.parent) if one.name.startswith(f"{run_name}-")]
            earlier = {one.name: one.record for one in alike if one.name != folder.name}
            results = gather_results(
                config, store, refs, cached, run_name=run_name, folder_name=folder.name, earlier=earlier
            )
            report = write_report(results, figures(refs), folder / REPORT_FILE)
            write_json(folder / "summary.json", results)
            write_index(folder.parent)
            return results, report

        def track() -> str | None:
            """Log what belongs to the whole run; return the model's registry version, or None while MLflow is away."""
            verdict, more = results["verdict"], results["next_rung"]
            note = verdict_note(verdict, more, *places(report), numbers_line(results["metrics"]))
            hits = ",".join(name for name, hit in cached.items() if hit) or "none"
            tracker.tell(
                run_name=f"{changes} · {run_key(refs)[:KEY_DIGITS]}",
                tags={"rm.key": run_key(refs), "rm.cache": hits} | verdict_tags(verdict, more),
                files={str(report): REPORT_FOLDER},
                note=note,
                study_text=[kind, study_text(config.study)],
            )
            return tracker.register_model(
                checkpoint,
                name=f"rm-{config.study}",
                key=refs["train"].key,
                gate=results["gate"],
                readiness=results["readiness"],
                verdict=verdict,
                next_rung=more,
                note=note,
            )

        with timed_step("report", str(folder)):
            told = run_step("report", tell, last_of(runs))
        results, report = told.found
        with timed_step("register", f"rm-{config.study} in MLflow, with what the run found"):
            version = run_step("register", track, [told.handed]).found
    show_on_page(summary_markdown(results), report, tracker.url)
    return {
        "results": results,
        "report": str(report),
        "checkpoint": str(checkpoint),
        "mlflow_url": tracker.url,
        "pages": own_pages(tracker),
        "executed": [name for name, run in runs.items() if not run.cached],
        "model_version": version,
    }


@contextmanager
def timed_step(name: str, place: str) -> Iterator[None]:
    """Say how long a step after the stages took, and while it takes long, on standard error, how long so far."""
    began = time.monotonic()
    with progress_bar(name):
        yield
    say(f"{name:<10} {time.monotonic() - began:.1f} s  {shown_path(place) if os.path.isabs(place) else place}")


def begin_flow_run() -> Store:
    """Begin a flow run: end runs that a killed process left open, and return the store."""
    store = Store(home() / "store")
    try:
        reap_dead_runs()
    except ServiceError as error:  # of runs that ended long ago: no reason to end this one
        say(f"warning: runs whose process has died may still be shown as running: {error}")
    return store


def run_stages(
    names: Sequence[str],
    config: PipelineConfig,
    store: Store,
    tracker: RunTracker,
    given: Mapping[str, ArtifactRef] | None = None,
) -> dict[str, StageRun]:
    """Run the stages `names`, each after those it reads, and send what they hold to the tracker.

    `given` are artifacts of stages that are not run.
    """
    runs: dict[str, StageRun] = {}

    def run(stage: Stage) -> ArtifactRef:
        after = [runs[needed] for needed in stage.upstream if needed in runs]
        done = runs[stage.name] = run_and_say(store, stage, tracker, after=after)
        say_notices(stage.name, done.ref.folder)
        tracker.log_artifact_folder(done.ref.folder, stage.name)
        return done.ref

    request(names, config, run, given)
    return runs


def last_of(runs: Mapping[str, StageRun]) -> list[str]:
    """Return the task results of the final stages, those whose artifacts no other stage of `runs` reads."""
    read = {needed for run in runs.values() for needed in run.read}
    return [run.handed for name, run in runs.items() if name not in read]


def run_and_say(store: Store, stage: Stage, tracker: RunTracker, *, after: Iterable[StageRun] = ()) -> StageRun:
    """Run one stage, or take it from the store, and say which; `after` are the runs whose artifacts it reads."""
    name = stage.name
    run = run_stage(
        store,
        stage,
        tracker.follow,
        on_interrupt=partial(leave_embedded, tracker),
        waiting=partial(shown_while_waiting, name),
        label=name,
        run=tracker.record.run_name,
        after=after,
    )
    if run.damage:
        say(f"{name:<10} stored artifact was damaged and made again: {run.damage}")
    seconds = (store.manifest(name, run.ref.key) or {}).get("wall_seconds", 0.0)
    say(f"{name:<10} {'cached' if run.cached else f'{seconds:.1f} s'}  {shown_path(run.ref.path)}")
    return run


def leave_embedded(tracker: RunTracker) -> None:
    """End this process after Ctrl-C or SIGTERM where Prefect's API is the embedded one.

    Nobody will see the page of the run, and Prefect would try for minutes to tell a server that is busy.
    """
    if not api_is_embedded():
        return
    tracker.end("KILLED")
    terminate_children()
    below_the_echo()
    print("error: interrupted. Finished stages are stored: the same command continues there.", file=sys.stderr)
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def study_text(study: str) -> str:
    """Say what a study's runs are, where their reports are, and how they are compared, for its page in MLflow."""
    return (
        f"The runs of the study {study}, with the settings in which they differ and the main numbers with intervals. "
        "The page of a run says its verdict and links its report; its numbers.json has all numbers with intervals, "
        f"its settings.yaml all settings, for rm-opt run --config. All reports: {home() / 'reports' / 'index.html'}. "
        "In a terminal, rm-opt runs lists the runs by name, and rm-opt compare NAME NAME compares them."
    )


LACKING = "failed and lacks this run, whose results are stored; `rm-opt store sync` sends them when it works again"


def own_pages(tracker: RunTracker) -> dict[str, str]:
    """Addresses of this flow run in MLflow and in Prefect, of those that a server shows; or that MLflow lacks it."""
    found = {}
    if tracker.pending:
        found["MLflow"] = LACKING
    elif tracker.record.tracking_uri.startswith("http") and tracker.url is not None:
        found["MLflow"] = tracker.url
    if not api_is_embedded():
        found["Prefect"] = str(runtime.flow_run.ui_url)
    return found


def say_pages(tracker: RunTracker) -> None:
    """Say where this flow run can be watched."""
    for name, address in own_pages(tracker).items():
        say(f"{name:<10} {address}")


def places(report: Path | None) -> tuple[dict[str, str], list[str]]:
    """List where this flow run is shown, for its description in MLflow: links by what they are called, other places.

    `report` is logged in `REPORT_FOLDER`.
    """
    links, others = {}, [f"Prefect flow run {runtime.flow_run.id}"]
    if report is not None:
        links["Report"] = f"{RUN_FILES}{REPORT_FOLDER}/{report.name}"
        others.insert(0, str(report))
    if not api_is_embedded():
        links["Flow run in Prefect"] = str(runtime.flow_run.ui_url)
        others.pop()
    return links, others


def show_on_page(summary: str, report: Path, mlflow_url: str | None, more: Mapping[str, str] | None = None) -> None:
    """Leave a card on the flow run's page: links, of which the report's is first, and a readable summary in Markdown.

    One card, because the page shows cards in no order.

    Args:
        summary: whose first line says what the run came to.
        report: it is logged in `REPORT_FOLDER` of the run in MLflow, whose page shows it.
        mlflow_url: of the run.
        more: further addresses by what they are called.
    """
    links = dict[str, str]()
    if mlflow_url is not None and mlflow_url.startswith("http"):
        run, _, parameters = mlflow_url.partition("?")
        links["Report"] = f"{run}/artifacts/{REPORT_FOLDER}/{quote(report.name)}?{parameters}"
        links["This run in MLflow"] = mlflow_url
    first = linked(links | dict(more or {}), [] if links else [f"Report: {report}"])
    create_markdown_artifact(f"{first}\n\n{summary}", "report", summary.partition("\n")[0].lstrip("# "))


def shown_path(path: str) -> str:
    """The path as people want to read it: relative where it is below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
