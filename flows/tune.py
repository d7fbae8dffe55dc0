"""A search for the best settings: prepare, trials over rungs, choose, confirm with fresh seeds, report. Order only."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import runtime
from prefect.exceptions import TerminationSignal
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.console import say
from flows.form import FIELDS, Form, configured_flow, presets_for
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    leave_embedded,
    open_store,
    places,
    run_stages,
    show_on_page,
)
from flows.tune_plan import tuned_base, tuning_plan
from flows.tune_results import gather_tuning, write_recipe
from flows.tune_run import Tuning
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.store import ArtifactRef, flatten, make_key
from rmcore.data.table import count_pairs, read_pairs
from rmcore.reporting.html.index import write_index
from rmcore.reporting.html.note import run_note
from rmcore.reporting.html.tuning import draw_tuning, tuning_markdown, write_tuning_report
from rmcore.reporting.tuning_schema import TuningResults
from rmcore.stages.interface import observations_of
from rmcore.study.objectives import Objective, higher_is_better, require_objective
from rmcore.study.search_space import default_space, parse_space
from tasks.device import device_slots
from tasks.stages import run_step
from tasks.tracking import RunTracker

NUM_SEEDS = 3
"""Fresh seeds of the confirmation, unless others are asked for."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")
FORM = Form(
    "minilm",
    {name: FIELDS[name] for name in ("data", "model", "seed", "study")},
    ("data", "model", "train", "evaluate"),
    presets_for("run"),
)
PICTURE = """
prepare ─┬─> trial 0, the defaults: 1/9 ──> 1/3 ──> all of its steps ─┐
         ├─> trial 1: 1/9 ──> 1/3, given up                           ├─> the best ──> confirmation ──> report
         └─> trial n: 1/9, given up                                  ─┘
confirmation: winner and defaults with fresh seeds, prepare ──> train ──> evaluate on the test pairs
"""


@configured_flow("tune", FORM, PICTURE, "-tune", task_runner=ThreadPoolTaskRunner(max_workers=device_slots()))
def tune(
    config: PipelineConfig,
    budget: str | None = "60m",
    trials: Annotated[int | None, Field(ge=1, le=10_000)] = None,
    objective: Objective = "accuracy",
    space: dict[str, Any] | None = None,
    name: str | None = None,
    seeds: Annotated[int, Field(ge=2, le=100)] = NUM_SEEDS,
    storage: str | None = None,
) -> dict[str, Any]:
    """Search for the best settings of a reward model on these pairs within a budget, and say what the best are worth.

    Trials see training and validation pairs; bad ones are given up early. The winner and the defaults are then trained
    with fresh seeds and measured on test pairs that no trial saw. A search that was stopped resumes where it was.

    Args:
        config: data, model, and the defaults, which are the first trial.
        budget: of all runs of this search, the confirmation included: 90s, 60m or 1.5h; left out, trials alone counts.
        trials: stop after this many, those that are given up or fail included.
        objective: what is compared on the validation pairs: accuracy, loss, length-matched (accuracy between answers
            of about the same length) or best-of-k (how often the best scored of several answers was never rejected).
        space: the settings that are searched, each with choices or a range; left out, a small space around the
            defaults.
        name: of the search; the same name resumes it. Left out: study and objective.
        seeds: fresh seeds of the confirmation.
        storage: database of the search as an SQLAlchemy URL without a password, for example of PostgreSQL; left out, a
            file of this home.

    Returns:
        {"results": everything the report shows, "report": path, "recipe": path, "mlflow_url": address or None,
        "computed": labels of what ran, "failed": labels of trials that failed}.

    Raises:
        ConfigError: neither budget nor trials, a space or objective that cannot be used, a budget below one trial, or a
            search of that name with other settings; or no trial came to its end.
    """
    from rmcore.study.search import earlier_best, open_search, open_storage

    if budget is None and trials is None:
        raise ConfigError("neither a budget nor a number of trials is given, so the search would never end; give one.")
    name = checked_name(name or f"{config.study}-{objective}")
    base = tuned_base(config)
    chosen = default_space(base) if space is None else parse_space(space, base)
    store = open_store()
    plan = tuning_plan(base, store, home(), seeds=seeds, budget=budget)
    for problem in plan.problems:
        say(f"time unknown: {problem}")
    if plan.budget is not None and plan.times is not None:
        plan.budget.check()
    tuning = home() / "tuning"
    # Before MLflow's thread begins: see `open_storage`.
    earlier = earlier_best(tuning, name, chosen, base, higher=higher_is_better(objective))
    opened = open_storage(tuning / name, storage)
    identity = {"name": name, "config": base.model_dump(mode="json"), "space": chosen.to_dict(), "objective": objective}
    key = make_key(identity)[:12]
    with RunTracker.start(
        base.study,
        name,
        {"rm.kind": "tuning", "rm.tuning": key, "prefect.flow_run_id": str(runtime.flow_run.id)},
        flatten(base.model_dump(mode="json")),
        uid=f"tune-{key}",
    ) as tracker:
        tracker.watch_machine()
        prepared = run_stages(("prepare",), base, store, tracker)["prepare"]
        require_objective(objective, _pairs(prepared.ref, "validation"))
        require_objective(objective, _pairs(prepared.ref, "test"), "test")  # told before the search is paid for
        frozen = {
            "base": base.model_dump(mode="json", exclude={"study", "loggers", "skip", "device"}),
            "pairs": prepared.ref.digest,
            "space": chosen.to_dict(),
            "objective": objective,
        }
        with open_search(
            tuning / name,
            base,
            chosen,
            objective,
            frozen,
            num_pairs=_num_trained(Path(prepared.ref.path), base),
            warm=[drawn for kept in earlier.values() for drawn in kept],
            parallel=device_slots() > 1,
            storage=opened,
        ) as search:
            run = Tuning(name, key, base, chosen, objective, store, search, plan.budget, trials)
            run.notes += [f"begun with the best {len(kept)} of {other}" for other, kept in earlier.items()]
            try:
                run.search_all()
                best = search.best()
                cells = run.confirm(seeds)
            except (KeyboardInterrupt, TerminationSignal):
                say("stopped; all finished rungs are kept: the same command resumes from there")
                leave_embedded(tracker)
                raise
            folder = home() / "reports" / f"{name}-{key}"

            def tell() -> tuple[TuningResults, Path]:
                results = gather_tuning(run, best, cells, prepared.ref)
                recipe = write_recipe(run, best, results, folder / "recipe.yaml")
                results["recipe"] = str(recipe)
                figures = draw_tuning(results, folder / "figures")
                report = write_tuning_report(results, figures, recipe.read_text(encoding="utf-8"), folder / REPORT_FILE)
                write_json(folder / "summary.json", results)
                write_index(folder.parent)
                track(tracker, results, report, [*figures.values(), recipe])
                return results, report

            results, report = run_step("report", tell, run.handed).found
    show_on_page(tuning_markdown(results), report, tracker.url)
    return {
        "results": results,
        "report": str(report),
        "recipe": results["recipe"],
        "mlflow_url": tracker.comparison_url,
        "computed": run.computed,
        "failed": [f"trial {one['number']}" for one in results["trials"] if one["state"] == "failed"],
    }


def checked_name(name: str) -> str:
    """The name of a search, which is a folder's.

    Raises:
        ConfigError: it cannot be one.
    """
    if NAME.fullmatch(name):
        return name
    raise ConfigError(f"a search cannot be called {name!r}: use letters, digits, '.', '_' and '-', at most 61.")


def _num_trained(prepared: Path, base: PipelineConfig) -> int:
    """Pairs that a trial is trained on; or observations, where the data say more than strict pairs."""
    said = observations_of(prepared, "train") if base.train.objective == "auto" else None
    return count_pairs(prepared / "train.parquet") if said is None else len(said)


def _pairs(prepared: ArtifactRef, split: str) -> list[Any]:
    place = Path(prepared.path) / f"{split}.parquet"
    return read_pairs(place) if place.is_file() else []


def track(tracker: RunTracker, results: TuningResults, report: Path, files: list[Path]) -> None:
    """Send what belongs to the whole search, and describe it."""
    for file in files:
        tracker.log_file(file, "figures" if file.suffix == ".png" else REPORT_FOLDER)
    tracker.log_file(report, REPORT_FOLDER)
    tracker.log_table([flat_trial(one) for one in results["trials"]], "trials")
    found = {
        "tune/selected": results["winner"]["selected"],
        "tune/optimism": results["winner"]["optimism"],
        "tune/gain": results["difference"]["value"],
        "tune/gain_ci_low": results["difference"]["ci_low"],
        "tune/gain_ci_high": results["difference"]["ci_high"],
        "cost/search_seconds": results["cost"]["search_seconds"],
        "cost/confirmation_seconds": results["cost"]["confirmation_seconds"],
    }
    tracker.log_metrics({name: value for name, value in found.items() if value is not None})
    tracker.set_tags({"rm.verdict": "better" if results["is_better"] else "not shown to be better"})
    tracker.describe(run_note(results["headline"], *places(report)))


def flat_trial(one: Mapping[str, Any]) -> dict[str, Any]:
    """A trial as one row of a table."""
    values = {f"value_{place}": value for place, value in enumerate(one["values"], 1)}
    kept = {name: one[name] for name in ("number", "state", "seconds", "why")}
    return kept | values | {name: str(value) for name, value in one["settings"].items()}
