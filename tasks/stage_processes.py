"""The processes of one stage: one, or where its settings ask for more, several that train one model together.

Several are what torchrun would start on one machine (RANK, WORLD_SIZE, …), forked like all stages. The first one writes
the artifact and tells its progress. When one ends badly the others cannot go on: they notice, or are ended.
"""

import contextlib
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.exceptions import TerminationSignal

from rmcore.core import errors
from rmcore.core.child_process import PLACE, ForkedProcess
from rmcore.core.errors import INTERRUPTED, RmcoreError, TrainingError
from rmcore.core.processes import TAIL_LINES
from rmcore.core.progress import progress_descriptor
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE
from rmcore.stages.stage import Stage
from tasks.device import as_seen

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
