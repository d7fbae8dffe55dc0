"""An experiment: register, plan, run the cells, judge, report. Order only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import runtime
from prefect.exceptions import TerminationSignal
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from experiments.library import SHIPPED, Chosen, load_experiment, restrict
from experiments.sizes import Size
from flows.console import say
from flows.form import described_flow
from flows.hub_names import require_names
from flows.matrix import MatrixRunner, Outcome, at_once, cell_tracker
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    begin_flow_run,
    leave_embedded,
    log_pairs,
    places,
    say_pages,
    show_on_page,
)
from flows.planning import MatrixPlan, Runner, frozen, make_plan, matrix_key, measured_cell
from flows.pool import PoolRunner
from flows.results import MatrixState, command, gather
from rmcore.config.pipeline import GROUPS
from rmcore.core.errors import TrainingError
from rmcore.core.files import write_json, write_text
from rmcore.core.hardware import money, price_per_hour
from rmcore.core.metrics import HEADLINE
from rmcore.core.store import ArtifactRef, flatten
from rmcore.reporting.experiment_schema import ArmResult, ExperimentResults
from rmcore.reporting.figures.arms import declared_colours
from rmcore.reporting.figures.claims import tally, verdict_words
from rmcore.reporting.figures.experiment import draw_experiment
from rmcore.reporting.html.experiment import experiment_markdown, write_experiment_report
from rmcore.reporting.html.index import write_index
from rmcore.reporting.html.note import experiment_note, numbers_line, run_note
from rmcore.reporting.schema import Metric
from rmcore.stages.results import artifact_seconds, read_json
from rmcore.study.cells import TEST_METRICS
from rmcore.study.plan import Cell
from rmcore.study.registration import register
from tasks.comparison_view import cells_view, view_tags
from tasks.device import device_slots
from tasks.headline import interval_tags
from tasks.model_training import RUN_COLOUR
from tasks.projection import NOTE_TAG
from tasks.run_record import plain_table
from tasks.sharing import write_once
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
    grid: bool = False,
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
        grid: every combination of levels instead of one factor at a time (sensitivity).
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
        **{"arms": arms, "seeds": seeds, "grid": grid, "budget_minutes": budget_minutes},
        **{"model": model, "data": data, "epochs": epochs, "device": device},
    }
    declared = restrict(load_experiment(experiment, size), **chosen)
    require_names(*(arm.config for arm in declared.arms()))
    store = begin_flow_run()
    plan = make_plan(declared, store, home())
    plan.check_budget()
    registration = register(
        home() / "registrations" / f"{declared.name}-{declared.size}", frozen(declared), write_once()
    )
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
class Matrix(MatrixState):
    """Runs a registered experiment."""

    runner: Runner = "threads"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        cost = {"cost/device_hours": spent / 3600, "cost/money": money(spent, price_per_hour())}
        numbers = declared | {name: value for name, value in cost.items() if value is not None}
        tracker.tell(note=note, tags=interval_tags(shown), numbers=numbers)

    def _report(self, tracker: RunTracker, results: ExperimentResults, outcomes: Mapping[str, Outcome]) -> Path:
        """Figures, report, MLflow's tables and links, and the summary on the flow run's page."""
        claimed = {one.metric for one in self.declared.hypotheses}
        with_interval = [name for name in self.declared.metrics if name in claimed and has_interval(name)]
        metrics = list(self.declared.metrics)
        view = cells_view(tracker.record.run_name, self.key, metrics, with_interval, self._varied())
        tracker.tell(experiment_tags=view_tags(view), view_key=view.key)
        results["mlflow_url"] = tracker.comparison()
        folder = home() / "reports" / f"{self.study}-{self.key}"
        figures = draw_experiment(results, folder / "figures")
        report = write_experiment_report(results, figures, folder / REPORT_FILE)
        markdown = experiment_markdown(results)
        write_text(folder / "summary.md", markdown, durable=False)
        write_json(folder / "summary.json", results)
        write_index(folder.parent)
        self._track(tracker, results, outcomes, figures, report)
        cells = results["mlflow_url"]
        more = {} if cells is None else {"The cells side by side in MLflow": cells}
        show_on_page(markdown, report, tracker.url, more)
        return report

    def _track(
        self,
        tracker: RunTracker,
        results: ExperimentResults,
        outcomes: Mapping[str, Outcome],
        figures: Mapping[str, Path],
        report: Path,
    ) -> None:
        """Send what belongs to the whole matrix, and describe it and its experiment."""
        rows = {
            "arms": [_arm_row(arm) for arm in results["arms"]],
            "hypotheses": [dict(one) for one in results["hypotheses"]],
        }
        tracker.tell(
            files={**{str(figure): "figures" for figure in figures.values()}, str(report): REPORT_FOLDER},
            tables={name: plain_table(found) for name, found in rows.items() if found},
            numbers=summary_metrics(results, self.declared.metrics[0]),
            tags={f"rm.verdict.{one['name']}": verdict_words(one) for one in results["hypotheses"]},
        )
        prepared = {
            outcome.refs["prepare"].digest: outcome for outcome in outcomes.values() if "prepare" in outcome.refs
        }
        for outcome in prepared.values():  # arms and seeds mostly share their pairs
            log_pairs(tracker, outcome.cell.config, outcome.refs["prepare"])
        links, others = places(report)
        views = {"Cells side by side": tracker.comparison(), "Charts of the cells": tracker.comparison(charts=True)}
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
            "mlflow_url": tracker.comparison(),
            "mlflow_charts_url": tracker.comparison(charts=True),
            "computed": [label for label, outcome in outcomes.items() if outcome.computed],
            "failed": [label for label, outcome in outcomes.items() if outcome.error],
        }


def has_interval(metric: str) -> bool:
    """Whether a cell's run has the metric with its interval: what is measured on held-out pairs does."""
    return metric in TEST_METRICS


def _card(refs: Mapping[str, ArtifactRef]) -> Mapping[str, Metric]:
    """The numbers of a cell on its held-out pairs, by name."""
    found: Mapping[str, Metric] = read_json(refs["evaluate"], "metrics.json")["metrics"]["test"]
    return found


def _arm_row(arm: ArmResult) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm["name"]}
    for name, entry in arm["metrics"].items():
        row |= {name: entry["value"], f"{name}_ci_low": entry["ci_low"], f"{name}_ci_high": entry["ci_high"]}
    return row


def summary_metrics(results: ExperimentResults, main: str) -> dict[str, float]:
    """The parent run's own numbers: what it cost, each arm's mean of the main metric, each hypothesis' value.

    The tables `arms.json` and `hypotheses.json` have the others, and all intervals.
    """
    cost = results["cost"]
    found: dict[str, float | None] = {
        "cost/device_hours": cost["device_seconds"] / 3600,
        "cost/money": money(cost["device_seconds"], cost["price_per_hour"]),
    }
    found |= {f"{main}.{arm['name']}": arm["metrics"][main]["value"] for arm in results["arms"]}
    found |= {f"verdict/{one['name']}": one["value"] for one in results["hypotheses"]}
    return {name: value for name, value in found.items() if value is not None}
