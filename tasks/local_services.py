"""The local servers and the worker of a home: which of them run, and where.

Nothing is written down about what runs, so no record can be damaged or wrong. Every process that `rm-opt up` starts
carries its home in its environment, which its descendants inherit, and its command line says which service it is.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

from rmcore.core.processes import marked

HOST = "127.0.0.1"
"""Where servers listen unless another address of this machine is named."""
PREFECT_SERVER = "prefect-server"
EMBEDDED_PREFECT = "embedded-prefect"
"""Not a service of the home: the server of one process (flows/prefect_api.py)."""
MLFLOW_SERVER = "mlflow-server"
SERVERS = (PREFECT_SERVER, MLFLOW_SERVER)
WORKER = "worker"
WORK_POOL = "rm-opt"
CELLS_POOL = "rm-opt-cells"
"""Pool of the cells that `--runner pool` hands out; `rm-opt worker` takes from it, and nobody else."""
CLUSTER = "rm_opt_cluster"
"""Name of the variable in Prefect that says what workers of other machines have to know: the shared store."""
HOME_MARK = "RM_OPT_SERVICES_HOME"
"""Environment variable with the home, in every process that `rm-opt up` starts and in all that those start."""
GUARDED_SERVER = ["-P", "-m", "tasks.guarded_server"]
COMMANDS = {
    PREFECT_SERVER: [*GUARDED_SERVER, PREFECT_SERVER],
    MLFLOW_SERVER: [*GUARDED_SERVER, MLFLOW_SERVER],
    WORKER: ["-P", "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", WORK_POOL],
}
"""Arguments of Python that start each service, in this order; a server's HOST:PORT and its socket come after them."""


@dataclass(frozen=True)
class Service:
    """A running service: its process and, of a server, its address."""

    name: str
    process: psutil.Process
    """The one that was started; it may have children."""
    url: str | None


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
        return {PREFECT_SERVER: prefect, MLFLOW_SERVER: environment["MLFLOW_TRACKING_URI"]}
    return {}
