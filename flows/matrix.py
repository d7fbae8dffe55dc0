"""Run the cells of a matrix side by side, as many as the device has slots; one that fails leaves the others alone."""

import os
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import allow_failure, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectConcurrentFuture, PrefectFuture

from flows.console import say, say_notices, shown_while_waiting
from rmcore.core.child_process import terminate_forked
from rmcore.core.errors import RmcoreError, TrainingError
from rmcore.core.manifests import make_key
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.order import request
from rmcore.stages.results import run_key
from rmcore.stages.stage import Stage
from rmcore.study.estimates import Estimates
from rmcore.study.plan import Cell, CellPlan, Planner
from tasks.device import device_slots
from tasks.execution import SAVING_SECONDS, SHARED_TERMINAL
from tasks.sharing import shared_store
from tasks.stages import StageRun, run_stage
from tasks.tracking import RunTracker

StartTracker = Callable[[Cell, dict[str, ArtifactRef]], RunTracker]
"""Opens the MLflow run of a cell, given the artifacts that it has already (all of them for a cached cell)."""
FinishTracker = Callable[[RunTracker, Cell, dict[str, ArtifactRef]], None]
"""Tells the run of a finished cell what became of it."""
Ready = Callable[[Sequence[CellPlan]], Iterable[tuple[CellPlan, str | None]]]
"""Gives each plan when its cell may be begun here, or with the reason why it never may."""


def cell_tracker(
    study: str,
    run_name: str,
    matrix: str,
    cell: Cell,
    refs: Mapping[str, ArtifactRef],
    tags: Mapping[str, str],
    also: Collection[str],
) -> RunTracker:
    """Open the MLflow run of a cell below that of its matrix, the uid of which is `matrix`; see `RunTracker.start`."""
    own = {"rm.arm": cell.arm, "rm.seed": str(cell.seed), **({"rm.key": run_key(refs)} if refs else {})}
    tracker = RunTracker.start(
        study,
        run_name,
        {**tags, **own},
        cell.config,
        also=also,
        uid=f"{matrix}-{make_key({'cell': cell.label})[:12]}",
        parent_uid=matrix,
    )
    if not refs:  # it is computed, now
        tracker.tell(is_watched=True)
    return tracker


def at_once(plans: Sequence[CellPlan]) -> Iterable[tuple[CellPlan, str | None]]:
    """Cells are computed here, so each may be begun whenever there is a thread for it."""
    return ((plan, None) for plan in plans)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one cell."""

    cell: Cell
    refs: dict[str, ArtifactRef]
    error: str | None
    computed: bool
    """Whether a stage ran in this run."""


class MatrixRunner:
    """Runs cells within a flow run, each as a task of its own: what fails there, fails alone.

    Where `ready` is not `at_once`, others compute the cells, and the tasks take them from the shared store.
    """

    def __init__(
        self, study: str, store: Store, start: StartTracker, finish: FinishTracker, ready: Ready = at_once
    ) -> None:
        self.study, self.store, self.start, self.finish = study, store, start, finish
        self.ready = ready
        self.handed: list[Any] = []
        """Futures of the cells that ran last: a step after them waits for these, whatever became of them."""
        self._stopping = threading.Event()
        self._errors: dict[str, str] = {}

    def run(self, plans: Sequence[CellPlan]) -> dict[str, Outcome]:
        """Run the cells and give the outcome of each, by label, in the given order.

        Args:
            plans: the cells.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the stages that were running have saved and ended.
            TerminationSignal: the same after SIGTERM, which is how a run is cancelled in the UI.
        """
        futures: dict[str, PrefectFuture[Outcome]] = {}
        # Machines that share a store and run the same matrix meet at fewer cells when each has an order of its own.
        ordered = list(plans) if shared_store() is None else random.sample(plans, len(plans))
        with self._ended_with(futures):
            for plan, refused in self.ready(ordered):
                futures[plan.cell.label] = self._submit(plan, refused)
            for future in futures.values():
                future.wait()
        self.handed = [allow_failure(future) for future in futures.values()]
        return {plan.cell.label: self._outcome(plan.cell, futures[plan.cell.label]) for plan in plans}

    @contextmanager
    def _ended_with(self, futures: Mapping[str, PrefectFuture[Outcome]]) -> Iterator[None]:
        """After Ctrl-C or SIGTERM inside the block, wait until what runs has saved and ended."""
        if device_slots() > 1:
            os.environ[SHARED_TERMINAL] = "1"
        try:
            yield
        except (KeyboardInterrupt, TerminationSignal):
            self._stopping.set()
            # A terminal has asked them already; a signal to this process alone has not.
            terminate_forked()
            threads = [one.wrapped_future for one in futures.values() if isinstance(one, PrefectConcurrentFuture)]
            wait([thread for thread in threads if not thread.cancel()], timeout=SAVING_SECONDS)
            raise

    def _submit(self, plan: CellPlan, refused: str | None) -> PrefectFuture[Outcome]:
        as_task = task(name="cell", task_run_name=plan.cell.label, cache_policy=NO_CACHE, persist_result=False)
        return as_task(self._run).submit(plan, refused, return_state=False)

    def _outcome(self, cell: Cell, future: PrefectFuture[Outcome]) -> Outcome:
        """The task's result, or why it has none: also for what no stage of ours refuses, such as a server that died."""
        if future.state.is_completed():
            outcome: Outcome = future.result()
            return outcome
        error = self._errors.get(cell.label) or future.state.message or f"its task ended as {future.state.name}"
        say(f"{cell.label:<24} failed: {error}")
        return Outcome(cell, {}, error, computed=False)

    def _run(self, plan: CellPlan, refused: str | None) -> Outcome:
        cell = plan.cell
        was_cached = plan.state == "cached"
        try:
            if refused is not None:
                raise TrainingError(refused)
            if plan.state != "cached":  # what another cell or another flow has made since it was planned is there now
                plan = Planner(self.store, Estimates((), {})).plan(cell)
            outcome = self._take(plan) if plan.state == "cached" else self._compute(cell)
        except RmcoreError as error:
            self._errors[cell.label] = str(error)
            raise
        if self.ready is not at_once and not was_cached:  # computed for this run, though not by it
            outcome = replace(outcome, computed=True)
        if outcome.computed:
            say(f"{cell.label:<24} done")
        return outcome

    def _take(self, plan: CellPlan) -> Outcome:
        with self.start(plan.cell, plan.refs) as tracker:
            for name, ref in plan.refs.items():
                tracker.log_artifact_folder(Path(ref.path), name)
            self._finish(tracker, plan.cell, plan.refs)
        return Outcome(plan.cell, plan.refs, None, computed=False)

    def _compute(self, cell: Cell) -> Outcome:
        runs: dict[str, StageRun] = {}
        with self.start(cell, {}) as tracker:

            def run(stage: Stage) -> ArtifactRef:
                name = stage.name
                self._check_going_on(name)
                done = runs[name] = run_stage(
                    self.store,
                    stage,
                    tracker.follow,
                    before=partial(self._check_going_on, name),
                    waiting=partial(shown_while_waiting, f"{cell.label}, {name}"),
                    label=f"{name} of {cell.label}",
                    run=f"{cell.label} of {self.study}",
                    after=[runs[needed] for needed in stage.upstream],
                )
                if done.damage:
                    say(f"{cell.label:<24} {name} was damaged and made again: {done.damage}")
                if not done.cached:  # once for all cells that share it
                    say_notices(name, done.ref.folder)
                tracker.log_artifact_folder(done.ref.folder, name)
                return done.ref

            request(cell.stages, cell.config, run)
            refs = {name: done.ref for name, done in runs.items()}
            self._finish(tracker, cell, refs)
        return Outcome(cell, refs, None, computed=not all(done.cached for done in runs.values()))

    def _finish(self, tracker: RunTracker, cell: Cell, refs: dict[str, ArtifactRef]) -> None:
        tracker.tell(tags={"rm.key": run_key(refs)})
        self.finish(tracker, cell, refs)

    def _check_going_on(self, stage: str) -> None:
        if self._stopping.is_set():
            raise TrainingError(f"stopped before stage {stage}; the same command resumes from there.")
