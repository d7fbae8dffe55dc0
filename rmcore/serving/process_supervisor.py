"""Keeps no server alive past its starter: `python -m rmcore.serving.process_supervisor PIPE COMMAND...`.

The starter holds the write end of a pipe. However the starter ends, SIGKILL included, the kernel closes that end, and
the supervisor, which waits at the read end, ends everything below itself. vLLM's engine is a grandchild of the server,
so no signal to the server alone would do.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import psutil

from rmcore.core.processes import die_with_parent, terminate

PR_SET_CHILD_SUBREAPER = 36


def keep(pipe: int, command: list[str]) -> int:
    """Run `command` until it ends or the other end of `pipe` is closed, then end all that is left of it.

    Returns:
        The command's exit status, negative where a signal ended it.
    """
    if sys.platform == "linux":  # orphans below come to us, so that they are seen and ended
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # was for the supervisor
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - safe: there is one thread yet
    )
    threading.Thread(target=_end_with_starter, args=(pipe, process), daemon=True).start()
    status = process.wait()
    _end_all()
    return status


def _end_with_starter(pipe: int, process: subprocess.Popen[bytes]) -> None:
    while os.read(pipe, 64):
        pass
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()


def _end_all() -> None:
    terminate(psutil.Process().children(recursive=True))


def main() -> int:
    """Entry point. Only the pipe decides: Ctrl-C reaches the whole terminal, and the starter may have work left."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = keep(int(sys.argv[1]), sys.argv[2:])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
