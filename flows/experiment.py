"""An experiment: register, plan, tune, run the cells, judge, report. Order only."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from experiments.schema import Experiment
from experiments.sizes import Size
from flows.console import say
from flows.form import described_flow
from flows.hub_names import require_hub_names
from flows.matrix import MatrixRunner, Outcome, at_once, cell_tracker
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    begin_flow_run,
    leave_embedded,
    link_on_page,
    log_pairs,
    places,
    say_pages,
    show_on_page,
)
from flows.planning import MatrixPlan, Runner, cells_of_look, frozen, judged, make_plan, matrix_key, measured_cell
from flows.pool import PoolRunner
from flows.results import MatrixState, command, gather
from flows.schedules import pause_own_schedule
from rmcore.config.pipeline import GROUPS
from rmcore.core.cost import money, price_per_hour
from rmcore.core.errors import TrainingError
from rmcore.core.files import write_json, write_text
from rmcore.core.metrics import HEADLINE
from rmcore.core.store import ArtifactRef, flatten
from rmcore.reporting.experiment_schema import ArmResult, ExperimentResults, HypothesisResult, Registration, Tuned
from rmcore.reporting.figures.arms import declared_colours
from rmcore.reporting.figures.claims import tally
from rmcore.reporting.figures.experiment import draw_experiment
from rmcore.reporting.html.experiment import experiment_markdown, write_experiment_report
from rmcore.reporting.html.index import write_index
from rmcore.reporting.html.note import experiment_note, numbers_line, run_note
from rmcore.reporting.schema import Metric
from rmcore.stages.results import artifact_seconds, read_json
from rmcore.study.analysis import LooksTaken
from rmcore.study.cells import TEST_METRICS
from rmcore.study.plan import Cell
from rmcore.study.registration import record_look, register
from tasks.comparison_view import cells_view
from tasks.device import device_slots
from tasks.headline import interval_tags
from tasks.model_training import RUN_COLOUR
from tasks.sharing import write_once
from tasks.stages import run_step
from tasks.tracking import RunTracker

ExperimentChoice = Annotated[str, Field(json_schema_extra={"enum": list(SHIPPED)})]


@described_flow(
    "experiment",
    """
    register the claims ──> trials, where a setting is tuned ──> cells ──> judge ──> report
    a cell is one arm under one seed: prepare ──> train ──> evaluate (──> landscape, readiness where a claim needs them)
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
    looks: list[Annotated[int, Field(ge=2, le=100)]] | None = None,
    take: Annotated[int | None, Field(ge=1)] = None,
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
        looks: numbers of seeds after which the claims are judged, for example 5, 8, 12, 20: a decided claim gets no
            further seeds; left out, as declared.
        take: at most so many looks in this run, for a schedule that takes one a night; left out, until all is decided.
        runner: threads computes the cells on this machine; pool hands them to the machines that run `rm-opt worker`.

    Returns:
        {"results": everything the report shows, "report": path, "mlflow_url" and "mlflow_charts_url": the
        cells in MLflow or None,
        "computed": labels of the cells and trials that ran, "failed": labels of the cells that failed}.

    Raises:
        FailedCellsError: some cells failed; it holds what would have been returned.
    """
    chosen: Chosen = {
        **{"arms": arms, "seeds": seeds, "grid": grid, "budget_minutes": budget_minutes, "looks": looks},
        **{"model": model, "data": data, "epochs": epochs, "device": device},
    }
    declared = restrict(load_experiment(experiment, size), **chosen)
    require_hub_names(*(arm.config for arm in declared.arms()))
    store = begin_flow_run()
    plan = make_plan(declared, store, home())
    replace(plan, cells=tuple(cells_of_look(declared, plan.cells, 1, ()))).check_budget()
    registration = register(
        home() / "registrations" / f"{declared.name}-{declared.size}", frozen(declared), write_once()
    )
    said = command(declared, experiment, chosen)
    outcome = Matrix(declared, store, registration, said, take, runner).run(plan)
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

    take: int | None = None
    """At most so many new looks."""
    runner: Runner = "threads"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.key = matrix_key(self.declared, self.registration["hash"])
        self.study = f"{self.declared.name}-{self.declared.size}"
        self.colours = declared_colours([arm.name for arm in self.declared.arms()], self.declared.control)

    def run(self, plan: MatrixPlan) -> dict[str, Any]:
        """Tune, run what is missing, judge and report."""
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
            tracker.log_file(Path(self.registration["path"]), "registration")
            try:
                outcomes, tuned, handed = self._run_cells(plan)
            except (KeyboardInterrupt, TerminationSignal):
                leave_embedded(tracker)
                raise
            found = run_step("judge", lambda: gather(self, outcomes, tuned), handed)
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
        most = "at most " if self.declared.looks else ""
        say(f"{most}{len(plan.cells)} cells and {len(plan.trials)} trials, {len(plan.due)} to run{expected}")

    def _run_cells(self, plan: MatrixPlan) -> tuple[dict[str, Outcome], Mapping[str, Tuned], list[Any]]:
        """Run the trials, then the cells under what the trials chose; the last is what the cells handed on."""
        ready = PoolRunner(self.study, self.key).ready if self.runner == "pool" else at_once
        runner = MatrixRunner(self.study, self.store, self._start_tracker, self._finish_tracker, ready=ready)
        if not plan.trials:
            outcomes, handed = self._run_looks(runner, plan, {})
            return outcomes, {}, handed
        after: dict[str, list[Any]] = {}
        resolved, due = plan, list(plan.trials)
        while due:  # more of them where the best one is at an edge of its range
            self.trials |= runner.run(due, "trials")
            for trial, future in zip(due, runner.handed, strict=True):
                after.setdefault(trial.cell.arm, []).append(future)
            failed = frozenset(label for label, outcome in self.trials.items() if outcome.error)
            resolved = make_plan(self.declared, self.store, home(), measure=False, failed=failed)
            due = [trial for trial in resolved.trials if trial.cell.label not in self.trials]
            for arm in dict.fromkeys(trial.cell.arm for trial in due):
                say(f"{arm}: its best trial is at an edge of the range, so trials beyond it follow")
        outcomes, handed = self._run_looks(runner, resolved, after)
        return outcomes, resolved.tuned, handed

    def _run_looks(
        self, runner: MatrixRunner, plan: MatrixPlan, after: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Outcome], list[Any]]:
        """Run the cells of one look after the other: as long as a claim is open, a look is left and the budget lasts.

        The last of what is given is what the cells handed on.
        """
        done: dict[str, Outcome] = {}
        handed: list[Any] = []
        new = 0
        for number in range(1, len(self.declared.when()) + 1):
            of_look = cells_of_look(self.declared, plan.cells, number, self.taken.open)
            due = replace(plan, trials=(), cells=tuple(one for one in of_look if one.cell.label not in done))
            if number > 1 and due.due and (why := self._enough(due, new)):
                say(why)
                return done, handed
            self.expected = None if None in (self.expected, due.seconds) else (self.expected or 0) + (due.seconds or 0)
            done |= runner.run([one for one in due.cells if not one.waits_for], "cells", after)
            handed += runner.handed
            for cell in (one.cell for one in due.cells if one.waits_for):
                first = next(outcome.error for outcome in self.trials.values() if outcome.cell.arm == cell.arm)
                done[cell.label] = Outcome(cell, {}, f"every trial of its tuning failed: {first}", computed=False)
            self.looks_taken = number
            self.taken = judged(self.declared, self.cells(done), number)
            new += register_look(self.declared, self.registration, self.key, number, self.taken)
            if not self.taken.open:
                break
        end_of_looks(self.declared)
        return done, handed or [one for futures in after.values() for one in futures]

    def _enough(self, due: MatrixPlan, new: int) -> str | None:
        """Say why this run takes no further look, whose cells are `due`; None where it does."""
        later = f"the next needs {len(due.due)} cells; the same command takes it later"
        if self.take is not None and new >= self.take:
            return f"{new} new look{'s' if new > 1 else ''} taken, as requested; {later}"
        left = 60 * self.declared.budget_minutes - (time.monotonic() - self.started)
        if due.seconds is not None and due.seconds > left:
            needed = f"another look would take about {due.seconds / 60:.0f} min"
            return f"{needed}, {max(left, 0) / 60:.0f} are left of the budget; {later}"
        return None

    def _start_tracker(self, cell: Cell, refs: dict[str, ArtifactRef]) -> RunTracker:
        kind = "cell" if cell.trial is None else "trial"
        tags = {"rm.kind": kind, "rm.matrix": self.key, RUN_COLOUR: self.colours[cell.arm]}
        return cell_tracker(self.study, cell.label, self.key, cell, refs, tags, self._varied())

    def _finish_tracker(self, tracker: RunTracker, cell: Cell, refs: dict[str, ArtifactRef]) -> None:
        part = f"{cell.label}: a {'cell' if cell.trial is None else 'trial'} of {self.study}, {self.declared.title}"
        tracker.describe(run_note(part, *places(None), numbers_line(_card(refs)) if "evaluate" in refs else ""))
        if cell.trial is None:
            found = measured_cell(self.declared, cell, refs)
            self.measured[cell.label] = found
            declared = {name: one.value for name, one in found.samples.items() if name not in HEADLINE}
            shown = {name: _card(refs)[TEST_METRICS[name]] for name in declared if name in TEST_METRICS}
            tracker.set_tags(interval_tags(shown))
            spent = artifact_seconds(self.store, refs.values(), on_device=True)
            cost = {"cost/device_hours": spent / 3600, "cost/money": money(spent, price_per_hour())}
            tracker.log_metrics(declared | {name: value for name, value in cost.items() if value is not None})

    def _report(self, tracker: RunTracker, results: ExperimentResults, outcomes: Mapping[str, Outcome]) -> Path:
        """Figures, report, MLflow's tables and links, and the summary on the flow run's page."""
        claimed = {one.metric for one in self.declared.hypotheses}
        with_interval = [name for name in self.declared.metrics if name in claimed and has_interval(name)]
        metrics = list(self.declared.metrics)
        tracker.publish_view(cells_view(tracker.record.run_name, self.key, metrics, with_interval, self._varied()))
        results["mlflow_url"] = tracker.comparison()
        folder = home() / "reports" / f"{self.study}-{self.key}"
        figures = draw_experiment(results, folder / "figures")
        report = write_experiment_report(results, figures, folder / REPORT_FILE)
        markdown = experiment_markdown(results)
        write_text(folder / "summary.md", markdown, durable=False)
        write_json(folder / "summary.json", results)
        write_index(folder.parent)
        self._track(tracker, results, outcomes, figures, report)
        show_on_page(markdown, report, tracker.url)
        if results["mlflow_url"] is not None:
            link_on_page(results["mlflow_url"], "The cells side by side in MLflow")
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
        for figure in figures.values():
            tracker.log_file(figure, "figures")
        tracker.log_file(report, REPORT_FOLDER)
        tracker.log_table([_arm_row(arm) for arm in results["arms"]], "arms")
        if results["hypotheses"]:
            tracker.log_table([_claim_row(one, results) for one in results["hypotheses"]], "hypotheses")
        tracker.log_metrics(summary_metrics(results, self.declared.metrics[0]))
        tracker.set_tags({f"rm.verdict.{one['name']}": one["verdict"] for one in results["hypotheses"]})
        prepared = {
            outcome.refs["prepare"].digest: outcome for outcome in outcomes.values() if "prepare" in outcome.refs
        }
        for outcome in prepared.values():  # arms and seeds mostly share their pairs
            log_pairs(tracker, outcome.cell.config, outcome.refs["prepare"])
        links, others = places(report)
        views = {"Cells side by side": tracker.comparison(), "Charts of the cells": tracker.comparison(charts=True)}
        shown = {name: address for name, address in views.items() if address is not None}
        headline = f"{tally(results['hypotheses'])}. {results['question']}"
        tracker.describe(run_note(headline, links | shown, others))
        tracker.describe_experiment(experiment_note(f"{results['title']}: {tally(results['hypotheses'])}", shown))

    def _varied(self) -> list[str]:
        """Settings in which the arms differ, as MLflow names them."""
        flat = [flatten(arm.config.model_dump(mode="json"), GROUPS) for arm in self.declared.arms()]
        names = list(dict.fromkeys(name for one in flat for name in one))
        varied = [name for name in names if len({str(one.get(name)) for one in flat}) > 1]
        tuned = self.declared.tuning.setting if self.declared.tuning else None
        return [*varied, *([tuned] if tuned and tuned not in varied else [])]

    def _outcome(
        self, outcomes: dict[str, Outcome], results: ExperimentResults, report: Path, tracker: RunTracker
    ) -> dict[str, Any]:
        return {
            "results": results,
            "report": str(report),
            "mlflow_url": tracker.comparison(),
            "mlflow_charts_url": tracker.comparison(charts=True),
            "computed": [label for label, outcome in (self.trials | outcomes).items() if outcome.computed],
            "failed": [label for label, outcome in outcomes.items() if outcome.error],
        }


def has_interval(metric: str) -> bool:
    """Whether a cell's run has the metric with its interval: what is measured on held-out pairs does."""
    return metric in TEST_METRICS


def _card(refs: Mapping[str, ArtifactRef]) -> Mapping[str, Metric]:
    """The numbers of a cell on its held-out pairs, by name."""
    found: Mapping[str, Metric] = read_json(refs["evaluate"], "metrics.json")["metrics"]["test"]
    return found


def _claim_row(one: HypothesisResult, results: ExperimentResults) -> dict[str, Any]:
    size = results["sizes"].get(one["name"])
    would_decide = {"deciding_seeds": size and size["seeds"], "deciding_prompts": size and size["prompts"]}
    row = {name: value for name, value in one.items() if name != "looks"}
    return row | would_decide | {"num_looks": len(one["looks"])}


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


def register_look(declared: Experiment, registration: Registration, key: str, number: int, taken: LooksTaken) -> bool:
    """Write a look down and say what it decided; whether it is new."""
    if not declared.looks:
        return False
    num_seeds = declared.looks[number - 1]
    kept = ("name", "verdict", "value", "ci_low", "ci_high", "p", "p_holm", "closed")
    claims = [{name: value for name, value in one.items() if name in kept} for one in taken.results]
    is_new = record_look(registration, key, {"num_seeds": num_seeds, "open": list(taken.open), "claims": claims})
    say(f"look {number} of {len(declared.looks)}, {num_seeds} seeds: {_told(taken.results, taken.open)}")
    return is_new


def end_of_looks(declared: Experiment) -> None:
    """Say that no look is left, and pause the schedule that started this run."""
    if not declared.looks:
        return
    say("no look is left: every claim is decided, closed, or has had all of its seeds")
    if pause_own_schedule():
        say("paused the schedule that started this run: there is nothing left to look at")


def _told(results: Sequence[HypothesisResult], still_open: Sequence[str]) -> str:
    verdicts = [f"{one['name']} {one['verdict']}" for one in results if one["verdict"] != "inconclusive"]
    closed = [one["name"] for one in results if one["verdict"] == "inconclusive" and one["closed"]]
    parts = [", ".join(verdicts), f"closed undecided: {', '.join(closed)}" if closed else ""]
    parts += [f"open: {', '.join(still_open)}" if still_open else "none open"]
    return "; ".join(part for part in parts if part)
