"""Who runs a run: what Prefect and MLflow are told of its process, by which a later start sees that it has died.

After SIGKILL, or a machine that went down, both would show the run as running for ever.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from tasks.home import find_process

HOST, PID, STARTED = "host", "pid", "started"
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace that a Linux machine boots with (PROC_PID_INIT_INO of the kernel's proc_ns.h)."""


def this_machine() -> str:
    """Name that within which a pid means one process: the host, and of a container its pid namespace, too.

    A container may have the host's name and see the same home, and knows other processes under the same pids.
    """
    host = socket.gethostname()
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        return host
    return host if namespace == _FIRST_PID_NAMESPACE else f"{host}/pid-{namespace}"


def this_process() -> dict[str, str]:
    """Name this process: its machine (`this_machine`), the pid there, and when it was created (epoch seconds)."""
    return {HOST: this_machine(), PID: str(os.getpid()), STARTED: f"{psutil.Process().create_time():.2f}"}


def has_died(owner: Mapping[str, str]) -> bool:
    """Whether the process that `this_process` described has ended; never said of other machines' processes."""
    if owner.keys() < {HOST, PID, STARTED} or owner[HOST] != this_machine():
        return False
    return find_process(int(owner[PID]), float(owner[STARTED])) is None
