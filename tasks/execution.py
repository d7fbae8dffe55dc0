"""Run one stage in processes of its own and publish what it wrote.

A stage has one process, or where its settings ask for more, several that train one model together: what torchrun would
start on one machine (RANK, WORLD_SIZE, …), forked like all stages. The first one writes the artifact and tells its
progress. When one ends badly the others cannot continue: they notice, or are ended.
"""

import contextlib
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from prefect.exceptions import TerminationSignal

from rmcore.core import errors
from rmcore.core.child_process import PLACE, ForkedProcess
from rmcore.core.errors import INTERRUPTED, RmcoreError, TrainingError
from rmcore.core.processes import TAIL_LINES
from rmcore.core.progress import progress_descriptor
from rmcore.core.store import ArtifactRef, Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE
from rmcore.stages.stage import Stage
from rmcore.training.resume import clear, rewind
from tasks.device import Wait, as_seen, held_slots, in_the_way, noted, same_stage, slots_environment, slots_needed
from tasks.sharing import pushed, shared_store, states_shared, taken

Tell = Callable[[str], None]
"""Takes one line for the log of a run; called from a thread of its own."""
MODULE = "rmcore.stages.run"
LOG_FILE = "log.txt"
LOOK_SECONDS = 0.5
"""Longest wait in one piece: whether the others still run is looked at between two."""
GRACE_SECONDS = 10.0
"""How long the others have to notice that one has ended badly. They wait for it in a collective, some for ever."""
SAVING_SECONDS = 30.0
"""How long an interrupted stage may take to save its last checkpoint."""
LOST = "LostProcessError"
"""Type of the error of a process that noticed: never the reason."""
SHARED_TERMINAL = "RM_OPT_SHARED_TERMINAL"
"""Set where several stages run side by side: each line of progress says whose it is, and none draws a bar."""
Follow = Callable[[Path], AbstractContextManager[None]]
"""Sends a growing metrics.jsonl somewhere while the block runs."""


def run_child(stage: Stage, out: Path, environment: Mapping[str, str], tell: Tell, run: str) -> None:
    """Run a stage in processes of its own and wait. What they print goes to logs, progress to standard error.

    `tell` receives the progress lines as well, also where standard error is a terminal and shows a bar. `run` names
    this run where several share it.

    Raises:
        RmcoreError: whatever the stage refused with, of the same class; it names what was written before that.
        TrainingError: it crashed, was killed, or was asked to stop.
    """
    given, device = stage.model_dump(mode="json"), stage.device_name
    seen = given if device is None else given | {"device": as_seen(device)}
    with tempfile.TemporaryDirectory(prefix="rm-opt-") as folder:
        try:
            with _shown_progress(tell, run) as shown:
                spec = {"stage": stage.name, "arguments": seen, "out": str(out)}
                status, own = run_processes(Path(folder), spec, stage.num_processes, os.environ | environment, shown)
            if status == DELIBERATE_ERROR:
                described = json.loads((own / ERROR_FILE).read_text())
                raise getattr(errors, described["type"], RmcoreError)(described["message"])
            if status == INTERRUPTED:
                raise TrainingError(f"stage {stage.name} was asked to stop; run the same command again to resume.")
            if status:
                meaning = "was killed, often for lack of memory" if status < 0 else f"crashed with status {status}"
                said = "\n".join((own / LOG_FILE).read_text(errors="replace").splitlines()[-TAIL_LINES:])
                raise TrainingError(f"stage {stage.name} {meaning}. The end of its output:\n{said}\n")
        except RmcoreError as error:
            if not is_resumable(stage, out):
                raise
            raise type(error)(f"{error} Written before that, and resumed from by the same command: {out}") from error
        except (KeyboardInterrupt, TerminationSignal):
            if is_resumable(stage, out):
                print(f"written so far: {out}", file=sys.stderr)
            raise


def is_resumable(stage: Stage, out: Path) -> bool:
    """Whether there is something to resume from."""
    return any(True for pattern in stage.kept for _ in out.glob(pattern))


def run_processes(
    folder: Path, spec: Mapping[str, Any], number: int, environment: Mapping[str, str], progress: Sequence[int] = ()
) -> tuple[int, Path]:
    """Run the processes of a stage; on Ctrl-C or SIGTERM they save and end first.

    Args:
        folder: where they may write; each gets a folder of its own there, with its log.
        spec: what `rmcore.stages.run` is to run.
        number: how many.
        environment: variables of all of them, but for a place that this process itself has among others.
        progress: descriptors that the first one shows its progress on.

    Returns:
        0 once all have ended, or the status of the process that others ended for, and the folder of that process.
    """
    folders = [folder / str(rank) for rank in range(number)]
    variables = {name: value for name, value in environment.items() if name not in PLACE}
    processes: list[ForkedProcess] = []
    try:
        for place, own in zip(_places(number), folders, strict=True):
            own.mkdir()
            (own / "spec.json").write_text(json.dumps(spec))
            with (own / LOG_FILE).open("w") as log:
                shown = () if processes else progress
                processes.append(ForkedProcess(MODULE, own / "spec.json", log, variables | place, shown))
        statuses = _wait(processes)
    except (KeyboardInterrupt, TerminationSignal):
        # A terminal sends Ctrl-C to the child too, other sources of an interrupt do not. SIGTERM, because a process
        # that was started in the background ignores SIGINT.
        for process in processes:
            process.terminate()
        _wait(processes, SAVING_SECONDS)
        raise
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    failures = [rank for rank, status in statuses.items() if status]
    if not failures:
        return 0, folders[0]
    # In the order in which they were found, and those that only noticed, or were killed meanwhile, last.
    reason = min(failures, key=lambda rank: (_noticed(folders[rank]), rank != failures[0] and statuses[rank] < 0))
    return statuses[reason], folders[reason]


def _wait(processes: Sequence[ForkedProcess], seconds: float = math.inf) -> dict[int, int]:
    """Exit statuses by rank, as they are found; of some alone after so many seconds, or a grace after a failure."""
    statuses, limit = dict[int, int](), time.monotonic() + seconds
    while len(statuses) < len(processes) and time.monotonic() < limit:
        for rank, process in enumerate(processes):
            with contextlib.suppress(TimeoutError):
                if rank not in statuses:
                    statuses[rank] = process.wait(LOOK_SECONDS / len(processes))
                    if statuses[rank]:
                        limit = min(limit, time.monotonic() + GRACE_SECONDS)
    return statuses


def _places(number: int) -> list[dict[str, str]]:
    """Give each of `number` processes its variables, as torchrun does; none for one that is alone."""
    if number == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    all_of_them = {**dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(number)), "MASTER_ADDR": "127.0.0.1"}
    ranks = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(number))
    return [all_of_them | {"MASTER_PORT": port} | rank for rank in ranks]


def _noticed(folder: Path) -> bool:
    path = folder / ERROR_FILE
    return path.is_file() and json.loads(path.read_text())["type"] == LOST


@contextmanager
def _shown_progress(tell: Tell, run: str) -> Iterator[list[int]]:
    """Yield file descriptors for a child's progress: a pipe read for `tell`, and the terminal if it alone writes there.

    Without such a terminal the lines also go to standard error; where stages of several runs share that, each line is
    prefixed with the name of the `run`.
    """
    screen = progress_descriptor()
    is_shared = SHARED_TERMINAL in os.environ
    has_bar = screen is not None and os.isatty(screen) and not is_shared
    reading, writing = os.pipe()

    def relay() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if screen is not None and not has_bar:
                    with contextlib.suppress(OSError):  # its reader has gone
                        os.write(screen, (f"{run}: {line}" if is_shared else line).encode())
                tell(line.rstrip("\n"))

    relaying = threading.Thread(target=relay, name="progress", daemon=True)
    relaying.start()
    try:
        yield [screen, writing] if screen is not None and has_bar else [writing]
    finally:
        os.close(writing)
        relaying.join(timeout=1.0)  # a process that outlives the child may hold the other end


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
            wait.reason = str
            return store.ref(name, key), False
        device, processes = stage.device_name or "auto", stage.num_processes
        needed = 0 if stage.device_name is None else slots_needed(device, processes)
        wait.reason = partial(in_the_way, store, device, needed)
        with noted(store, key, run), held_slots(store, run, device, needed) as slots:
            wait.reason = str
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
                _compute(stage, out, follow, tell, pinned, run)
            if shared is not None:
                pushed(shared, store, stage, tell)
            return store.ref(name, key), True


def _compute(stage: Stage, out: Path, follow: Follow, tell: Tell, environment: dict[str, str], run: str) -> None:
    """Run the stage into `out`, from where an earlier attempt was cut off."""
    if stage.finished and (out / stage.finished).is_file():
        clear(out)  # an earlier attempt died between the end of its work and here
        return
    if stage.kept and (point := rewind(out)) is not None:
        resumed = f"train resumes from step {point.step}, where an earlier attempt was cut off"
        for line in (*(f"warning: {note}" for note in point.notes), resumed):
            print(line, file=sys.stderr)
            tell(line)
    (out / METRICS_FILE).touch()
    try:
        with follow(out / METRICS_FILE):
            run_child(stage, out, environment, tell, run)
    except RmcoreError:
        if not is_resumable(stage, out):  # refused before it began: nothing to resume from
            shutil.rmtree(out)
        raise
