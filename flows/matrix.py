"""Run the cells of a matrix side by side, as many as the device has slots; one that fails leaves the others alone."""

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from flows.console import say
from rmcore.errors import RmcoreError, TrainingError
from rmcore.store import ArtifactRef, Store
from rmcore.study.plan import Cell, CellPlan
from tasks.execution import SAVING_SECONDS
from tasks.stages import run_stage
from tasks.tracking import RunTracker

StartTracker = Callable[[Cell, dict[str, ArtifactRef]], RunTracker]
"""Opens the MLflow run of a cell, given the artifacts that it has already (all of them for a cached cell)."""
FinishTracker = Callable[[RunTracker, Cell, dict[str, ArtifactRef]], None]
"""Tells the run of a finished cell what became of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one cell."""

    cell: Cell
    refs: dict[str, ArtifactRef]
    error: str | None
    computed: bool
    """Whether a stage ran in this run."""


class MatrixRunner:
    """Runs cells within a flow run. A cell that is in the store already runs no task."""

    def __init__(self, store: Store, start: StartTracker, finish: FinishTracker) -> None:
        self.store, self.start, self.finish = store, start, finish
        self._stopping = threading.Event()

    def run(self, plans: Sequence[CellPlan]) -> dict[str, Outcome]:
        """What became of each cell, by label, in the given order.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the stages that were running have saved and ended.
        """
        outcomes = {plan.cell.label: self._cached(plan) for plan in plans if plan.state == "cached"}
        futures = {plan.cell.label: self._submit(plan.cell) for plan in plans if plan.state != "cached"}
        try:
            for label, future in futures.items():
                outcomes[label] = future.result()
        except KeyboardInterrupt:
            self._stopping.set()
            stop_stages()
            raise
        return {plan.cell.label: outcomes[plan.cell.label] for plan in plans}

    def _cached(self, plan: CellPlan) -> Outcome:
        with self.start(plan.cell, plan.refs) as tracker:
            for name, ref in plan.refs.items():
                tracker.log_artifact_folder(Path(ref.path), name)
            self.finish(tracker, plan.cell, plan.refs)
        return Outcome(plan.cell, plan.refs, None, computed=False)

    def _submit(self, cell: Cell) -> PrefectFuture[Outcome]:
        as_task = task(name="cell", task_run_name=cell.label, cache_policy=NO_CACHE, persist_result=False)
        return as_task(self._run).submit(cell)

    def _run(self, cell: Cell) -> Outcome:
        refs: dict[str, ArtifactRef] = {}
        ran: list[str] = []
        if self._stopping.is_set():
            return Outcome(cell, refs, "stopped before it began", computed=False)
        try:
            with self.start(cell, {}) as tracker:
                for name in cell.stages:
                    self._run_stage(cell, name, refs, ran, tracker)
                self.finish(tracker, cell, refs)
        except RmcoreError as error:
            say(f"{cell.label:<24} failed: {error}")
            return Outcome(cell, refs, str(error), computed=bool(ran))
        say(f"{cell.label:<24} {', '.join(ran) or 'cached'}")
        return Outcome(cell, refs, None, computed=bool(ran))

    def _run_stage(
        self, cell: Cell, name: str, refs: dict[str, ArtifactRef], ran: list[str], tracker: RunTracker
    ) -> None:
        if self._stopping.is_set():
            raise TrainingError(f"stopped before stage {name}; the same command goes on from there.")
        done = run_stage(self.store, name, cell.config, refs, tracker.follow, lambda: None)
        if done.damage is not None:
            say(f"{cell.label:<24} {name} was damaged and made again: {done.damage}")
        if not done.cached:
            ran.append(name)
        refs[name] = done.ref
        tracker.log_artifact_folder(Path(done.ref.path), name)


def stop_stages() -> None:
    """Ask all running stages to save and end, and wait; a terminal has asked them already, a signal has not."""
    running = [child for child in psutil.Process().children(recursive=True) if _is_stage(child)]
    for child in running:
        try:
            child.send_signal(signal.SIGINT)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(running, timeout=SAVING_SECONDS)


def _is_stage(process: psutil.Process) -> bool:
    try:
        return "rmcore.stages.run" in process.cmdline()
    except psutil.Error:
        return False
