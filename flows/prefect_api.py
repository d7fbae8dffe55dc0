"""Which Prefect API this process uses, and what becomes of a run whose server is away or goes away.

Where none is up, a server of this process alone starts while the process imports, and ends with it. Prefect would start
one, too, but only after four seconds spent on importing its server into the process that merely starts it, open to
every Host, and left behind by a process that is killed.

Plain HTTP and sockets: an address is tried before Prefect, which reads it when it is imported, may be; and whether
anybody listens at all is nothing that Prefect's client can be asked.
"""

import atexit
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from rmcore.cli.guard import FAILED
from rmcore.core.errors import ServiceError
from rmcore.core.ports import claim, hold
from rmcore.core.processes import terminate_children
from rmcore.core.progress import progress_bar
from tasks.local_services import EMBEDDED_PREFECT, GUARDED_SERVER, HOST

TIMEOUT_VARIABLE = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
"""Prefect's own setting; tasks/home.py sets it."""
END_SECONDS = 5.0
MAX_SHOWN_CHARACTERS = 2000
SERVER_ENVIRONMENT = {
    # As for Prefect's own embedded server: no UI, and only the services that runs cannot do without.
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    # Nothing of ours is kept in Prefect's blocks. To remember which were registered is to hash them all at each start.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    # Automations are made in the UI, for the server that `rm-opt up` starts.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
}
EMBEDDED_VARIABLE = "RM_OPT_EMBEDDED_PREFECT"
"""Environment variable with the address of the embedded server, in the process that started it and in its children."""
WATCH_SECONDS = 1.0
REFUSALS_OF_A_DEAD_SERVER = 3
"""A server that starts again at once is found."""


class EmbeddedPrefect:
    """Prefect's server in a process of its own, on a free port; it ends when this process does, however that ends.

    Start it on the main thread: the kernel takes the end of the thread that started it for the end of the process.
    """

    def __init__(self) -> None:
        self.password = secrets.token_urlsafe()
        # Bound here and handed down, so that no program can take the port meanwhile, and requests wait instead of
        # failing; held, so that none of another user gets it, and with it the password, when the server has died.
        with claim(HOST, 0) as listener:
            listener.listen()
            port = listener.getsockname()[1]
            self.api = f"http://{HOST}:{port}/api"
            hold(self.api)
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
            given = [f"{HOST}:{port}", str(listener.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, *GUARDED_SERVER, EMBEDDED_PREFECT, *given],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=os.environ | SERVER_ENVIRONMENT | {"PREFECT_SERVER_API_AUTH_STRING": self.password},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the run, which ends the server last
            )
        atexit.register(self.end)

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            ServiceError: it ended, or does not answer in time.
        """
        seconds = float(os.environ[TIMEOUT_VARIABLE])
        deadline = time.monotonic() + seconds
        with httpx.Client(timeout=END_SECONDS) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.api}/health").is_success:
                        return
                if (code := self._process.poll()) is not None:
                    raise ServiceError(f"Prefect's embedded server ended while starting, code {code}. {self._said()}")
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"Prefect's embedded server did not answer within {seconds:.0f} s: this machine is very busy, "
                        f"or the database in {os.environ['PREFECT_HOME']} is locked. {TIMEOUT_VARIABLE} allows more "
                        f"seconds. {self._said()}"
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=0.05)

    def end(self) -> None:
        """End the server; nothing happens where it has ended."""
        self._process.terminate()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        atexit.unregister(self.end)

    def _said(self) -> str:
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip()[-MAX_SHOWN_CHARACTERS:]
        return f"It said:\n{said}" if said else "It said nothing."


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
    # Python writes a byte for every signal that it handles: a process that is asked to end saves first, though its
    # server, which may be asked at the same time, has ended.
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
