"""A worker of this machine: it takes cells from the server that `rm-opt up` started on another one (`rm-opt worker`).

It is told one address, that of Prefect, and learns the others there. What it computes reaches everybody through
the shared store, so this machine's home is only a cache. A worker that is asked to end (SIGTERM, as before a spot
machine goes) lets its runs save their state, hands them back, and another worker continues them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import psutil

from rmcore.core.child_process import StageServer
from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.ports import held, hold
from rmcore.core.processes import runs as is_running
from rmcore.core.processes import terminate, this_machine
from rmcore.core.web import keep_direct
from tasks.device import device_slots
from tasks.execution import SAVING_SECONDS
from tasks.home import environment_for, home, make_home, project_root
from tasks.local_services import CELLS_POOL, CLUSTER, PREFECT_SERVER
from tasks.passwords import Identity, ask_for_proof, basic_authorization
from tasks.sharing import SHARED_VARIABLE, named_store

HEARTBEAT_SECONDS = 30
"""Between two signs of life of a run, the least that Prefect allows; `flows.deploy` looks for them."""
PROOF_SECONDS = 5.0
"""Between two looks whether Prefect's server is still the one that the password is for."""
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True)
class Cluster:
    """Facts that the machine that hands cells out has told its Prefect (`prefect_client.report_cluster`)."""

    prefect: str
    mlflow: str
    shared: str | None


def find_cluster(server: str, key: str) -> tuple[Cluster, Identity]:
    """Ask Prefect where everything is, and each server for a proof that it is one of them.

    Args:
        server: its address, as `rm-opt up` printed it.
        key: of that home's servers.

    Raises:
        ConfigError: it is no address.
        ServiceError: no Prefect of `rm-opt up` answers there, or a server has another key.
    """
    address = server.rstrip("/")
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise ConfigError(f"--server {server} is no address: write that of Prefect, http://HOST:4200.")
    keep_direct()
    try:
        known = ask_for_proof(address, key)
        login = basic_authorization(known.password(PREFECT_SERVER))
        told = httpx.get(f"{address}/api/variables/name/{CLUSTER}", headers=login, timeout=20).raise_for_status().json()
        cluster = Cluster(address, **told["value"])
        ask_for_proof(cluster.mlflow, key)
        return cluster, known
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
        raise ServiceError(
            f"{address} does not answer as Prefect of `rm-opt up` of this version does ({error}): see that `rm-opt up "
            "--host …` runs there and that this machine reaches it."
        ) from error


class Worker:
    """One worker process of Prefect's, in an environment of ours, and its end."""

    def __init__(self, cluster: Cluster, known: Identity, name: str | None, limit: int | None) -> None:
        self.limit = limit or device_slots()
        self.name = name or f"{this_machine()}-{os.getpid()}".replace("/", "-")
        self.cluster = cluster
        self.known = known
        self.api = f"{cluster.prefect}/api"
        self.environment = _environment(cluster, known)
        os.environ |= self.environment  # for our own requests
        self._asked = threading.Event()

    def run(self) -> int:
        """Work until SIGTERM or Ctrl-C, then hand back what could not be finished; the exit status.

        Raises:
            ConfigError: no store is shared, or another one than the server's.
            ServiceError: Prefect does not answer, the worker ended by itself, or another program has its port.
            StoreError: the shared store cannot be used.
        """
        make_home(home())
        named_store()
        for address in (self.cluster.prefect, self.cluster.mlflow):
            hold(address)  # where they are of this machine
        with StageServer(self.environment) as stages:
            return self._work(self.environment | stages.variable)

    def _work(self, environment: dict[str, str]) -> int:
        before = {
            number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", CELLS_POOL, "--type", "process",
             "--name", self.name, "--limit", str(self.limit)],
            env=environment, stdin=subprocess.DEVNULL, pass_fds=held(), start_new_session=True,
        )  # fmt: skip
        print(f"worker      {self.name} takes {self.limit} at a time from {self.cluster.prefect}", flush=True)
        asked_for_proof = time.monotonic()
        try:
            while not self._asked.wait(0.5):
                if time.monotonic() - asked_for_proof > PROOF_SECONDS:
                    self.require_same_servers(psutil.Process(process.pid))
                    asked_for_proof = time.monotonic()
                if process.poll() is not None:
                    raise ServiceError(
                        f"Prefect's worker has ended with status {process.returncode}; its log is above."
                    )
            self._end(psutil.Process(process.pid))
        finally:
            process.kill()
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0

    def require_same_servers(self, worker: psutil.Process) -> None:
        """See that the address of Prefect's server is still one's that has the key: it may have died, and be another's.

        Args:
            worker: Prefect's worker, which ends with all its runs where that is not so.

        Raises:
            ServiceError: it is not, or the servers were started again, with other passwords.
        """
        try:
            known = ask_for_proof(self.cluster.prefect, self.known.key)
        except httpx.HTTPError:  # it is away or busy; Prefect's worker waits for it
            return
        except ServiceError:
            for process in [*worker.children(recursive=True), worker]:  # at once: each would send its password there
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            raise
        if known != self.known:
            terminate([*worker.children(recursive=True), worker])
            raise ServiceError(
                "the servers were started again and have other passwords now: start this worker again, too."
            )

    def _hear(self, number: int, frame: object) -> None:
        self._asked.set()

    def _end(self, worker: psutil.Process) -> None:
        """Let the runs save and end, then schedule them again for others."""
        from flows import prefect_client

        worker.suspend()  # it takes nothing new, and does not report the end of what is handed back
        runs = flow_runs_below(worker)
        for process in runs.values():
            with suppress(psutil.Error):  # it has just ended
                process.terminate()
        deadline = time.monotonic() + SAVING_SECONDS
        handed: list[str | None] = []
        while runs:
            # Each as it ends. Nobody collects them while the worker is suspended, so they cannot be waited for.
            is_late = time.monotonic() > deadline
            for run in [run for run, process in runs.items() if is_late or not is_running(process)]:
                del runs[run]
                handed.append(prefect_client.hand_back(run, self.api))
            time.sleep(0.1)
        print(f"worker      {self.name} ended; handed back: {', '.join(filter(None, handed)) or 'nothing'}", flush=True)


def flow_runs_below(worker: psutil.Process) -> dict[UUID, psutil.Process]:
    """The processes of flow runs that a worker started, by the run."""
    found: dict[UUID, psutil.Process] = {}
    for child in sorted(worker.children(recursive=True), key=psutil.Process.create_time):
        try:
            run = child.environ().get(RUN_VARIABLE)
        except psutil.Error:  # it ended meanwhile
            continue
        if run:
            found.setdefault(UUID(run), child)  # its own children inherit the variable, and are younger
    return found


def _environment(cluster: Cluster, known: Identity) -> dict[str, str]:
    given = os.environ.get(SHARED_VARIABLE)
    if given and cluster.shared and given != cluster.shared:
        raise ConfigError(
            f"{SHARED_VARIABLE} is {given} here and {cluster.shared} where the server runs: cells would not arrive. "
            "Set it to the same address, or unset it here."
        )
    shared = given or cluster.shared
    environment = environment_for(cluster.prefect, cluster.mlflow, known, project_root()) | {
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)
    }
    return environment if shared is None else environment | {SHARED_VARIABLE: shared}
