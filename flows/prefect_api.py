"""Which Prefect API this process uses, and what becomes of a run whose server is away or goes away.

Plain HTTP and sockets: an address is tried before Prefect, which reads it when it is imported, may be; and whether
anybody listens at all is nothing that Prefect's client can be asked.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from rmcore.cli.guard import FAILED
from rmcore.core.processes import terminate_children
from rmcore.core.progress import progress_bar
from tasks.embedded_prefect import EmbeddedPrefect

EMBEDDED_VARIABLE = "RM_OPT_EMBEDDED_PREFECT"
"""Environment variable with the address of the embedded server, in the process that started it and in its children."""
WATCH_SECONDS = 1.0
REFUSALS_OF_A_DEAD_SERVER = 3
"""A server that starts again at once is found."""


_embedded: EmbeddedPrefect | None = None
_is_watched = False


def choose_api() -> None:
    """Use the configured server; where there is none, or none that answers, begin to start an embedded one.

    Call it before Prefect is imported, which reads the address then, and on the main thread. A server that does not
    answer is told of: the run matters more than its page.
    """
    global _embedded  # noqa: PLW0603 - one API a process, as Prefect has it
    if configured := os.environ.get("PREFECT_API_URL"):
        try:
            httpx.get(f"{configured.rstrip('/')}/health", timeout=10).raise_for_status()
            return
        except httpx.HTTPError as error:
            del os.environ["PREFECT_API_URL"]
            print(
                f"warning: Prefect at {configured} does not answer ({error}); the embedded API is used, so this run "
                "will not show on that server. `rm-opt up` starts one here.",
                file=sys.stderr,
            )
    _embedded = EmbeddedPrefect()
    os.environ["PREFECT_API_URL"] = os.environ[EMBEDDED_VARIABLE] = _embedded.api
    os.environ["PREFECT_API_AUTH_STRING"] = _embedded.password


def api_is_embedded() -> bool:
    """Whether the API of this process's flows ends with it, so that nobody will see its pages."""
    return os.environ.get("PREFECT_API_URL", "") in ("", os.environ.get(EMBEDDED_VARIABLE))


@contextmanager
def end_without_server(advice: str) -> Iterator[None]:
    """End this process with one sentence, and `advice`, if Prefect's server goes away during the block.

    A flow cannot continue without it, and Prefect's client would try for minutes and log a traceback for each attempt.
    An embedded server is waited for first. Inside another such block there is nothing to do: its advice holds.

    Raises:
        ServiceError: the embedded server did not start.
    """
    global _is_watched  # noqa: PLW0603 - one API a process, as Prefect has it
    if _is_watched:
        yield
        return
    api = httpx.URL(os.environ["PREFECT_API_URL"])
    if _embedded is not None and _embedded.api == api:
        with progress_bar("Prefect"):
            _embedded.wait()
    # Python writes a byte for every signal that it handles: a process that has to end needs no reason.
    asked_to_end, asking = socket.socketpair()
    asking.setblocking(False)
    hears_signals = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(asking.fileno(), warn_on_full_buffer=False) if hears_signals else -1
    # The embedded server has answered already; nothing is said of a server that never takes a connection from here: it
    # is reached through a proxy.
    was_there = api_is_embedded()
    watch = (api, advice, asked_to_end, was_there)
    threading.Thread(target=_watch, args=watch, name="prefect-watch", daemon=True).start()
    _is_watched = True
    try:
        yield
    finally:
        _is_watched = False
        if hears_signals:
            signal.set_wakeup_fd(before)
        asking.close()  # its other end becomes readable, which ends the watch


def _watch(api: httpx.URL, advice: str, asked_to_end: socket.socket, was_there: bool) -> None:
    """Look whether someone listens at all: a busy server does, and may take its time to answer."""
    port = api.port or (443 if api.scheme == "https" else 80)
    num_refused = 0
    with asked_to_end:
        while num_refused < REFUSALS_OF_A_DEAD_SERVER:
            try:
                socket.create_connection((api.host, port), timeout=10).close()
                num_refused, was_there = 0, True
            except ConnectionRefusedError:
                num_refused += was_there
            except OSError:  # the network's trouble, of which Prefect's client judges by itself
                pass
            if select.select([asked_to_end], [], [], WATCH_SECONDS)[0]:
                while asked_to_end.recv(64):  # until the other end is closed: a later signal must find a reader
                    pass
                return
    sys.stdout.flush()
    print(f"error: Prefect's server at {api} has ended during the run. {advice}", file=sys.stderr, flush=True)
    terminate_children()
    os._exit(FAILED)  # threads of Prefect's wait for an answer, so no other end comes soon
