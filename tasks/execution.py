"""Run one stage in a child process and publish what it wrote."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from prefect.exceptions import TerminationSignal

from rmcore.core import errors
from rmcore.core.errors import RmcoreError, TrainingError
from rmcore.core.progress import progress_descriptor
from rmcore.core.store import ArtifactRef, Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE, INTERRUPTED
from rmcore.stages.stage import Stage
from rmcore.training.resume import ResumePoint, clear, rewind
from tasks.device import as_seen, in_the_way, several_device_slots, slots_environment, slots_needed
from tasks.sharing import pushed, shared_store, states_shared, taken
from tasks.stage_processes import LOG_FILE, StageProcesses
from tasks.waiting import Wait, holder, noted

Follow = Callable[[Path], AbstractContextManager[None]]
"""Sends a growing metrics.jsonl somewhere while the block runs."""
Tell = Callable[[str], None]
"""Takes one line for the log of a run; called from a thread of its own."""
SHARED_TERMINAL = "RM_OPT_SHARED_TERMINAL"
"""Set where several stages run side by side: each line of progress says whose it is, and none draws a bar."""
LOG_TAIL = 15
"""Lines at the end of a crashed stage's output that its error shows."""
SAVING_SECONDS = 30.0
"""How long an interrupted stage may take to save its last checkpoint."""


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
        RmcoreError: whatever the stage refused with, of the same class.
        TrainingError: the stage's process died.
    """
    key = stage.key
    run, wait = run or stage.slug, wait or Wait()
    wait.on(lambda: same_stage(store, stage.name, key))
    with store.lock(key):
        if store.status(stage.name, key).state == "valid":
            wait.end()
            return store.ref(stage.name, key), False
        device, processes = stage.device_name, stage.num_processes
        shared = shared_store()
        if taken(shared, store, stage, tell):
            wait.end()
            return store.ref(stage.name, key), False
        needed = 0 if device is None else slots_needed(device, processes)
        wait.on(partial(in_the_way, store, device or "auto", needed))
        with noted(store, key, run), several_device_slots(store, run, device or "auto", needed) as slots:
            wait.end()
            if taken(shared, store, stage, tell):  # another machine committed it while this one waited for its device
                return store.ref(stage.name, key), False
            before()
            with (
                store.publish(
                    stage.name, stage.slug, stage.inputs, outcome=stage.outcome, resumable=bool(stage.kept), key=key
                ) as out,
                nullcontext() if shared is None else states_shared(shared, stage, out, tell),
            ):
                pinned = {} if device is None else slots_environment(slots, device, processes)
                _compute(stage, out, follow, tell, pinned, run)
            if shared is not None:
                pushed(shared, store, stage, tell)
            return store.ref(stage.name, key), True


def _compute(stage: Stage, out: Path, follow: Follow, tell: Tell, environment: Mapping[str, str], run: str) -> None:
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
        if not _is_resumable(stage, out):  # refused before it began: nothing to resume from
            shutil.rmtree(out)
        raise
    if stage.finished and not (out / stage.finished).is_file():
        raise TrainingError(
            f"stage {stage.name} ended without {stage.finished}, so it was cut off although it reported "
            f"success; run the same command again to resume. Checkpoints written before that: {out}"
        )


def same_stage(store: Store, name: str, key: str) -> str:
    """Describe the run that is computing the stage of that key, for messages; empty if there is none."""
    computed_by = holder(store, key)
    return f"the same {name}, which {computed_by} computes" if computed_by else ""


def run_child(stage: Stage, out: Path, environment: Mapping[str, str], tell: Tell, run: str) -> None:
    """Run a stage in a process of its own and wait. What it prints goes to a log, its progress to standard error.

    `tell` receives the progress lines as well, also where standard error is a terminal and shows a bar.

    If it fails, the error names the checkpoints that it had written.
    """
    with tempfile.TemporaryDirectory(prefix="rm-opt-") as folder:
        place = Path(folder)
        spec = {"stage": stage.name, "arguments": _as_seen(stage), "out": str(out)}
        try:
            status, own = _wait_for_children(place, spec, stage.num_processes, environment, tell, run)
            if status == DELIBERATE_ERROR:
                raise _stage_error(own / ERROR_FILE)
            if status == INTERRUPTED:
                raise TrainingError(f"stage {stage.name} was asked to stop; run the same command again to resume.")
            if status:
                raise TrainingError(_crash_message(stage, status, own / LOG_FILE))
        except RmcoreError as error:
            if not _is_resumable(stage, out):
                raise
            raise type(error)(f"{error} Written before that, and resumed from by the same command: {out}") from error
        except (KeyboardInterrupt, TerminationSignal):
            if _is_resumable(stage, out):
                print(f"written so far: {out}", file=sys.stderr)
            raise


def _as_seen(stage: Stage) -> dict[str, Any]:
    given, device = stage.model_dump(mode="json"), stage.device_name
    return given if device is None else given | {"device": as_seen(device)}


def _wait_for_children(
    place: Path, spec: Mapping[str, Any], num_processes: int, environment: Mapping[str, str], tell: Tell, run: str
) -> tuple[int, Path]:
    with _shown_progress(tell, run) as shown:
        processes = StageProcesses(place, spec, num_processes, os.environ | environment, shown)
        try:
            return processes.wait()
        except (KeyboardInterrupt, TerminationSignal):
            # A terminal sends Ctrl-C to the child too, other sources of an interrupt do not. SIGTERM, because a process
            # that was started in the background ignores SIGINT.
            processes.terminate()
            with contextlib.suppress(TimeoutError):
                processes.wait(timeout=SAVING_SECONDS)
            raise
        finally:
            processes.kill()
            processes.wait()


@contextmanager
def _shown_progress(tell: Tell, run: str) -> Iterator[list[int]]:
    """Yield file descriptors for a child's progress: a pipe read for `tell`, and the terminal if it alone writes there.

    Without such a terminal the lines also go to standard error; where stages of several runs share that, each line is
    prefixed with the name of the `run`.
    """
    errors = progress_descriptor()
    is_shared = SHARED_TERMINAL in os.environ
    has_bar = errors is not None and os.isatty(errors) and not is_shared
    reading, writing = os.pipe()

    def relay() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if errors is not None and not has_bar:
                    with contextlib.suppress(OSError):  # its reader has gone
                        os.write(errors, (f"{run}: {line}" if is_shared else line).encode())
                tell(line.rstrip("\n"))

    relaying = threading.Thread(target=relay, name="progress", daemon=True)
    relaying.start()
    try:
        yield [errors, writing] if errors is not None and has_bar else [writing]
    finally:
        os.close(writing)
        relaying.join(timeout=1.0)  # a process that outlives the child may hold the other end


def _crash_message(stage: Stage, status: int, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
    meaning = "it was killed, often for lack of memory" if status < 0 else "it crashed"
    return f"stage {stage.name} ended with status {status}: {meaning}. The end of its output:\n{tail}\n"


def _is_resumable(stage: Stage, out: Path) -> bool:
    """Whether there is something to resume from."""
    return any(True for pattern in stage.kept for _ in out.glob(pattern))


def _announce(point: ResumePoint | None, tell: Tell) -> None:
    if point is not None:
        resumed = f"train resumes from step {point.step}, where an earlier attempt was cut off"
        for line in (*(f"warning: {note}" for note in point.notes), resumed):
            print(line, file=sys.stderr)
            tell(line)


def _stage_error(path: Path) -> RmcoreError:
    described = json.loads(path.read_text())
    kind = getattr(errors, described["type"], RmcoreError)
    return kind(described["message"])
