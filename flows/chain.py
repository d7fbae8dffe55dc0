"""A chain of stages with what it tells: tracked, reported, described in MLflow and on the flow run's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import runtime

from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    begin_flow_run,
    last_of,
    own_pages,
    places,
    run_name_of,
    run_stages,
    show_on_page,
)
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import write_json
from rmcore.core.store import ArtifactRef, Store
from rmcore.readiness.verdict import verdict_tags
from rmcore.reporting.html.blocks import Block, markdown
from rmcore.reporting.html.note import run_note, verdict_note
from rmcore.reporting.html.page import write_block_report
from rmcore.reporting.runs import write_index
from rmcore.stages.results import figures, run_key
from tasks.checkpoints import given_checkpoint, trained_key
from tasks.model_versions import confirmation_tags
from tasks.stages import run_step
from tasks.tracking import RunTracker


@dataclass(frozen=True, slots=True)
class Presentation:
    """How a chain of stages presents what it found."""

    results: Callable[[Mapping[str, ArtifactRef]], dict[str, Any]]
    """Gives the record of the run, from the artifacts by stage."""
    block: Callable[[dict[str, Any]], Block]
    """Gives the record as people read it, in the report and on the flow run's page."""
    headline: Callable[[dict[str, Any]], str] | None = None
    """Gives it in one sentence; None where the record has a `verdict` of the ladder and the `next_rung`."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """Texts below the figures, by name."""


def run_chain(
    config: PipelineConfig, names: Sequence[str], view: Presentation, *, kind: str, checkpoint: str | None = None
) -> dict[str, Any]:
    """Run the stages `names` with tracking, and tell what they found: in a report, in MLflow, on the flow run's page.

    `checkpoint` replaces the stage train.

    Returns:
        The flow's outcome: {"results": the record, "figures": paths by name, "folder": of the run, below the home's
        reports, "report": file, "executed": stages that were computed, "mlflow_url"}.
    """
    store = begin_flow_run()
    if checkpoint is not None:
        checkpoint = str(Path(checkpoint).expanduser().resolve())  # the record is read in other folders, too
        store.hold_around(checkpoint)
    run_name = run_name_of(config, kind)
    with RunTracker.start(
        study=config.study,
        run_name=run_name,
        tags={"rm.kind": kind, "rm.seed": str(config.seed), "prefect.flow_run_id": str(runtime.flow_run.id)}
        | ({} if checkpoint is None else {"rm.checkpoint": checkpoint}),
        params=config,
    ) as tracker:
        tracker.tell(is_watched=True)
        there = {} if checkpoint is None else {"train": given_checkpoint(checkpoint, home() / "given")}
        runs = run_stages(names, config, store, tracker, there)
        refs = there | {name: run.ref for name, run in runs.items()}
        key = run_key(refs)
        cached = [name for name, run in runs.items() if run.cached]
        tracker.tell(tags={"rm.key": key, "rm.cache": ",".join(cached) or "none"})
        folder = home() / "reports" / f"{run_name}-{key[:12]}"
        place = checkpoint or str(Path(refs["train"].path) / "best")
        own = {"config": config.model_dump(mode="json"), "checkpoint": place, "checkpoint_digest": refs["train"].digest}
        told = partial(_tell, view, refs, own, folder, tracker)
        results, report = run_step("report", told, last_of(runs)).found
        verdict = results.get("verdict")
        if isinstance(verdict, dict) and verdict.get("rung") == 4:
            trained = _trained(refs, checkpoint, store)
            if trained is not None:
                tracker.tell(confirmation={"key": trained, "tags": confirmation_tags(results["verdict"])})
    show_on_page(markdown(view.block(results)), report, tracker.url)
    return {
        "results": results,
        "figures": {name: str(path) for name, path in figures(refs).items()},
        "folder": str(folder),
        "report": str(report),
        "executed": [name for name, run in runs.items() if not run.cached],
        "mlflow_url": tracker.url,
        "pages": own_pages(tracker),
    }


def _tell(
    view: Presentation, refs: Mapping[str, ArtifactRef], own: Mapping[str, Any], folder: Path, tracker: RunTracker
) -> tuple[dict[str, Any], Path]:
    """Write record and report, and describe the run in MLflow. `own` is what another command continues it with."""
    results = {**view.results(refs), **own}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", results)
    last_first = {name: refs[name] for name in reversed(list(refs))}  # the requested stages are at its end
    shown = figures(last_first)
    report = write_block_report(folder.name, view.block(results), shown, folder / REPORT_FILE, view.captions)
    write_index(folder.parent)
    tracker.tell(files={str(report): REPORT_FOLDER})
    if view.headline is None:
        verdict, more = results["verdict"], results["next_rung"]
        tracker.tell(tags=verdict_tags(verdict, more), note=verdict_note(verdict, more, *places(report)))
    else:
        tracker.tell(note=run_note(view.headline(results), *places(report)))
    return results, report


def _trained(refs: Mapping[str, ArtifactRef], checkpoint: str | None, store: Store) -> str | None:
    """Key of the training that the judged reward model comes from; None where it was trained elsewhere."""
    return refs["train"].key if checkpoint is None else trained_key(checkpoint, store)
