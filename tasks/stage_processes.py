"""The processes of one stage: one, or where its settings ask for more, several that train one model together.

Several are what torchrun would start on one machine (RANK, WORLD_SIZE, …), forked like all stages. The first one writes
the artifact and tells its progress. When one ends badly the others cannot go on: they notice, or are ended.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmcore.core.child_process import PLACE, ForkedProcess
from rmcore.stages.run import ERROR_FILE

MODULE = "rmcore.stages.run"
LOG_FILE = "log.txt"
LOOK_SECONDS = 0.5
"""Longest wait in one piece: whether the others still run is looked at between two."""
GRACE_SECONDS = 10.0
"""How long the others have to notice that one has ended badly. They wait for it in a collective, some for ever."""
LOST = "LostProcessError"
"""Type of the error of a process that noticed: never the reason."""


class StageProcesses:
    """Starts the processes of a stage and waits for them.

    Args:
        folder: where they may write; each gets a folder of its own there, with its log.
        spec: what `rmcore.stages.run` is to run.
        number: how many.
        environment: variables of all of them, but for a place that this process itself has among others.
        progress: descriptors that the first one shows its progress on.
    """

    def __init__(
        self,
        folder: Path,
        spec: Mapping[str, Any],
        number: int,
        environment: Mapping[str, str],
        progress: Sequence[int] = (),
    ) -> None:
        self.folders = [folder / str(rank) for rank in range(number)]
        self._processes: list[ForkedProcess] = []
        try:
            for place, own in zip(_places(number), self.folders, strict=True):
                own.mkdir()
                (own / "spec.json").write_text(json.dumps(spec))
                with (own / LOG_FILE).open("w") as log:
                    shown = () if self._processes else progress
                    inherited = {name: value for name, value in environment.items() if name not in PLACE}
                    variables = inherited | place
                    self._processes.append(ForkedProcess(MODULE, own / "spec.json", log, variables, shown))
        except BaseException:  # none is left that the others would wait for
            self.kill()
            raise

    def wait(self, timeout: float | None = None) -> tuple[int, Path]:
        """The exit status of all of them, once all have ended, and the folder of the one that has it.

        That is 0, or the status of the process that others ended for.

        Raises:
            TimeoutError: not all have ended after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        ended: dict[int, int] = {}
        failed_at: float | None = None
        while len(ended) < len(self._processes):
            for rank, process in enumerate(self._processes):
                with contextlib.suppress(TimeoutError):
                    if rank not in ended:
                        ended[rank] = process.wait(LOOK_SECONDS / len(self._processes))
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._processes) - len(ended)} processes of the stage still run")
            if failed_at is None and any(ended.values()):
                failed_at, killed = time.monotonic(), set(range(len(self._processes))) - ended.keys()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
                self.kill()
        failures = [rank for rank, status in ended.items() if status]
        if not failures:
            return 0, self.folders[0]
        # In the order in which they were found, and those that only noticed, or were ended here, last.
        reason = min(failures, key=lambda rank: (_only_noticed(self.folders[rank]), rank in killed and ended[rank] < 0))
        return ended[reason], self.folders[reason]

    def terminate(self) -> None:
        """Ask all of them to save and end."""
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()


def _places(number: int) -> list[dict[str, str]]:
    """Give each of `number` processes its variables, as torchrun does; none for one that is alone."""
    if number == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


def _only_noticed(folder: Path) -> bool:
    path = folder / ERROR_FILE
    return path.is_file() and json.loads(path.read_text())["type"] == LOST
