"""Which process runs, whatever the clock is set to, and ending processes with all that they started.

`this_process` names one to Prefect, MLflow and records, by which a later start sees that it has died: after SIGKILL, or
a machine that went down, they would show its run as running for ever.
"""

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from rmcore.core.errors import ServiceError

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1
TAIL_LINES = 15
BOOT_DIGITS = 12
HOST, MACHINE, BOOT, PID, STARTED = "host", "machine", "boot", "pid", "started"
OWNER_FIELDS = (HOST, PID, STARTED, BOOT, MACHINE)
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace that a Linux machine boots with (PROC_PID_INIT_INO of the kernel's proc_ns.h)."""


def this_boot() -> str:
    """Name the running kernel, which all containers on it share: its boot id, or the host's name outside Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:BOOT_DIGITS]
    except OSError:  # not Linux
        return socket.gethostname()


def start_of(pid: int) -> str | None:
    """Say when the process of this pid was started: of all that ever have it in one boot, each says something else.

    On Linux in clock ticks since the boot (proc_pid_stat(5), field 22): psutil's `create_time` is wall time, made of
    these and of the boot's, which moves when the clock is set.

    Returns:
        The start, in words to compare; None if no such process runs. A zombie has ended.
    """
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if state in "ZX" else fields[18]
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


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
    return hashlib.sha256(f"rm-opt {known}".encode()).hexdigest()[:BOOT_DIGITS] if known else ""


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


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent dies, so that no training continues unseen. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before the request was made
            sys.exit("the parent process is gone")


def terminate(processes: list[psutil.Process], grace: float = GRACE_SECONDS) -> None:
    """SIGTERM, `grace` seconds, SIGKILL. psutil compares creation times before it signals: a recycled pid is safe.

    Raises:
        ServiceError: a process survived SIGKILL.
    """
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        deadline = time.monotonic() + grace
        while (processes := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    if processes:
        raise ServiceError(
            f"processes {[process.pid for process in processes]} survived SIGKILL: the kernel holds them, probably in "
            "a device or disk call. Run `rm-opt down` again later."
        )


def terminate_children() -> None:
    """SIGTERM to all that this process has started, and what that has started, without waiting for their end."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


def runs(process: psutil.Process) -> bool:
    """Whether the process has not ended. A zombie has: in a container nobody may ever collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(variable: str, token: str) -> list[psutil.Process]:
    """Processes of this user whose environment has `variable` = `token`: descendants, orphaned or not."""
    found = []
    for process in psutil.process_iter():
        try:
            # Another user's process may claim anything, and root can read its environment.
            mine = process.uids().real == os.getuid() and process.pid != os.getpid()
            if mine and process.environ().get(variable) == token and runs(process):
                found.append(process)
        except psutil.Error:  # ended meanwhile
            continue
    return found


def tail(log: Path) -> str:
    """The last lines of a log, with a line that says so."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return f"The end of its log, {log}:\n" + "\n".join(f"  {line}" for line in lines)
