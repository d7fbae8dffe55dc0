"""One run of a search: its trials, rung by rung, within the budget, and the confirmation of the winner."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.console import say
from flows.matrix import MatrixRunner, Outcome
from flows.pipeline import log_pairs, places
from flows.planning import TRIAL_STAGES
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, DataError, TrainingError
from rmcore.core.progress import duration
from rmcore.core.store import ArtifactRef, Store, flatten, make_key
from rmcore.reporting.html.note import run_note
from rmcore.stages.registry import stage_call
from rmcore.stages.results import run_key
from rmcore.study.budget import Budget
from rmcore.study.estimates import Estimates
from rmcore.study.objectives import LABELS, Objective
from rmcore.study.plan import Cell, CellPlan, Planner, folders
from rmcore.study.rungs import hand_over
from rmcore.study.search_space import Space
from rmcore.study.tuning_result import training_seconds, validation_scores
from tasks.device import device_slots
from tasks.tracking import RunTracker

CONFIRM_STAGES = ("prepare", "train", "evaluate")
WINNER, DEFAULTS = "winner", "defaults"
MOST_FAILURES = 8
"""Trials in a row that may come to nothing."""
MOST_TOO_LONG = 3
"""Trials in a row that may be too long for the rest of a budget before the search ends."""
STOPPED = ("was asked to stop", "stopped before stage")
"""Words of the error of a cell that did not fail of itself."""


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
    """None: no budget was given."""
    trials: int | None
    notes: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    handed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.spent_before = self.search.seconds / device_slots()  # rungs of several slots took the same time
        self.due: list[Any] = []
        """Trials whose next rung is to run, before new ones."""
        self.running: dict[str, Any] = {}
        self.failed_in_a_row = self.too_long = 0
        self.planner = Planner(self.store, Estimates((), {}))
        self.runner = MatrixRunner(self.name, self.store, self._start_tracker, self._finish_tracker, self._hand_over)

    @property
    def spent(self) -> float:
        """Seconds of this run, and of the trials of earlier ones."""
        return self.spent_before + time.monotonic() - self.started

    def search_all(self) -> None:
        """Run trials until the budget or their number is used up."""
        # A trial that was stopped between its rungs, unless it was to be given up just then.
        self.due = [trial for trial in self.search.take_up() if not trial.done or not self._is_over(trial)]
        if self.due:
            say(f"taken up: {', '.join(trial.label for trial in self.due)}")
        for note in self.notes if not self.search.num_finished else ():
            say(note)
        self.runner.run_as_asked(
            self._ask, self._told, slots=device_slots(), what="rungs", total=3 * (self.trials or 30)
        )
        self.handed = list(self.runner.handed)

    def _ask(self) -> CellPlan | None:
        while True:
            if self.due:
                trial = self.due.pop(0)
            elif (why := self._enough()) is None:
                try:
                    trial = self.search.ask()
                except ConfigError as error:  # its settings do not fit together: it is over, and told
                    self._count_failure(str(error))
                    say(str(error))
                    continue
                if why := self._too_long(trial):
                    self.search.leave(trial, why)
                    self.too_long += 1
                    say(f"trial {trial.number:<3} is not begun: {why}")
                    continue
                self.too_long = 0
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
        if self.too_long >= MOST_TOO_LONG:
            return f"{begun} trials; {self.too_long} in a row would not have fitted into what is left of the budget"
        complete = [one for one in self.search.records() if one.state == "complete"]
        mean = sum(one.seconds for one in complete) / len(complete) if complete else None
        best = self.search.best().seconds if complete else None
        if self._learned(self.budget).fits(self.spent, mean, best):
            return None
        left = self.budget.seconds - self.spent
        return f"{begun} trials; the {duration(max(left, 0))} that are left are kept for the confirmation"

    def _told(self, outcome: Outcome) -> None:
        trial = self.running.pop(outcome.cell.label)
        if outcome.error is not None:
            if not any(words in outcome.error for words in STOPPED):  # else it is taken up by the next run
                self._fail(trial, outcome.error)
            return
        if outcome.computed:
            self.computed.append(outcome.cell.label)
        places = folders(outcome.refs)
        try:
            scores = validation_scores(self.objective, places, beta=trial.config.train.beta)
        except DataError as error:  # no step of it was measured on validation pairs
            self._fail(trial, str(error))
            return
        if not math.isfinite(scores.value):
            self._fail(
                trial, f"its {LABELS[self.objective]} is not defined: no validation pair that could be read counts"
            )
            return
        self.failed_in_a_row = 0
        seconds = (self.store.manifest("train", outcome.refs["train"].key) or {}).get("wall_seconds", 0.0)
        self.search.report(trial, scores, seconds=seconds, train_seconds=training_seconds(places["train"]))
        if not self._is_over(trial):
            self.due.insert(0, trial)

    def _too_long(self, trial: Any) -> str:
        """Why a new trial does not fit into what is left, by its number of pairs; empty where it does."""
        if self.budget is None or not trial.number:
            return ""
        budget = self._learned(self.budget)
        drawn, defaults = (config.train for config in (trial.config, self.search.whole_config(0)))
        own = budget.times.train * (drawn.steps * drawn.pairs_per_step) / (defaults.steps * defaults.pairs_per_step)
        best = max((one.seconds for one in self.search.records() if one.state == "complete"), default=own)
        if budget.fits(self.spent, own, max(own, best)):
            return ""
        return f"its training of about {duration(own)} and a confirmation of it would not fit into the budget"

    def _learned(self, budget: Budget) -> Budget:
        """Replace the expected time of a training of the defaults by what it really took, once that is known."""
        first = self.search.records()[0]
        return (
            replace(budget, times=replace(budget.times, train=first.seconds)) if first.state == "complete" else budget
        )

    def _count_failure(self, message: str) -> None:
        """Note a trial that came to nothing.

        Raises:
            TrainingError: so many did in a row that something other than their settings is wrong.
        """
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= MOST_FAILURES:
            raise TrainingError(
                f"{MOST_FAILURES} trials in a row came to nothing, the last one because: {message} Correct that (a "
                "full disk, a space whose values do not fit together) and repeat the command."
            )

    def _fail(self, trial: Any, message: str) -> None:
        if not trial.number:  # it stays as it is, and the next run takes it up
            raise TrainingError(
                f"the defaults themselves failed, with which all trials are compared: {message} Correct the preset, "
                "--set or --config, or what the machine lacks, and repeat the command."
            )
        self._count_failure(message)
        self.search.fail(trial, message)
        say(f"trial {trial.number} failed; the search continues")

    def _is_over(self, trial: Any) -> bool:
        """Decide on a trial after a rung, and say it."""
        decision = self.search.decide(trial)
        record = self.search.records()[trial.number]
        value = f"{LABELS[self.objective]} {record.value:.4f}"
        if decision == "promoted":
            say(f"trial {trial.number:<3} {value} after {trial.rungs.share(trial.done - 1)}: promoted")
        else:
            say(f"trial {trial.number:<3} {value}: {record.why or 'complete'}")
        return bool(decision != "promoted")

    def confirm(self, seeds: int) -> dict[str, Outcome]:
        """Train winner and defaults with fresh seeds and measure them on the test pairs.

        Raises:
            TrainingError: a cell failed; the same command tries it again.
        """
        best = self.search.best()
        if earlier := self.search.note_confirmation(best.number, seeds):
            self.notes.append(
                f"the test pairs were looked at before, for trials {', '.join(map(str, earlier))}: each look is "
                "another chance to be better by luck, which the interval does not allow for"
            )
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
