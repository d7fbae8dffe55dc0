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

from rmcore.cli.common import FAILED
from rmcore.core.errors import ServiceError
from rmcore.core.processes import terminate_children

WATCH_SECONDS = 1.0
REFUSALS_OF_A_DEAD_SERVER = 3
"""So that a server that is started anew at once is not missed."""


def leave_dead_server() -> None:
    """Use the embedded API where the configured server does not answer, and say so: the run matters more than its page.

    Call it before Prefect is imported, which reads the address then.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if not configured:
        return
    try:
        httpx.get(f"{configured.rstrip('/')}/health", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        del os.environ["PREFECT_API_URL"]
        os.environ["PREFECT_API_AUTH_STRING"] = os.environ["PREFECT_SERVER_API_AUTH_STRING"]
        print(
            f"warning: Prefect at {configured} does not answer ({error}); the embedded API is used, so this run will "
            "not show on that server. `rm-opt up` starts one here.",
            file=sys.stderr,
        )


def current_api() -> str:
    """Address of the API that this process's flows use: the configured server, else Prefect's embedded one."""
    if configured := os.environ.get("PREFECT_API_URL"):
        return configured.rstrip("/")
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return str(client.api_url).rstrip("/")


@contextmanager
def end_without_server(advice: str) -> Iterator[None]:
    """End this process with one sentence, and `advice`, if Prefect's server goes away during the block.

    A flow cannot go on without it, and Prefect's client would try for minutes and log a traceback for each attempt.
    The embedded server is started here, if it is the one in use.

    Raises:
        ServiceError: the embedded server did not start.
    """
    try:
        api = httpx.URL(current_api())
    except RuntimeError as error:  # what Prefect raises
        raise ServiceError(f"Prefect's embedded server did not start: {error}") from error
    # Python writes a byte for every signal that it handles: whoever is asked to end needs no reason, and Ctrl-C in a
    # terminal reaches the embedded server at the same time.
    asked_to_end, asking = socket.socketpair()
    asking.setblocking(False)
    hears_signals = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(asking.fileno(), warn_on_full_buffer=False) if hears_signals else -1
    # The embedded server has answered already; nothing is said of a server that never takes a connection from here: it
    # is reached through a proxy.
    was_there = "PREFECT_API_URL" not in os.environ
    watch = (api, advice, asked_to_end, was_there)
    threading.Thread(target=_watch, args=watch, name="prefect-watch", daemon=True).start()
    try:
        yield
    finally:
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
