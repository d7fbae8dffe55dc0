"""An experiment: register, plan, run the cells, judge, report. Order only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from prefect import runtime
from prefect.exceptions import TerminationSignal
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from experiments.library import Chosen, load_experiment, restrict
from experiments.schema import Arm, Experiment, changed_settings
from experiments.shipped import SHIPPED
from experiments.sizes import Size
from flows.console import say
from flows.form import described_flow
from flows.matrix import MatrixRunner, Outcome, at_once, cell_tracker
from flows.pipeline import REPORT_FILE, REPORT_FOLDER, begin_flow_run, leave_embedded, places, say_pages, show_on_page
from flows.planning import MatrixPlan, Runner, frozen, judged, make_plan, matrix_key, measured_cell
from flows.pool import PoolRunner
from flows.settings import require_names
from rmcore.config.pipeline import GROUPS
from rmcore.core.errors import TrainingError
from rmcore.core.files import write_json, write_text
from rmcore.core.metrics import CELL_METRICS, CURVES, HEADLINE
from rmcore.core.store import ArtifactRef, Store, flatten
from rmcore.reporting.experiment_schema import (
    ArmResult,
    CellResult,
    Cost,
    CurveData,
    ExperimentResults,
    MetricInfo,
    Registration,
)
from rmcore.reporting.figures.arms import declared_colours
from rmcore.reporting.figures.claims import tally, verdict_words
from rmcore.reporting.figures.experiment import draw_experiment
from rmcore.reporting.html.experiment import experiment_markdown, write_experiment_report
from rmcore.reporting.html.note import experiment_note, numbers_line, run_note
from rmcore.reporting.runs import write_index
from rmcore.reporting.schema import Metric
from rmcore.stages.results import artifact_seconds, environment, read_json, run_key
from rmcore.study.analysis import Cells, arm_bands, arm_metrics
from rmcore.study.cells import TEST_METRICS, Measured
from rmcore.study.plan import Cell
from rmcore.study.registration import register
from tasks.comparison_view import RUN_COLOUR, cells_view, view_tags
from tasks.device import device_slots
from tasks.projection import NOTE_TAG
from tasks.run_record import interval_tags
from tasks.sharing import shared_store
from tasks.stages import run_step
from tasks.tracking import RunTracker

ExperimentChoice = Annotated[str, Field(json_schema_extra={"enum": list(SHIPPED)})]


@described_flow(
    "experiment",
    """
    register the claims ──> cells ──> judge ──> report
    a cell is one arm under one seed: prepare ──> train ──> evaluate (──> what else a claim needs)
    """,
    lambda given: f"{Path(given['experiment']).stem}-{given['size']}",  # or the file of one's own
    task_runner=ThreadPoolTaskRunner(max_workers=device_slots()),
)
def experiment(
    experiment: ExperimentChoice = "ablation",
    size: Size = "smoke",
    seeds: Annotated[int | None, Field(ge=1, le=100)] = None,
    arms: list[str] | None = None,
    budget_minutes: Annotated[float | None, Field(gt=0)] = None,
    model: str | None = None,
    data: str | None = None,
    epochs: Annotated[float | None, Field(gt=0)] = None,
    device: str | None = None,
    runner: Runner = "threads",
) -> dict[str, Any]:
    """Compare recipes for reward models on pre-registered hypotheses; only cells that are missing run.

    Args:
        experiment: which question: baseline, ablation, lora, sensitivity or optimizers (the command line
            also takes a YAML file).
        size: smoke (synthetic benchmark, minutes), gold (the same at a size that decides), small (real pairs and a
            pretrained encoder) or paper (Qwen2.5-0.5B on hub data, for a GPU).
        seeds: replicates of every arm; left out, as declared.
        arms: compare only these arms; left out, all of them.
        budget_minutes: refuse to start if the missing cells would take longer; left out, as declared.
        model: a folder, a hub name, tiny, minilm, deberta or llama, for all arms; left out, that of the size.
        data: a file or hub name of preference pairs, some of which are held out; left out, those of the size.
        epochs: passes over the training pairs; left out, as the size says.
        device: cpu or cuda, for cells that other machines compute; left out, what this machine has.
        runner: threads computes the cells on this machine; pool hands them to the machines that run `rm-opt worker`.

    Returns:
        {"results": everything the report shows, "report": path, "mlflow_url" and "mlflow_charts_url": the
        cells in MLflow or None,
        "computed": labels of the cells that ran, "failed": labels of the cells that failed}.

    Raises:
        FailedCellsError: some cells failed; it holds what would have been returned.
    """
    chosen: Chosen = {
        **{"arms": arms, "seeds": seeds, "budget_minutes": budget_minutes},
        **{"model": model, "data": data, "epochs": epochs, "device": device},
    }
    declared = restrict(load_experiment(experiment, size), **chosen)
    require_names(*(arm.config for arm in declared.arms()))
    store = begin_flow_run()
    plan = make_plan(declared, store, home())
    plan.check_budget()
    shared, place = shared_store(), home() / "registrations" / f"{declared.name}-{declared.size}"
    registration = register(place, frozen(declared), None if shared is None else shared.register)
    said = command(declared, experiment, chosen)
    outcome = Matrix(declared, store, registration, said, runner).run(plan)
    if outcome["failed"]:
        raise FailedCellsError(outcome)
    return outcome


class FailedCellsError(TrainingError):
    """Some cells failed; the others were run, judged and reported. Ends the flow run as Failed."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        self.outcome = outcome
        names = ", ".join(outcome["failed"])
        super().__init__(
            f"{len(outcome['failed'])} cells failed: {names}. The report has the others: {outcome['report']}"
        )


@dataclass
class Matrix:
    """One run of a registered experiment, and how far it is."""

    declared: Experiment
    store: Store
    registration: Registration
    command: str
    runner: Runner

    def __post_init__(self) -> None:
        self.measured: dict[str, Measured] = {}
        """Cells by label."""
        self.expected: float | None = None
        """Seconds that what has run was expected to take; None: unknown."""
        self.started = time.monotonic()
        self.key = matrix_key(self.declared, self.registration["hash"])
        self.study = f"{self.declared.name}-{self.declared.size}"
        self.colours = declared_colours([arm.name for arm in self.declared.arms()], self.declared.control)

    def run(self, plan: MatrixPlan) -> dict[str, Any]:
        """Run what is missing, judge and report."""
        with RunTracker.start(
            self.study,
            f"{self.study} {self.registration['hash'][:8]}",
            {
                "rm.kind": "matrix",
                "rm.matrix": self.key,
                "rm.registration": self.registration["hash"],
                "rm.registered_at": self.registration["frozen_at"],
                "prefect.flow_run_id": str(runtime.flow_run.id),
            },
            self.declared.base,
            uid=self.key,
        ) as tracker:
            say_pages(tracker)
            self._say_plan(plan)
            tracker.tell(files={self.registration["path"]: "registration"})
            try:
                outcomes, handed = self._run_cells(plan)
            except (KeyboardInterrupt, TerminationSignal):
                leave_embedded(tracker)
                raise
            found = run_step("judge", lambda: gather(self, outcomes), handed)
            results = found.found
            report = run_step("report", lambda: self._report(tracker, results, outcomes), [found.handed]).found
        return self._outcome(outcomes, results, report, tracker)

    def _say_plan(self, plan: MatrixPlan) -> None:
        say(f"registration {self.registration['hash'][:12]} of {self.registration['frozen_at']}")
        for problem in plan.probed.problems:
            say(f"time unknown: {problem}")
        if plan.probed.is_device_held:
            say(f"so budget_minutes={self.declared.budget_minutes:g} is not checked; the cells wait for the device")
        expected = "" if plan.seconds is None else f", about {plan.seconds / 60:.0f} min"
        say(f"{len(plan.cells)} cells, {len(plan.due)} to run{expected}")

    def _run_cells(self, plan: MatrixPlan) -> tuple[dict[str, Outcome], list[Any]]:
        """Run the cells; the last is what they handed on."""
        ready = PoolRunner(self.study, self.key).ready if self.runner == "pool" else at_once
        runner = MatrixRunner(self.study, self.store, self._start_tracker, self._finish_tracker, ready=ready)
        self.expected = plan.seconds
        return runner.run(plan.cells), runner.handed

    def _start_tracker(self, cell: Cell, refs: dict[str, ArtifactRef]) -> RunTracker:
        tags = {"rm.kind": "cell", "rm.matrix": self.key, RUN_COLOUR: self.colours[cell.arm]}
        return cell_tracker(self.study, cell.label, self.key, cell, refs, tags, self._varied())

    def _finish_tracker(self, tracker: RunTracker, cell: Cell, refs: dict[str, ArtifactRef]) -> None:
        part = f"{cell.label}: a cell of {self.study}, {self.declared.title}"
        note = run_note(part, *places(None), numbers_line(_card(refs)) if "evaluate" in refs else "")
        found = measured_cell(self.declared, cell, refs)
        self.measured[cell.label] = found
        declared = {name: one.value for name, one in found.samples.items() if name not in HEADLINE}
        shown = {name: _card(refs)[TEST_METRICS[name]] for name in declared if name in TEST_METRICS}
        spent = artifact_seconds(self.store, refs.values(), on_device=True)
        tracker.tell(note=note, tags=interval_tags(shown), numbers=declared | {"cost/device_hours": spent / 3600})

    def _report(self, tracker: RunTracker, results: ExperimentResults, outcomes: Mapping[str, Outcome]) -> Path:
        """Figures, report, MLflow's links, and the summary on the flow run's page."""
        claimed = {one.metric for one in self.declared.hypotheses}
        with_interval = [name for name in self.declared.metrics if name in claimed and name in TEST_METRICS]
        metrics = list(self.declared.metrics)
        view = cells_view(tracker.record.run_name, self.key, metrics, with_interval, self._varied())
        tracker.tell(experiment_tags=view_tags(view))
        results["mlflow_url"] = tracker.comparison(self.key)
        folder = home() / "reports" / f"{self.study}-{self.key}"
        figures = draw_experiment(results, folder / "figures")
        report = write_experiment_report(results, figures, folder / REPORT_FILE)
        markdown = experiment_markdown(results)
        write_text(folder / "summary.md", markdown, durable=False)
        write_json(folder / "summary.json", results)
        write_index(folder.parent)
        self._track(tracker, results, figures, report)
        cells = results["mlflow_url"]
        more = {} if cells is None else {"The cells side by side in MLflow": cells}
        show_on_page(markdown, report, tracker.url, more)
        return report

    def _track(
        self, tracker: RunTracker, results: ExperimentResults, figures: Mapping[str, Path], report: Path
    ) -> None:
        """Send what belongs to the whole matrix, and describe it and its experiment."""
        told = {str(file): REPORT_FOLDER for file in (report, report.with_name("summary.json"))}
        tracker.tell(
            files={str(figure): "figures" for figure in figures.values()} | told,
            numbers=summary_metrics(results, self.declared.metrics[0]),
            tags={f"rm.verdict.{one['name']}": verdict_words(one) for one in results["hypotheses"]},
        )
        links, others = places(report)
        views = {
            "Cells side by side": tracker.comparison(self.key),
            "Charts of the cells": tracker.comparison(self.key, charts=True),
        }
        shown = {name: address for name, address in views.items() if address is not None}
        headline = f"{tally(results['hypotheses'])}. {results['question']}"
        about = experiment_note(f"{results['title']}: {tally(results['hypotheses'])}", shown)
        tracker.tell(note=run_note(headline, links | shown, others), experiment_tags={NOTE_TAG: about})

    def _varied(self) -> list[str]:
        """Settings in which the arms differ, as MLflow names them."""
        flat = [flatten(arm.config.model_dump(mode="json"), GROUPS) for arm in self.declared.arms()]
        names = list(dict.fromkeys(name for one in flat for name in one))
        return [name for name in names if len({str(one.get(name)) for one in flat}) > 1]

    def _outcome(
        self, outcomes: dict[str, Outcome], results: ExperimentResults, report: Path, tracker: RunTracker
    ) -> dict[str, Any]:
        return {
            "results": results,
            "report": str(report),
            "mlflow_url": tracker.comparison(self.key),
            "mlflow_charts_url": tracker.comparison(self.key, charts=True),
            "computed": [label for label, outcome in outcomes.items() if outcome.computed],
            "failed": [label for label, outcome in outcomes.items() if outcome.error],
        }


def _card(refs: Mapping[str, ArtifactRef]) -> Mapping[str, Metric]:
    """The numbers of a cell on its held-out pairs, by name."""
    found: Mapping[str, Metric] = read_json(refs["evaluate"], "metrics.json")["metrics"]["test"]
    return found


def summary_metrics(results: ExperimentResults, main: str) -> dict[str, float]:
    """The parent run's own numbers: what it cost, each arm's mean of the main metric, each hypothesis' value.

    The file `summary.json` has the others, and all intervals.
    """
    found: dict[str, float | None] = {"cost/device_hours": results["cost"]["device_seconds"] / 3600}
    found |= {f"{main}.{arm['name']}": arm["metrics"][main]["value"] for arm in results["arms"]}
    found |= {f"verdict/{one['name']}": one["value"] for one in results["hypotheses"]}
    return {name: value for name, value in found.items() if value is not None}


def gather(matrix: Matrix, outcomes: Mapping[str, Outcome]) -> ExperimentResults:
    """Judge the hypotheses and describe every arm and cell."""
    declared = matrix.declared
    arms = declared.arms()
    finished = [cell for label, cell in matrix.measured.items() if label in outcomes and not outcomes[label].error]
    measured: Cells = {(cell.arm, cell.seed): cell for cell in finished}
    control = declared.arm_name(declared.control)
    return {
        "name": declared.name,
        "size": declared.size,
        "title": declared.title,
        "question": declared.question,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "control": control,
        "seeds": list(declared.seeds),
        "metrics": {name: _info(name) for name in declared.metrics},
        "registration": matrix.registration,
        "hypotheses": judged(declared, measured),
        "arms": [_arm(arm, declared, control, measured) for arm in arms],
        "cells": [
            _cell(outcome, measured.get((outcome.cell.arm, outcome.cell.seed)), matrix) for outcome in outcomes.values()
        ],
        "curves": {metric: _curves(metric, list(measured.values())) for metric in CURVES},
        "notes": _notes(matrix, arms, outcomes),
        "cost": _cost(matrix, outcomes),
        "command": matrix.command,
        "base": declared.base.model_dump(mode="json"),
        "environment": environment(declared.base.device),
        "mlflow_url": None,
    }


def command(declared: Experiment, named: str, chosen: Chosen) -> str:
    """The command line that runs the same matrix."""
    budget = chosen.get("budget_minutes")
    given = {
        "--size": declared.size if named in SHIPPED else None,
        "--seeds": chosen.get("seeds"),
        "--arms": None if chosen.get("arms") is None else ",".join(chosen["arms"] or ()),
        "--budget": None if budget is None else f"{budget:g}",
        **{f"--{name}": chosen.get(name) for name in ("model", "data", "epochs", "device")},
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return shlex.join(["rm-opt", "experiment", named, *words])


def _info(name: str) -> MetricInfo:
    spec = CELL_METRICS[name]
    return {"label": spec.cell_label or spec.label, "unit": spec.unit, "higher_is_better": spec.higher_is_better}


def _arm(arm: Arm, declared: Experiment, control: str, measured: Cells) -> ArmResult:
    metrics = arm_metrics(measured, arm.name, declared.seeds, declared.metrics)
    base = declared.base.model_copy(update={"study": declared.name})
    return {
        "name": arm.name,
        "is_control": arm.name == control,
        "changes": changed_settings(base, arm.config),
        "merged": list(arm.merged),
        "metrics": metrics,
        "bands": arm_bands(metrics),
    }


def _cell(outcome: Outcome, measured: Measured | None, matrix: Matrix) -> CellResult:
    failed = outcome.error is not None
    return {
        "arm": outcome.cell.arm,
        "seed": outcome.cell.seed,
        "status": "failed" if failed else "computed" if outcome.computed else "cached",
        "error": outcome.error,
        "key": None if failed else run_key(outcome.refs),
        "metrics": {name: None if measured is None else measured.value(name) for name in matrix.declared.metrics},
        "device_seconds": None if failed else artifact_seconds(matrix.store, outcome.refs.values(), on_device=True),
        "diagnoses": [] if measured is None else [asdict(found) for found in measured.diagnoses],  # type: ignore[misc]
        "gate": [] if measured is None else [asdict(check) for check in measured.gate],  # type: ignore[misc]
        "paths": {name: ref.path for name, ref in outcome.refs.items()},
    }


def _curves(metric: str, cells: Sequence[Measured]) -> list[CurveData]:
    curves: list[CurveData] = []
    for cell in cells:
        points = {int(row["step"]): row["metrics"].get(metric) for row in cell.history if metric in row["metrics"]}
        kept = {step: float(value) for step, value in sorted(points.items()) if value is not None}
        if kept:
            curves.append({"arm": cell.arm, "seed": cell.seed, "steps": list(kept), "values": list(kept.values())})
    return curves


def _notes(matrix: Matrix, arms: Sequence[Arm], outcomes: Mapping[str, Outcome]) -> list[str]:
    notes = [f"{', '.join(arm.merged)}: the same settings as {arm.name}; merged into it." for arm in arms if arm.merged]
    declared = matrix.declared
    early = sum(_made_before(matrix.store, outcome, matrix.registration["frozen_at"]) for outcome in outcomes.values())
    if early:
        notes.append(
            f"{early} of {len(outcomes)} cells had been trained before this registration was frozen, by an earlier run "
            "that shared them: for these the claims were not written down before the data."
        )
    if any(CELL_METRICS[name].unit in ("seconds", "pairs/s") for name in declared.metrics):
        notes.append(
            f"Times and throughputs were taken with up to {device_slots()} cells side by side, those of cached "
            "cells earlier: what else the machine did then is in them. Compare speeds on an idle machine."
        )
    failed = [label for label, outcome in outcomes.items() if outcome.error]
    if failed:
        notes.append(f"{len(failed)} of {len(outcomes)} cells failed and are missing everywhere: {', '.join(failed)}.")
    return notes


def _made_before(store: Store, outcome: Outcome, frozen_at: str) -> bool:
    ref = outcome.refs.get("train")
    manifest = (store.manifest("train", ref.key) if ref else None) or {}
    return "created" in manifest and manifest["created"] < datetime.fromisoformat(frozen_at).timestamp()


def _cost(matrix: Matrix, outcomes: Mapping[str, Outcome]) -> Cost:
    refs = [ref for outcome in outcomes.values() for ref in outcome.refs.values()]
    failed = sum(outcome.error is not None for outcome in outcomes.values())
    computed = sum(outcome.computed and outcome.error is None for outcome in outcomes.values())
    return {
        "estimated_seconds": matrix.expected,
        "measured_seconds": artifact_seconds(matrix.store, refs),
        "device_seconds": artifact_seconds(matrix.store, refs, on_device=True),
        "run_seconds": time.monotonic() - matrix.started,
        "num_computed": computed,
        "num_cached": len(outcomes) - computed - failed,
        "num_failed": failed,
    }
