"""Who runs a run: what Prefect and MLflow are told of its process, by which a later start sees that it has died.

After SIGKILL, or a machine that went down, both would show the run as running for ever.
"""

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from rmcore.core.processes import start_of, this_boot

HOST, MACHINE, BOOT, PID, STARTED = "host", "machine", "boot", "pid", "started"
OWNER_FIELDS = (HOST, PID, STARTED, BOOT, MACHINE)
DIGITS = 12
"""Length of the digest that names an installation."""
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


def _this_installation() -> str:
    """Digest of the id that an installed system keeps over its boots (machine-id(5): it is not to be shown itself)."""
    try:
        known = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:  # not systemd, or a container without one
        known = ""
    return hashlib.sha256(f"rm-opt {known}".encode()).hexdigest()[:DIGITS] if known else ""


def this_process() -> dict[str, str]:
    """Name this process: its machine, the boot of that, its pid there, and when it was started (`start_of`)."""
    return {
        HOST: this_machine(),
        MACHINE: _this_installation(),
        BOOT: this_boot(),
        PID: str(os.getpid()),
        STARTED: str(start_of(os.getpid())),
    }


def has_died(owner: Mapping[str, str]) -> bool:
    """Whether the process that `this_process` described has ended; never said of other machines' processes.

    Two machines, or containers on two, may have one name; so a process under another kernel has died only where this
    installation is known to be that one, started again.
    """
    if any(name not in owner for name in OWNER_FIELDS) or owner[HOST] != this_machine():
        return False
    if owner[BOOT] != this_boot():
        return owner[MACHINE] == _this_installation() != ""
    return start_of(int(owner[PID])) != owner[STARTED]
