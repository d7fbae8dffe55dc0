"""A search for the best settings: prepare, trials over rungs, choose, confirm with fresh seeds, report. Order only."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from flows.matrix import MatrixRunner, Outcome
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    leave_embedded,
    log_pairs,
    open_store,
    places,
    run_stages,
    show_on_page,
)
from flows.tune_plan import TRIAL_STAGES, tuned_base, tuning_plan
from flows.tune_results import gather_tuning, write_recipe
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import write_json
from rmcore.core.progress import duration
from rmcore.core.store import ArtifactRef, Store, flatten, make_key
from rmcore.data.table import read_pairs
from rmcore.reporting.html.index import write_index
from rmcore.reporting.html.note import run_note
from rmcore.reporting.html.tuning import draw_tuning, tuning_markdown, write_tuning_report
from rmcore.reporting.tuning_schema import TuningResults
from rmcore.stages.registry import stage_call
from rmcore.stages.results import run_key
from rmcore.study.budget import Budget
from rmcore.study.estimates import Estimates
from rmcore.study.objectives import LABELS, Objective, higher_is_better, require_objective
from rmcore.study.plan import Cell, CellPlan, Planner, folders
from rmcore.study.rungs import hand_over
from rmcore.study.search_space import Space, default_space, parse_space
from rmcore.study.tuning_result import training_seconds, validation_scores
from tasks.device import device_slots
from tasks.stages import run_step
from tasks.tracking import RunTracker

CONFIRM_STAGES = ("prepare", "train", "evaluate")
WINNER, DEFAULTS = "winner", "defaults"
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
    price_per_hour: Annotated[float | None, Field(gt=0)] = None,
    storage: str | None = None,
) -> dict[str, Any]:
    """Search for the best settings of a reward model on these pairs within a budget, and say what the best are worth.

    Trials see training and validation pairs; bad ones are given up early. The winner and the defaults are then trained
    with fresh seeds and measured on test pairs that no trial saw. A search that was stopped goes on where it was.

    Args:
        config: data, model, and the defaults, which are the first trial.
        budget: of all runs of this search, the confirmation included: 90s, 60m or 1.5h; left out, trials alone counts.
        trials: stop after this many, those that are given up or fail included.
        objective: what is compared on the validation pairs: accuracy, loss, length-matched (accuracy between answers
            of about the same length) or best-of-k (how often the best scored of several answers was never rejected).
        space: the settings that are searched, each with choices or a range; left out, a small space around the
            defaults.
        name: of the search; the same name goes on with it. Left out: study and objective.
        seeds: fresh seeds of the confirmation.
        price_per_hour: of a device, for the cost in money.
        storage: database of the search as an SQLAlchemy URL, for example of PostgreSQL; left out, a file of this home.

    Returns:
        {"results": everything the report shows, "report": path, "recipe": path, "mlflow_url": address or None,
        "computed": labels of what ran, "failed": labels of trials that failed}.

    Raises:
        ConfigError: neither budget nor trials, a space or objective that cannot be used, a budget below one trial, or a
            search of that name with other settings; or no trial came to its end.
    """
    from rmcore.study.search import earlier_best, open_search

    if budget is None and trials is None:
        raise ConfigError("neither a budget nor a number of trials is given, so the search would never end; give one.")
    name = checked_name(name or f"{config.study}-{objective}")
    base = tuned_base(config)
    chosen = default_space(base) if space is None else parse_space(space, base)
    store = open_store()
    plan = tuning_plan(base, store, home(), seeds=seeds, budget=budget)
    for problem in plan.problems:
        say(f"time unknown: {problem}")
    if plan.budget is not None:
        plan.budget.check()
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
        require_objective(objective, _validation_pairs(prepared.ref))
        tuning, higher = home() / "tuning", higher_is_better(objective)
        frozen = {
            "base": base.model_dump(mode="json", exclude={"study", "loggers", "skip", "device"}),
            "pairs": prepared.ref.digest,
            "space": chosen.to_dict(),
            "objective": objective,
        }
        earlier = earlier_best(tuning, name, chosen, base, higher=higher)
        with open_search(
            tuning / name,
            base,
            chosen,
            objective,
            frozen,
            num_pairs=len(read_pairs(Path(prepared.ref.path) / "train.parquet")),
            warm=[drawn for kept in earlier.values() for drawn in kept],
            parallel=device_slots() > 1,
            storage=storage,
        ) as search:
            run = Tuning(name, key, base, chosen, objective, store, search, plan.budget, trials)
            run.notes += [f"begun with the best {len(kept)} of {other}" for other, kept in earlier.items()]
            try:
                run.search_all()
                best = search.best()
                cells = run.confirm(seeds)
            except (KeyboardInterrupt, TerminationSignal):
                say("stopped; all finished rungs are kept: the same command goes on from there")
                leave_embedded(tracker)
                raise
            folder = home() / "reports" / f"{name}-{key}"

            def tell() -> tuple[TuningResults, Path]:
                results = gather_tuning(run, best, cells, prepared.ref, price_per_hour)
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


def _validation_pairs(prepared: ArtifactRef) -> list[Any]:
    place = Path(prepared.path) / "validation.parquet"
    return read_pairs(place) if place.is_file() else []


@dataclass
class Tuning:
    """One run of a search."""

    name: str
    key: str
    base: PipelineConfig
    space: Space
    objective: Objective
    store: Store
    search: Any
    """The `rmcore.study.search.Search`, whose module brings Optuna."""
    budget: Budget | None
    """None: nobody knows how long trials take, or no budget was given."""
    trials: int | None
    notes: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    handed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.spent_before = self.search.seconds
        self.due: list[Any] = []
        """Trials whose next rung is to run, before new ones."""
        self.running: dict[str, Any] = {}
        self.planner = Planner(self.store, Estimates((), {}))
        self.runner = MatrixRunner(self.name, self.store, self._start_tracker, self._finish_tracker, self._hand_over)

    @property
    def spent(self) -> float:
        """Seconds of this run, and of the trials of earlier ones."""
        return self.spent_before + time.monotonic() - self.started

    def search_all(self) -> None:
        """Run trials until the budget or their number is used up."""
        self.due = [self._taken_up(trial) for trial in self.search.take_up()]
        self.due = [trial for trial in self.due if trial is not None]
        if self.due:
            say(f"taken up: {', '.join(trial.label for trial in self.due)}")
        for note in self.notes if not self.search.num_finished else ():
            say(note)
        self.runner.run_as_asked(
            self._ask, self._told, slots=device_slots(), what="rungs", total=3 * (self.trials or 30)
        )
        self.handed = list(self.runner.handed)

    def _taken_up(self, trial: Any) -> Any | None:
        """A trial that was stopped between its rungs, unless it was to be given up just then."""
        return None if trial.done and self._is_over(trial) else trial

    def _ask(self) -> CellPlan | None:
        while True:
            if self.due:
                trial = self.due.pop(0)
            elif (why := self._enough()) is None:
                try:
                    trial = self.search.ask()
                except ConfigError as error:  # its settings do not fit together: it is over, and told
                    say(str(error))
                    continue
            else:
                if not self.running:
                    say(why)
                return None
            cell = Cell(trial.label, f"trial {trial.number}", self.base.seed, trial.rung_config(), TRIAL_STAGES)
            self.running[cell.label] = trial
            return self.planner.plan(cell)

    def _enough(self) -> str | None:
        """Why no further trial is begun; None where one is."""
        begun = len(self.search.records())
        if self.trials is not None and begun >= self.trials:
            return f"{begun} trials, as many as asked for"
        if self.budget is None or not begun:
            return None
        complete = [one for one in self.search.records() if one.state == "complete"]
        mean = sum(one.seconds for one in complete) / len(complete) if complete else None
        best = self.search.best().seconds if complete else None
        if self.budget.fits(self.spent, mean, best):
            return None
        left = self.budget.seconds - self.spent
        return f"{begun} trials; the {duration(max(left, 0))} that are left are kept for the confirmation"

    def _told(self, outcome: Outcome) -> None:
        trial = self.running.pop(outcome.cell.label)
        if outcome.error is not None:
            self.search.fail(trial, outcome.error)
            say(f"trial {trial.number} failed; the search goes on")
            return
        if outcome.computed:
            self.computed.append(outcome.cell.label)
        places = folders(outcome.refs)
        scores = validation_scores(self.objective, places, beta=trial.config.train.beta)
        seconds = (self.store.manifest("train", outcome.refs["train"].key) or {}).get("wall_seconds", 0.0)
        self.search.report(trial, scores, seconds=seconds, train_seconds=training_seconds(places["train"]))
        if not self._is_over(trial):
            self.due.insert(0, trial)

    def _is_over(self, trial: Any) -> bool:
        """Decide on a trial after a rung, and say it."""
        decision = self.search.decide(trial)
        record = self.search.records()[trial.number]
        value = f"{LABELS[self.objective]} {record.value:.4f}"
        if decision == "goes on":
            say(f"trial {trial.number:<3} {value} after {trial.rungs.share(trial.done - 1)}: goes on")
        else:
            say(f"trial {trial.number:<3} {value}: {record.why or 'complete'}")
        return bool(decision != "goes on")

    def confirm(self, seeds: int) -> dict[str, Outcome]:
        """Train winner and defaults with fresh seeds and measure them on the test pairs.

        Raises:
            TrainingError: a cell failed; the same command tries it again.
        """
        best = self.search.best()
        arms = {DEFAULTS: 0} if best.number == 0 else {WINNER: best.number, DEFAULTS: 0}
        cells = [
            Cell(arm, arm, seed, self.config_of(number, seed), CONFIRM_STAGES)
            for seed in self.fresh_seeds(seeds)
            for arm, number in arms.items()
        ]
        value = f"{LABELS[self.objective]} {best.value:.4f}"
        say(f"winner: trial {best.number}, {value}; confirmed with {seeds} fresh seeds on the test pairs")
        outcomes = self.runner.run([self.planner.plan(cell) for cell in cells], "cells of the confirmation")
        if failed := {label: one.error for label, one in outcomes.items() if one.error}:
            raise TrainingError(
                f"{len(failed)} of {len(cells)} trainings of the confirmation failed: {failed}. Nothing is said on the "
                "strength of those that are left; the same command tries them again."
            )
        self.computed += [label for label, one in outcomes.items() if one.computed]
        self.handed += self.runner.handed
        return outcomes

    def fresh_seeds(self, number: int) -> list[int]:
        """Seeds that no trial used."""
        return [(self.base.seed + 1 + place) % 2**31 for place in range(number)]

    def config_of(self, number: int, seed: int) -> PipelineConfig:
        """Settings of a trial in one piece, under another seed."""
        config: PipelineConfig = self.search.whole_config(number)
        return config.model_copy(update={"seed": seed})

    def _hand_over(self, cell: Cell, stage: str, refs: Mapping[str, ArtifactRef]) -> None:
        """Let a rung begin where the one before ended."""
        trial = self.running.get(cell.label)
        if trial is None or stage != "train" or not trial.done:
            return
        key = stage_call("train", trial.rung_config(back=1), refs).key
        if self.store.status("train", key).state == "valid":  # else it is trained in one piece, to the same end
            begun = self.store.unfinished("train", stage_call("train", cell.config, refs).key)
            hand_over(Path(self.store.ref("train", key).path), begun)

    def _start_tracker(self, cell: Cell, refs: dict[str, ArtifactRef]) -> RunTracker:
        tracker = RunTracker.start(
            self.base.study,
            f"{self.name} {cell.label}",
            {
                "rm.kind": "cell" if cell.arm in (WINNER, DEFAULTS) else "trial",
                "rm.tuning": self.key,
                "rm.arm": cell.arm,
                "rm.seed": str(cell.seed),
                **({"rm.key": run_key(refs)} if refs else {}),
            },
            flatten(cell.config.model_dump(mode="json")),
            uid=f"tune-{self.key}-{make_key({'cell': cell.label})[:12]}",
            parent_uid=f"tune-{self.key}",
        )
        if not refs:
            tracker.watch_machine()
        return tracker

    def _finish_tracker(self, tracker: RunTracker, cell: Cell, refs: dict[str, ArtifactRef]) -> None:
        tracker.set_tags({"rm.key": run_key(refs)})
        log_pairs(tracker, cell.config, refs["prepare"])
        tracker.describe(run_note(f"{cell.label}: a part of the search {self.name}", *places(None)))


def track(tracker: RunTracker, results: TuningResults, report: Path, files: list[Path]) -> None:
    """Send what belongs to the whole search, and describe it."""
    for file in files:
        tracker.log_file(file, "figures" if file.suffix == ".png" else REPORT_FOLDER)
    tracker.log_file(report, REPORT_FOLDER)
    tracker.log_table([{**flat_trial(one)} for one in results["trials"]], "trials")
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
    tracker.set_tags({"rm.verdict": "better" if results["is_better"] else "no better"})
    tracker.describe(run_note(results["headline"], *places(report)))


def flat_trial(one: Mapping[str, Any]) -> dict[str, Any]:
    """A trial as one row of a table."""
    values = {f"value_{place}": value for place, value in enumerate(one["values"], 1)}
    kept = {name: one[name] for name in ("number", "state", "seconds", "why")}
    return kept | values | {name: str(value) for name, value in one["settings"].items()}
