"""Where everything lives (`RM_OPT_HOME`), and the environment that Prefect and MLflow read when they are imported.

Both tools take their settings from environment variables at import. `configure_environment` therefore runs first
thing in every process of ours, and this module imports neither of them. It only fills gaps: a variable that is set
already (by the user, a worker or `rm-opt up`) stands.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from rmcore.errors import ConfigError

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
PREFECT_SERVER = "prefect-server"
MLFLOW_SERVER = "mlflow-server"
DEVICE_LIMIT = "rm-device"
"""Prefect's global concurrency limit of which a stage takes a slot while it uses the device (tasks/device.py)."""
CREATE_TIME_TOLERANCE_S = 1.0
"""psutil derives a process's creation time from the boot time, which moves a little when the clock is corrected."""

QUIET_ENVIRONMENT = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # The telemetry heartbeat races the embedded server's own start: `database is locked`.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # The embedded server takes up to 18 s on busy cores; Prefect gives up after 20.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A server that went away costs seconds: one retry after 1 s instead of 7 over four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    # Said aloud, it works in threads without a warning at each fork: what we fork builds micro-batches, and no tokens.
    "TOKENIZERS_PARALLELISM": "true",
}


def project_root() -> Path:
    """The checkout that holds this file (it has pyproject.toml and flows/); installed elsewhere, the current folder."""
    checkout = Path(__file__).resolve().parent.parent
    return checkout if (checkout / "pyproject.toml").is_file() and (checkout / "flows").is_dir() else Path.cwd()


def home() -> Path:
    """Absolute folder of all data: `$RM_OPT_HOME`, or `.rm-opt` beside the checkout. Not created here."""
    named = os.environ.get("RM_OPT_HOME")
    return Path(named).expanduser().resolve() if named else project_root() / ".rm-opt"


@dataclass(frozen=True)
class Service:
    """One server process that `rm-opt up` started: pid and creation time (epoch seconds) name it beyond doubt."""

    name: str
    pid: int
    created: float
    log: str
    url: str | None = None

    def process(self) -> psutil.Process | None:
        """The process if it still runs; None where it ended, also when its pid went to somebody else."""
        return find_process(self.pid, self.created)


def find_process(pid: int, created: float) -> psutil.Process | None:
    """The running process with this pid and creation time (epoch seconds), or None. A zombie has ended."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) <= CREATE_TIME_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def services_folder(directory: Path) -> Path:
    """Logs and state of the local services of the home `directory`."""
    return directory / "services"


def recorded_services(directory: Path) -> list[Service]:
    """What `rm-opt up` wrote down for this home, running or not; empty where nothing was started."""
    state = services_folder(directory) / "state.json"
    if not state.is_file():
        return []
    return [Service(**entry) for entry in json.loads(state.read_text(encoding="utf-8"))["services"]]


def default_tracking_uri(directory: Path) -> str:
    """MLflow's SQLite database of this home: what runs use without a server, and what the local server serves."""
    return f"sqlite:///{directory / 'mlflow' / 'mlflow.db'}"


def tracking_address(directory: Path) -> str:
    """Where runs are tracked and models registered: `$MLFLOW_TRACKING_URI`, else the database of this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(directory)


def _keep_loopback_off_the_proxy() -> None:
    """Behind a proxy, HTTP clients would ask it even for servers on this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        kept = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join([*kept, *(host for host in ("127.0.0.1", "localhost") if host not in kept)])


def configure_environment() -> None:
    """Set what Prefect, MLflow and the Hugging Face libraries read at import; call before importing any of them.

    With local services running (`rm-opt up`), Prefect and MLflow are pointed at them; without, at the embedded API
    and the SQLite file. A variable that is set already is left alone.

    Raises:
        ConfigError: the home cannot be made.
    """
    directory = home()
    running = {service.name: service.url for service in recorded_services(directory) if service.process()}
    settings = QUIET_ENVIRONMENT | {
        "RM_OPT_HOME": str(directory),
        "PREFECT_HOME": str(directory / "prefect"),
        "MLFLOW_TRACKING_URI": running.get(MLFLOW_SERVER) or default_tracking_uri(directory),
    }
    if prefect_url := running.get(PREFECT_SERVER):
        settings["PREFECT_API_URL"] = f"{prefect_url}/api"
    try:
        directory.mkdir(parents=True, exist_ok=True)  # Prefect makes its own folder in it, but no parents
    except OSError as error:
        raise ConfigError(
            f"RM_OPT_HOME is {directory}, which cannot be made ({error.strerror}): nothing could be stored. Set "
            "RM_OPT_HOME to a folder that you may write to."
        ) from error
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    _keep_loopback_off_the_proxy()
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes no parents
