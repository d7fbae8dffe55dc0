"""Local services: Prefect server, worker and MLflow server (`rm-opt up`, `down`, `status`).

All data stays in `RM_OPT_HOME`: the same databases that runs without servers use. With a PostgreSQL database they may
listen on an address that other machines reach, whose workers take cells from here (flows/worker.py).

Every process carries a mark in its environment, which its descendants inherit, so `down` ends exactly what was started:
a flow run puts its children into sessions of their own, and they must end too. `up` alone imports Prefect, and that
while its server starts: `status` answers at once.
"""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.files import exclusive
from rmcore.core.ports import claim, held, hold
from rmcore.core.processes import marked, runs, tail, terminate
from rmcore.core.web import keep_direct
from tasks.database import DATABASE_VARIABLE, make_schemas, prefect_environment, require_address
from tasks.home import (
    MLFLOW_PORT,
    PREFECT_PORT,
    PROJECT_VARIABLE,
    QUIET_ENVIRONMENT,
    environment_for,
    home,
    make_home,
    project_root,
)
from tasks.local_services import (
    COMMANDS,
    HOME_MARK,
    HOST,
    MLFLOW_SERVER,
    PREFECT_SERVER,
    SERVERS,
    WORK_POOL,
    WORKER,
    Service,
    known_addresses,
    log_file,
    running_services,
    services_folder,
)
from tasks.passwords import basic_authorization, mlflow_login, password

HEALTH_PATHS = {PREFECT_SERVER: "/api/health", MLFLOW_SERVER: "/health"}
FILE = "flows/prefect.yaml"
"""In the folder that holds the packages."""
PIPELINE = "pipeline/pipeline"
"""Flow and deployment that trains a reward model on pairs and judges it."""
POLL_SECONDS = 0.25
START_SECONDS = 180.0
"""How long each service may take to answer."""
STAY_SECONDS = 5.0


@dataclass(frozen=True)
class ServiceStatus:
    """The state of one service: its process if it runs, its address if it has one, and whether it answers there."""

    name: str
    pid: int | None
    url: str | None
    healthy: bool

    def __str__(self) -> str:
        state = "not running" if self.pid is None else f"pid {self.pid}, {'healthy' if self.healthy else 'no answer'}"
        return f"{self.name:<15} {self.url or '':<25} {state}".rstrip()


def status() -> list[ServiceStatus]:
    """The three services of this home, in the order they start."""
    running = running_services(home())
    return [_status(name, running.get(name)) for name in COMMANDS]


def _status(name: str, service: Service | None) -> ServiceStatus:
    if service is None:
        return ServiceStatus(name, None, None, healthy=False)
    return ServiceStatus(name, service.process.pid, service.url, healthy=service.url is None or _answers(service))


def run_form() -> str | None:
    """Give the address of the page in Prefect that starts a run of the pipeline; None where it is not to be had now."""
    service = running_services(home()).get(PREFECT_SERVER)
    if service is None:
        return None
    login = basic_authorization(password(home()))
    place = f"{service.url}/api/deployments/name/{PIPELINE}"
    try:
        found = httpx.get(place, headers=login, timeout=3, trust_env=False).raise_for_status().json()
        return f"{service.url}/deployments/deployment/{found['id']}/run"
    except (httpx.HTTPError, ValueError, KeyError):  # the line of the server says whether it answers
        return None


def _answers(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}{HEALTH_PATHS[service.name]}", timeout=3, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def up(
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    *,
    host: str = HOST,
    database: str | None = None,
    root: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[ServiceStatus]:
    """Start what is not running yet, deploy `prefect.yaml`, and wait until everything answers.

    Args:
        prefect_port: port of Prefect's server and UI; default 4200, or where it runs already.
        mlflow_port: port of MLflow's server and UI; default 5000, or where it runs already.
        host: address of this machine that they listen on; only under it do they answer.
        database: address of a PostgreSQL database; default: $RM_OPT_DATABASE, else that of what runs, else SQLite.
        root: folder that holds the flows and their prefect.yaml; default: that of this package.
        tell: hears a line when a service begins to start and when it is ready.

    Raises:
        ConfigError: the home cannot be made, the database is no address, or other machines shall reach
            what is in files of this one.
        ServiceError: a port is another program's, which is named and was sent no password, or something did not
            start (what this call started is ended again).
    """
    keep_direct([host])
    make_home(home())
    with exclusive(services_folder(home()) / "lock"):
        running = running_services(home())
        used = [service.process.environ().get(DATABASE_VARIABLE) for service in running.values()][:1]
        chosen = database or os.environ.get(DATABASE_VARIABLE) or next(iter(used), None)
        if chosen is not None:
            require_address(chosen)  # before a message has it
        if used and used != [chosen]:
            raise ServiceError(
                f"the services of {home()} keep their records in {used[0] or 'SQLite'}, and {chosen} is requested: run "
                "`rm-opt down` first, or leave --database out."
            )
        if host != HOST and chosen is None:
            raise ConfigError(
                f"--host {host} lets other machines in, and the home's SQLite files are for this one: name a "
                "PostgreSQL database with --database, too."
            )
        if chosen is not None:
            make_schemas(chosen)
        with contextlib.ExitStack() as ports:
            known = known_addresses(home())
            starter = _Starter(home(), running, known, root or project_root(), host, chosen, tell, ports)
            urls = {
                PREFECT_SERVER: starter.place(PREFECT_SERVER, prefect_port, PREFECT_PORT),
                MLFLOW_SERVER: starter.place(MLFLOW_SERVER, mlflow_port, MLFLOW_PORT),
            }
            try:
                starter.start_all(urls)
            except BaseException:  # Ctrl-C too: no half-started set stays behind
                _end(starter.started)
                raise
    return status()


@dataclass
class _Starter:
    """Starts services one by one."""

    directory: Path
    running: dict[str, Service]
    known: dict[str, str]
    """Addresses of servers that ran, and of those that run."""
    root: Path
    host: str
    database: str | None
    tell: Callable[[str], None]
    ports: contextlib.ExitStack
    """As long as it is open, the sockets that they will listen on are."""
    began: float = field(default_factory=time.monotonic)
    started: list[Service] = field(default_factory=list)
    listeners: dict[str, socket.socket] = field(default_factory=dict)

    def place(self, name: str, wanted: int | None, default: int) -> str:
        """The address of a server: where it is or was, or the wanted one if it is free.

        The port is ours from then on: bound here, and handed down to the server.
        """
        flag = f"--{name.removesuffix('-server')}-port"
        at = f"http://{self.host}:{wanted or default}"
        if known := self.known.get(name):
            same_host = httpx.URL(known).host == self.host
            if not same_host or (wanted is not None and known != at):
                raise ServiceError(
                    f"{name} of {self.directory} is at {known} already, where what runs looks for it, and {at} is "
                    f"requested: run `rm-opt down` first, or leave {flag if same_host else '--host'} out."
                )
            at = known
        if name in self.running:
            return at
        port = httpx.URL(at).port or default
        try:
            listener = self.listeners[name] = self.ports.enter_context(claim(self.host, port))
            with socket.socket() as probe:  # a program of our own may share its port
                if probe.connect_ex((self.host, port)) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"--host {self.host} is no address of this machine ({error.strerror}); `ip address` lists them."
                ) from error
            raise ServiceError(
                f"port {port} on {self.host} cannot be used for {name} ({error.strerror}): another program has it (`ss "
                f"-ltnp` lists them), and was sent no password. Choose another port with {flag}, or stop that program."
            ) from error
        listener.listen()
        return at

    def start_all(self, urls: dict[str, str]) -> None:
        """Start what does not run, in an order that lets slow starts overlap."""
        for url in urls.values():
            hold(url)
        environment = self._environment(urls)
        for name in (*QUIET_ENVIRONMENT, "PREFECT_HOME", "PREFECT_API_AUTH_STRING"):
            os.environ[name] = environment[name]  # for our own requests
        for name in SERVERS:
            self._start(name, environment, urls[name])
        from flows import deploy, prefect_client  # imports Prefect: the servers start meanwhile

        for name in SERVERS:
            self._wait(name, partial(_answers, self.running[name]))
        api = f"{urls[PREFECT_SERVER]}/api"
        prefect_client.reap_dead_runs(api)
        deploy.ensure_work_pools(api)
        deploy.report_cluster(api, environment)
        self._start(WORKER, environment, None)
        self._deploy(environment)  # which takes as long as the worker does
        self._wait(WORKER, lambda: bool(prefect_client.workers_online(WORK_POOL, api)))
        if self.database is not None:
            deploy.deploy_watch(api)

    def _environment(self, urls: dict[str, str]) -> dict[str, str]:
        secret = password(self.directory)
        environment = environment_for(urls[PREFECT_SERVER], secret, self.root)
        environment.pop(DATABASE_VARIABLE, None)
        if self.database is not None:
            environment |= {DATABASE_VARIABLE: self.database, **prefect_environment(self.database)}
        return environment | {
            "MLFLOW_TRACKING_URI": urls[MLFLOW_SERVER],
            **mlflow_login(secret),
            "PREFECT_SERVER_API_AUTH_STRING": secret,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": urls[PREFECT_SERVER],
            # In memory, what a run holds of a limit of one's own would stay held after a restart of the server.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            # Our guard lets in its own address only; MLflow's would let in private ones only.
            "MLFLOW_SERVER_ALLOWED_HOSTS": urls[MLFLOW_SERVER].removeprefix("http://"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # one process instead of 10
            HOME_MARK: str(self.directory),
        }

    def _start(self, name: str, environment: dict[str, str], url: str | None) -> None:
        if name in self.running:
            return
        command, sockets = [sys.executable, *COMMANDS[name]], held()  # while one lives, no other user gets any port
        if url is not None:
            sockets.append(self.listeners[name].fileno())
            command += [url.removeprefix("http://"), str(sockets[-1])]
        self.tell(f"{name:<15} starting")
        with log_file(self.directory, name).open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                cwd=self.directory, pass_fds=sockets, start_new_session=True,
            )  # fmt: skip
        self.running[name] = Service(name, psutil.Process(child.pid), url)
        self.started.append(self.running[name])

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        process, log = self.running[name].process, log_file(self.directory, name)
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if not runs(process):
                raise ServiceError(f"{name} ended while starting. {tail(log)}")
            if time.monotonic() > deadline:
                raise ServiceError(f"{name} did not answer within {START_SECONDS:.0f} s. {tail(log)}")
            time.sleep(POLL_SECONDS)
        if self.running[name] in self.started:
            self.tell(f"{name:<15} ready after {time.monotonic() - self.began:.0f} s")

    def _deploy(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all", f"--prefect-file={FILE}"]
        # Where the code is, each worker says; filled in here, it would be this machine's place.
        unfilled = {name: value for name, value in environment.items() if name != PROJECT_VARIABLE}
        began = time.monotonic()
        self.tell(f"{'flows':<15} deploying")
        log = log_file(self.directory, "deploy")
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=unfilled,
                cwd=self.root, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ServiceError(f"{self.root / FILE} could not be deployed. {tail(log)}")
        self.tell(f"{'flows':<15} deployed in {time.monotonic() - began:.0f} s")


def stay() -> None:
    """Wait for Ctrl-C or SIGTERM, and end the services then.

    Raises:
        ServiceError: one of them has ended by itself; the others are ended, too.
    """
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    try:
        while not asked.wait(STAY_SECONDS):
            gone = [name for name in COMMANDS if name not in running_services(home())]
            if gone:
                raise ServiceError(f"{' and '.join(gone)} ended by itself. {tail(log_file(home(), gone[0]))}")
    finally:
        down()


def down() -> list[str]:
    """End exactly what `up` started for this home, with all descendants; names of the services that still ran.

    The worker goes first, so that runs in progress can still report their end to the server. A process gets SIGTERM,
    and SIGKILL after a grace of 15 s.

    Raises:
        ServiceError: a process survived SIGKILL.
    """
    directory = home()
    make_home(directory)  # the lock is the first file of a home that was never used
    with exclusive(services_folder(directory) / "lock"):
        services = list(running_services(directory).values())
        _end(list(reversed(services)))
        terminate(marked(HOME_MARK, str(directory)))
    return [service.name for service in services]


def _end(services: list[Service]) -> None:
    for service in services:
        with contextlib.suppress(psutil.NoSuchProcess):
            terminate([service.process, *service.process.children(recursive=True)])
