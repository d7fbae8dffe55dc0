"""Local services: Prefect server, worker and MLflow server on loopback (`rm-opt up`, `down`, `status`).

All data stays in `RM_OPT_HOME`: the same databases that runs without servers use. What was started is written down in
`services/state.json` as pid and creation time, so `down` ends exactly that and never a recycled pid. Every process
also carries a token in its environment, which its descendants inherit: a flow run puts its children into sessions of
their own, and they must end too. Prefect is spoken to by HTTP; this module imports neither Prefect nor MLflow.
"""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from flows.prefect_api import WORK_POOL, ensure_device_limit, reap_dead_runs, run_owner_tags, worker_is_online
from rmcore.errors import ServiceError
from rmcore.files import exclusive
from rmcore.processes import marked, owner_of, tail, terminate
from tasks.home import (
    MLFLOW_PORT,
    MLFLOW_SERVER,
    PREFECT_PORT,
    PREFECT_SERVER,
    QUIET_ENVIRONMENT,
    Service,
    default_tracking_uri,
    home,
    project_root,
    recorded_services,
    services_folder,
)

__all__ = ["ServiceStatus", "down", "ensure_device_limit", "reap_dead_runs", "run_owner_tags", "status", "up"]

HOST = "127.0.0.1"
WORKER = "worker"
TOKEN_VARIABLE = "RM_OPT_SERVICES_TOKEN"  # noqa: S105 - a mark, not a secret
HEALTH_PATHS = {PREFECT_SERVER: "/api/health", MLFLOW_SERVER: "/health"}
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class ServiceStatus:
    """What one service does: its process if it runs, its address if it has one, and whether it answers there."""

    name: str
    pid: int | None
    url: str | None
    healthy: bool

    def __str__(self) -> str:
        state = "not running" if self.pid is None else f"pid {self.pid}, {'healthy' if self.healthy else 'no answer'}"
        return f"{self.name:<15} {self.url or '':<25} {state}".rstrip()


def status() -> list[ServiceStatus]:
    """The three services of this home, in the order they start."""
    recorded = {service.name: service for service in recorded_services(home())}
    return [_status(name, recorded.get(name)) for name in (PREFECT_SERVER, MLFLOW_SERVER, WORKER)]


def _status(name: str, service: Service | None) -> ServiceStatus:
    if service is None or service.process() is None:
        return ServiceStatus(name, None, None, healthy=False)
    return ServiceStatus(name, service.pid, service.url, healthy=service.url is None or _answers(service))


def _answers(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}{HEALTH_PATHS[service.name]}", timeout=3).is_success
    except httpx.HTTPError:
        return False


def up(
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    *,
    root: Path | None = None,
    timeout_s: float = 180.0,
) -> list[ServiceStatus]:
    """Start what is not running yet, deploy `prefect.yaml`, and wait until everything answers.

    Args:
        prefect_port: port of Prefect's server and UI; default 4200, or where it runs already.
        mlflow_port: port of MLflow's server and UI; default 5000, or where it runs already.
        root: project folder that holds prefect.yaml; default: the checkout.
        timeout_s: how long each service may take to answer.

    Raises:
        ServiceError: a port is taken, prefect.yaml is missing, or something did not start (what this call started is
            ended again).
    """
    root = root or project_root()
    if not (root / "prefect.yaml").is_file():
        raise ServiceError(
            f"{root} has no prefect.yaml: there is nothing to deploy. Run this in a checkout of the project."
        )
    with exclusive(services_folder(home()) / "lock"):
        starter = _Starter(home(), timeout_s)
        ports = {
            PREFECT_SERVER: starter.port(PREFECT_SERVER, prefect_port, PREFECT_PORT, "--prefect-port"),
            MLFLOW_SERVER: starter.port(MLFLOW_SERVER, mlflow_port, MLFLOW_PORT, "--mlflow-port"),
        }
        try:
            starter.start_all(ports, root)
        except BaseException:  # Ctrl-C too: no half-started set stays behind
            _end(starter.started)
            starter.forget_started()
            raise
    return status()


class _Starter:
    """Starts services one by one, writing each down before the next."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self.timeout_s = timeout_s
        self.running = {service.name: service for service in recorded_services(directory) if service.process()}
        self.started: list[Service] = []
        self.token = _token(directory) or uuid.uuid4().hex

    def port(self, name: str, wanted: int | None, default: int, flag: str) -> int:
        """The port of a service: where it runs, or the wanted one if it is free."""
        if name in self.running:
            port = httpx.URL(self.running[name].url or "").port
            if wanted not in (None, port):
                raise ServiceError(
                    f"{name} of {self.directory} runs on port {port} already, {flag} {wanted} asks for another one: "
                    "a running server cannot move. Run `rm-opt down` first, or leave the flag out."
                )
            return port or default
        port = wanted if wanted is not None else default
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise ServiceError(
                    f"port {port} on {HOST} cannot be used for {name} ({error.strerror}{owner_of(port)}): another "
                    f"program has it. Choose another port with {flag}, or stop that program."
                ) from error
        return port

    def start_all(self, ports: dict[str, int], root: Path) -> None:
        """Start what does not run, in an order that lets slow starts overlap."""
        urls = {name: f"http://{HOST}:{port}" for name, port in ports.items()}
        environment = self._environment(urls)
        prefect = ["prefect", "server", "start", "--host", HOST, "--port", str(ports[PREFECT_SERVER])]
        self._start(PREFECT_SERVER, prefect, environment, urls[PREFECT_SERVER])
        self._start(MLFLOW_SERVER, self._mlflow_command(ports[MLFLOW_SERVER]), environment, urls[MLFLOW_SERVER])
        self._wait(PREFECT_SERVER, lambda: _answers(self.running[PREFECT_SERVER]))
        api = f"{urls[PREFECT_SERVER]}/api"
        reap_dead_runs(api)
        ensure_device_limit(api)
        worker = ["prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", WORK_POOL]
        self._start(WORKER, worker, environment, None)
        self._wait(WORKER, lambda: worker_is_online(api))
        self._deploy(root, environment)
        self._wait(MLFLOW_SERVER, lambda: _answers(self.running[MLFLOW_SERVER]))

    def _environment(self, urls: dict[str, str]) -> dict[str, str]:
        return {
            **QUIET_ENVIRONMENT,
            **os.environ,
            "RM_OPT_HOME": str(self.directory),
            "PREFECT_HOME": str(self.directory / "prefect"),
            "PREFECT_API_URL": f"{urls[PREFECT_SERVER]}/api",
            "PREFECT_LOGGING_LEVEL": "INFO",  # the log of a flow run in the UI
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "MLFLOW_TRACKING_URI": urls[MLFLOW_SERVER],
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 2 processes instead of 10
            "PYTHONUNBUFFERED": "1",
            TOKEN_VARIABLE: self.token,
        }

    def _mlflow_command(self, port: int) -> list[str]:
        # Artifacts are read and written as files, so runs with and without the server share one experiment.
        artifacts = (self.directory / "mlflow" / "artifacts").as_uri()
        command = ["mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", default_tracking_uri(self.directory)]
        return [*command, "--no-serve-artifacts", "--default-artifact-root", artifacts]

    def _start(self, name: str, command: list[str], environment: dict[str, str], url: str | None) -> None:
        if name in self.running:
            return
        log = services_folder(self.directory) / f"{name}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
            )
        service = Service(name, child.pid, psutil.Process(child.pid).create_time(), str(log), url)
        self.running[name] = service
        self.started.append(service)
        self._write()

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        service = self.running[name]
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            if service.process() is None:
                raise ServiceError(f"{name} ended while starting. {tail(Path(service.log))}")
            if time.monotonic() > deadline:
                raise ServiceError(f"{name} did not answer within {self.timeout_s:.0f} s. {tail(Path(service.log))}")
            time.sleep(POLL_SECONDS)

    def _deploy(self, root: Path, environment: dict[str, str]) -> None:
        log = services_folder(self.directory) / "deploy.log"
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=root,
            )
        if done.returncode:
            raise ServiceError(f"{root / 'prefect.yaml'} could not be deployed. {tail(log)}")

    def forget_started(self) -> None:
        """Write the state without what this call started."""
        for service in self.started:
            self.running.pop(service.name)
        self._write()

    def _write(self) -> None:
        state = {"token": self.token, "services": [asdict(service) for service in self.running.values()]}
        path = services_folder(self.directory) / "state.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state, indent=1), encoding="utf-8")
        os.replace(partial, path)


def down() -> list[str]:
    """End exactly what `up` started for this home, with all descendants; names of the services that still ran.

    The worker goes first, so that runs in progress can still report their end to the server. A process gets SIGTERM,
    and SIGKILL after a grace of 15 s.

    Raises:
        ServiceError: a process survived SIGKILL.
    """
    directory = home()
    with exclusive(services_folder(directory) / "lock"):
        services = [service for service in recorded_services(directory) if service.process()]
        _end(reversed(services))
        if token := _token(directory):
            terminate(marked(TOKEN_VARIABLE, token))
        (services_folder(directory) / "state.json").unlink(missing_ok=True)
    return [service.name for service in services]


def _end(services: Iterable[Service]) -> None:
    for service in services:
        if leader := service.process():
            terminate([leader, *leader.children(recursive=True)])


def _token(directory: Path) -> str | None:
    state = services_folder(directory) / "state.json"
    return str(json.loads(state.read_text(encoding="utf-8"))["token"]) if state.is_file() else None
