"""Run one stage in a child process and publish what it wrote."""

import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from rmcore.core.errors import RmcoreError, TrainingError
from rmcore.core.store import ArtifactRef, Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.stages.stage import Stage
from rmcore.training.resume import ResumePoint, clear, rewind
from tasks.device import SLOTS_VARIABLE, device_slots, held_slots, in_the_way, slots_environment, slots_needed
from tasks.sharing import pushed, shared_store, states_shared, taken
from tasks.stage_processes import Tell, is_resumable, run_child
from tasks.waiting import Wait, noted, same_stage

Follow = Callable[[Path], AbstractContextManager[None]]
"""Sends a growing metrics.jsonl somewhere while the block runs."""


def execute(
    store: Store,
    stage: Stage,
    follow: Follow,
    before: Callable[[], None],
    tell: Tell = lambda line: None,
    *,
    run: str | None = None,
    wait: Wait | None = None,
) -> tuple[ArtifactRef, bool]:
    """Return the stage's artifact, computing it if the store has no valid copy, and whether it was computed.

    Two callers with the same key do the work once: the second waits for the first. `before` is called once
    nothing is left to wait for. `tell` receives the progress lines. `run` names this run to others that wait for the
    stage, and prefixes its lines on a shared terminal. `wait` records what is being waited for.

    Raises:
        RmcoreError: as `run_child`.
    """
    name, key, run, wait = stage.name, stage.key, run or stage.slug, wait or Wait()
    wait.reason = partial(same_stage, store, name, key)
    with store.lock(key):
        shared = shared_store()
        if store.status(name, key).state == "valid" or taken(shared, store, stage, tell):
            wait.end()
            return store.ref(name, key), False
        device, processes = stage.device_name or "auto", stage.num_processes
        needed = 0 if stage.device_name is None else slots_needed(device, processes)
        wait.reason = partial(in_the_way, store, device, needed)
        with noted(store, key, run), held_slots(store, run, device, needed) as slots:
            wait.end()
            if taken(shared, store, stage, tell):  # another machine committed it while this one waited for its device
                return store.ref(name, key), False
            before()
            resumable = bool(stage.kept)
            with (
                store.publish(
                    name, stage.slug, stage.inputs, outcome=stage.outcome, resumable=resumable, key=key
                ) as out,
                nullcontext() if shared is None else states_shared(shared, stage, out, tell),
            ):
                pinned = slots_environment(slots, device, processes) if slots else {}
                if slots:  # of all, as of the GPUs it sees its own
                    pinned[SLOTS_VARIABLE] = str(device_slots())
                _compute(stage, out, follow, tell, pinned, run)
            if shared is not None:
                pushed(shared, store, stage, tell)
            return store.ref(name, key), True


def _compute(stage: Stage, out: Path, follow: Follow, tell: Tell, environment: dict[str, str], run: str) -> None:
    """Run the stage into `out`, from where an earlier attempt was cut off."""
    if stage.finished and (out / stage.finished).is_file():
        clear(out)  # an earlier attempt died between the end of its work and here
        return
    if stage.kept:
        _announce(rewind(out), tell)
    (out / METRICS_FILE).touch()
    try:
        with follow(out / METRICS_FILE):
            run_child(stage, out, environment, tell, run)
    except RmcoreError:
        if not is_resumable(stage, out):  # refused before it began: nothing to resume from
            shutil.rmtree(out)
        raise
    if stage.finished and not (out / stage.finished).is_file():
        raise TrainingError(
            f"stage {stage.name} ended without {stage.finished}, so it was cut off although it reported "
            f"success; run the same command again to resume. Checkpoints written before that: {out}"
        )


def _announce(point: ResumePoint | None, tell: Tell) -> None:
    if point is not None:
        resumed = f"train resumes from step {point.step}, where an earlier attempt was cut off"
        for line in (*(f"warning: {note}" for note in point.notes), resumed):
            print(line, file=sys.stderr)
            tell(line)
