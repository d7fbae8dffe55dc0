"""A worker of this machine: it takes cells from the server that `rm-opt up` started on another one (`rm-opt worker`).

It is told one address, that of Prefect, and learns that of the shared store there. What it computes reaches everybody
through that store, so this machine's home is only a cache, and it tracks nothing. A worker that is asked to end
(SIGTERM, as before a spot machine goes) lets its runs save their state, and the matrix starts them again elsewhere.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import psutil

from rmcore.core.child_process import StageServer
from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.ports import held, hold
from rmcore.core.processes import terminate, this_machine
from rmcore.core.web import keep_direct
from tasks.device import device_slots
from tasks.execution import SAVING_SECONDS
from tasks.home import environment_for, home, make_home, project_root
from tasks.local_services import CELLS_POOL, CLUSTER
from tasks.passwords import basic_authorization, require_proof
from tasks.sharing import SHARED_VARIABLE, named_store

HEARTBEAT_SECONDS = 30
"""Between two signs of life of a run, the least that Prefect allows; `flows.deploy` looks for them."""
PROOF_SECONDS = 5.0
"""Between two looks whether Prefect's server is still one that has the password."""


def find_shared(address: str, secret: str) -> str | None:
    """Ask Prefect where the store is that its machine shares, and first for a proof that it has the password.

    Args:
        address: of Prefect, as `rm-opt up` printed it.
        secret: password of that home's servers.

    Returns:
        What `deploy.report_cluster` has told it: the store's address, or None if that machine shares none.

    Raises:
        ConfigError: it is no address.
        ServiceError: no Prefect of `rm-opt up` answers there, it has not this password and was not sent it, or the port
            is another user's.
    """
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise ConfigError(f"--server {address} is no address: write that of Prefect, http://HOST:4200.")
    keep_direct()
    hold(address)  # where it is of this machine
    place = f"{address}/api/variables/name/{CLUSTER}"
    try:
        require_proof(address, secret)
        told = httpx.get(place, headers=basic_authorization(secret), timeout=20).raise_for_status().json()
        shared: str | None = told["value"]["shared"]
        return shared
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
        raise ServiceError(
            f"{address} does not answer as Prefect of `rm-opt up` of this version does ({error}): see that `rm-opt up "
            "--host …` runs there and that this machine reaches it."
        ) from error


def work(server: str, secret: str, name: str | None, limit: int | None) -> int:
    """Run Prefect's worker until SIGTERM or Ctrl-C, and let its runs save then; the exit status.

    Args:
        server: address of Prefect, as `rm-opt up` printed it.
        secret: password of that home's servers.
        name: on Prefect's page; default: machine and pid.
        limit: cells at a time; default: the slots of the device.

    Raises:
        ConfigError: no store is shared, or another one than the server's, or see `find_shared`.
        ServiceError: the worker ended by itself, another program has Prefect's address or port, or see `find_shared`.
        StoreError: the shared store cannot be used.
    """
    server = server.rstrip("/")
    environment = _environment(server, secret, find_shared(server, secret))
    os.environ |= environment
    make_home(home())
    named_store()
    limit = limit or device_slots()
    name = name or f"{this_machine()}-{os.getpid()}".replace("/", "-")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.set())
    with StageServer(environment) as stages:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", CELLS_POOL, "--type", "process",
             "--name", name, "--limit", str(limit)],
            env=environment | stages.variable, stdin=subprocess.DEVNULL, pass_fds=held(), start_new_session=True,
        )  # fmt: skip
        print(f"worker      {name} takes {limit} at a time from {server}", flush=True)
        looked = time.monotonic()
        try:
            while not asked.wait(0.5):
                if time.monotonic() - looked > PROOF_SECONDS:
                    require_same_server(server, secret, psutil.Process(process.pid))
                    looked = time.monotonic()
                if process.poll() is not None:
                    raise ServiceError(
                        f"Prefect's worker has ended with status {process.returncode}; its log is above."
                    )
            worker = psutil.Process(process.pid)
            worker.suspend()  # it takes nothing new
            terminate(worker.children(recursive=True), SAVING_SECONDS)
            print(f"worker      {name} ended", flush=True)
        finally:
            process.kill()
            process.wait()
    return 0


def require_same_server(address: str, secret: str, worker: psutil.Process) -> None:
    """See that Prefect's address is still that of a server with the password; it may have ended, and be another's.

    Args:
        address: of Prefect.
        secret: the password.
        worker: Prefect's worker, which ends with all its runs where that is not so.

    Raises:
        ServiceError: it is not.
    """
    try:
        require_proof(address, secret)
    except httpx.HTTPError:  # it is away or busy; Prefect's worker waits for it
        return
    except ServiceError:
        for process in [*worker.children(recursive=True), worker]:  # at once: each would send its password there
            with suppress(psutil.NoSuchProcess):
                process.kill()
        raise


def _environment(server: str, secret: str, told: str | None) -> dict[str, str]:
    given = os.environ.get(SHARED_VARIABLE)
    if given and told and given != told:
        raise ConfigError(
            f"{SHARED_VARIABLE} is {given} here and {told} where the server runs: cells would not arrive. "
            "Set it to the same address, or unset it here."
        )
    shared = given or told
    environment = environment_for(server, secret, project_root()) | {
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)
    }
    return environment if shared is None else environment | {SHARED_VARIABLE: shared}
