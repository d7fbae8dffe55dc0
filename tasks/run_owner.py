"""Who runs a run: what Prefect and MLflow are told of its process, by which a later start sees that it has died.

After SIGKILL, or a machine that went down, both would show the run as running for ever.
"""

import os
import socket
from collections.abc import Mapping

import psutil

from tasks.home import find_process

HOST, PID, STARTED = "host", "pid", "started"


def this_process() -> dict[str, str]:
    """Name this process: the machine, the pid there, and when it was created (epoch seconds)."""
    return {HOST: socket.gethostname(), PID: str(os.getpid()), STARTED: f"{psutil.Process().create_time():.2f}"}


def has_died(owner: Mapping[str, str]) -> bool:
    """Whether the process that `this_process` described has ended; never said of other machines' processes."""
    if owner.keys() < {HOST, PID, STARTED} or owner[HOST] != socket.gethostname():
        return False
    return find_process(int(owner[PID]), float(owner[STARTED])) is None
