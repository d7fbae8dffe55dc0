"""A Prefect server of one process, for runs where none is up: it starts while the process imports, and ends with it.

Prefect would start one, too, but only after four seconds spent on importing its server into the process that merely
starts it, open to every Host, and left behind by a process that is killed.
"""

import atexit
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time

import httpx

from rmcore.core.errors import ServiceError
from rmcore.core.ports import claim, hold
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
