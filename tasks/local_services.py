"""The local servers and the worker of a home: which of them run, and the password that they ask for.

Nothing is written down about what runs, so no record can be damaged or wrong. Every process that `rm-opt up` starts
carries its home in its environment, which its descendants inherit, and its command line says which service it is.
"""

import base64
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import psutil

from rmcore.core.errors import ConfigError
from rmcore.core.files import exclusive, write_text
from rmcore.core.processes import marked

HOST = "127.0.0.1"
"""Where servers listen unless another address of this machine is asked for."""
START_PAGE = "start-page"
PREFECT_SERVER = "prefect-server"
EMBEDDED_PREFECT = "embedded-prefect"
"""Not a service of the home: the server of one process (tasks/embedded_prefect.py)."""
MLFLOW_SERVER = "mlflow-server"
WORKER = "worker"
WORK_POOL = "rm-opt"
CELLS_POOL = "rm-opt-cells"
"""Pool of the cells that `--runner pool` hands out; `rm-opt worker` takes from it, and nobody else."""
HOME_MARK = "RM_OPT_SERVICES_HOME"
"""Environment variable with the home, in every process that `rm-opt up` starts and in all that those start."""
START_PAGE_VARIABLE = "RM_OPT_START_PAGE"
"""Environment variable with the address of the start page, where one runs."""
GUARDED_SERVER = ["-P", "-m", "tasks.guarded_server"]
COMMANDS = {
    START_PAGE: [*GUARDED_SERVER, START_PAGE],
    PREFECT_SERVER: [*GUARDED_SERVER, PREFECT_SERVER],
    MLFLOW_SERVER: [*GUARDED_SERVER, MLFLOW_SERVER],
    WORKER: ["-P", "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", WORK_POOL],
}
"""Arguments of Python that start each service, in this order; a server's HOST:PORT comes after them."""
CLUSTER_PATH = "/cluster"
"""On the start page: where the servers are, as JSON, for workers of other machines."""
PASSWORD_VARIABLE = "RM_OPT_PASSWORD_FILE"  # noqa: S105 - its name
"""Environment variable with the file of the password, where it is not the home's own: a mounted secret, for example."""
PASSWORD_BYTES = 32
PASSWORD = re.compile(r"[A-Za-z0-9_-]{43}")
"""Form of a password from `secrets.token_urlsafe`."""


@dataclass(frozen=True)
class Service:
    """A running service: its process and, of a server, its address."""

    name: str
    process: psutil.Process
    url: str | None

    @property
    def pid(self) -> int:
        """Pid of the process that was started; it may have children."""
        return self.process.pid


def services_folder(directory: Path) -> Path:
    """Password and logs of the local services of the home `directory`."""
    return directory / "services"


def log_file(directory: Path, name: str) -> Path:
    """Give the path of a service's log, which begins with its last start."""
    return services_folder(directory) / f"{name}.log"


def running_services(directory: Path) -> dict[str, Service]:
    """The services of this home that run, by name, in the order of their start."""
    found: dict[str, Service] = {}
    # The oldest first: for a moment, a fork has its parent's command line.
    for process in sorted(marked(HOME_MARK, str(directory)), key=psutil.Process.create_time):
        try:
            command = process.cmdline()[1:]
        except psutil.Error:  # it ended meanwhile
            continue
        for name, start in COMMANDS.items():
            if command[: len(start)] == start:
                url = None if name == WORKER else f"http://{command[len(start)]}"
                found.setdefault(name, Service(name, process, url))
    return {name: found[name] for name in COMMANDS if name in found}


def known_addresses(directory: Path) -> dict[str, str]:
    """The addresses of both servers, as any running service of this home knows them; empty where none runs.

    A server that died is known by the others, which keep asking for it there.
    """
    for service in running_services(directory).values():
        try:
            environment = service.process.environ()
        except psutil.Error:  # it ended meanwhile
            continue
        prefect = environment["PREFECT_API_URL"].removesuffix("/api")
        found = {PREFECT_SERVER: prefect, MLFLOW_SERVER: environment["MLFLOW_TRACKING_URI"]}
        start = environment.get(START_PAGE_VARIABLE)  # none where an older version started them
        return found if start is None else found | {START_PAGE: start}
    return {}


def password_file(directory: Path) -> Path:
    """Where the password of this home's servers lies: in it, or where `RM_OPT_PASSWORD_FILE` says."""
    named = os.environ.get(PASSWORD_VARIABLE)
    return Path(named) if named else services_folder(directory) / "password"


def password(directory: Path) -> str:
    """The password of this home's servers, made by the first call in a file that only its owner may read.

    Raises:
        ConfigError: `RM_OPT_PASSWORD_FILE` names a file that holds none; such a file is never written.
    """
    path = password_file(directory)
    if PASSWORD_VARIABLE in os.environ:
        return read_password(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with exclusive(path.with_name("password.lock")):
        known = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
        if not PASSWORD.fullmatch(known):  # not there, or damaged
            known = secrets.token_urlsafe(PASSWORD_BYTES)
            write_text(path, known + "\n", mode=0o600)
    return known


def read_password(path: Path) -> str:
    """The password that a file holds.

    Raises:
        ConfigError: it holds none.
    """
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if not PASSWORD.fullmatch(found):
        raise ConfigError(
            f"{path} holds no password of the servers. On a worker's machine it is a copy of services/password from "
            "the home that `rm-opt up` runs in, which only you may read; a new one comes from "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'."
        )
    return found


def mlflow_login(secret: str) -> dict[str, str]:
    """Environment with which MLflow's client logs in, to whatever server it speaks to; the name may be any."""
    return {"MLFLOW_TRACKING_USERNAME": "rm-opt", "MLFLOW_TRACKING_PASSWORD": secret}


def basic_authorization(secret: str) -> dict[str, str]:
    """HTTP header with which both servers let a request in."""
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
