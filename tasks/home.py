"""Where everything lives (`RM_OPT_HOME`), and the environment that Prefect and MLflow read when they are imported.

Both tools take their settings from environment variables at import. `configure_environment` therefore runs first
thing in every process of ours, and this module imports neither of them. It only fills gaps: a variable that is set
already (by the user, a worker or `rm-opt up`) is kept.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from rmcore.core.errors import ConfigError
from rmcore.core.files import DIGESTS_VARIABLE
from rmcore.core.manifests import require_format
from rmcore.core.ports import hold
from rmcore.core.web import keep_direct
from tasks.local_services import HOME_MARK, MLFLOW_SERVER, PREFECT_SERVER, running_services
from tasks.passwords import mlflow_login, password

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
PROJECT_VARIABLE = "RM_OPT_PROJECT"
"""Environment variable with `project_root`, in a worker: where the runs that it starts find the flows."""
FOLDER_VARIABLE = "RM_OPT_FOLDER"
"""Environment variable with the folder that paths in a form are relative to, in a worker: where a user started it."""
PYTHON_VARIABLE = "RM_OPT_PYTHON"
"""Environment variable with the Python of a worker, which the runs that it starts have, too."""
HOME_FOLDERS = (
    *("compiled", "given", "judge", "mlflow", "prefect", "registrations", "reports"),
    *("scores", "services", "store", "unsynced"),
)
"""Where a home stores all data: prompts and answers, rewards, databases, logs, a password; compiled code."""
OWNER_ONLY = 0o700

QUIET_ENVIRONMENT = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    # A worker looks for new runs so often; by default every 10 s. A run that is started in the UI waits as long.
    "PREFECT_WORKER_QUERY_SECONDS": "3",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # The telemetry heartbeat races the embedded server's own start: `database is locked`.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # Our embedded server waits as long; it takes up to 18 s on busy cores.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
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

SAFE_ENVIRONMENT = {
    # No child of ours, or of Prefect's, takes a file of the current folder for a library.
    "PYTHONSAFEPATH": "1",
    # Origins whose pages may ask Prefect's server; by default all. `rm-opt up` names its UI, the embedded one has none.
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "none",
}


def project_root() -> Path:
    """The folder that holds the packages: a checkout, or site-packages where a wheel was installed."""
    return Path(__file__).resolve().parent.parent


def home() -> Path:
    """Absolute folder of all data: `$RM_OPT_HOME`, or `.rm-opt` in the checkout; without one, in the current folder.

    Not created here.

    Raises:
        ConfigError: another version of this package has written its store.
    """
    checkout = project_root() if (project_root() / "pyproject.toml").is_file() else Path.cwd()
    directory = Path(os.environ.get("RM_OPT_HOME") or checkout / ".rm-opt").expanduser().resolve()
    require_format(directory / "store")
    return directory


def default_tracking_uri(directory: Path) -> str:
    """MLflow's SQLite database of this home: what runs use without a server, and what the local server serves."""
    return f"sqlite:///{directory / 'mlflow' / 'mlflow.db'}"


def default_artifact_root(directory: Path) -> str:
    """Where MLflow keeps artifacts of this home: files that are read and written as such, with and without a server."""
    return (directory / "mlflow" / "artifacts").as_uri()


def tracking_address(directory: Path) -> str:
    """Where runs are tracked and models registered: `$MLFLOW_TRACKING_URI`, else the database of this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(directory)


def make_home(directory: Path) -> None:
    """Make the home and its folders; only their owner may look into them.

    A home that is there already keeps its own mode: it may be a folder that holds other things, too.

    Raises:
        ConfigError: that cannot be done, or a folder, or the link to one, is another user's, who could put anything
            into it: settings, code of a checkpoint, a password that they know.
    """
    if "?" in str(directory):  # the options of an address begin there, and nothing quotes it
        raise ConfigError(
            f"RM_OPT_HOME is {directory}: no address of a database file can hold a question mark, so the databases of "
            "Prefect and MLflow would lie elsewhere. Set RM_OPT_HOME to a folder without one in its path."
        )
    try:
        directory.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        _require_ours(directory)
        for name in HOME_FOLDERS:
            folder = directory / name
            folder.mkdir(mode=OWNER_ONLY, exist_ok=True)
            _require_ours(folder)
            if folder.stat().st_mode & 0o077:
                folder.chmod(OWNER_ONLY)
    except OSError as error:
        raise ConfigError(
            f"RM_OPT_HOME is {directory}, which cannot be made, or not for you alone ({error.strerror}: "
            f"{error.filename}): nothing could be stored. Set RM_OPT_HOME to a folder of your own."
        ) from error


def _require_ours(folder: Path) -> None:
    owners = {folder.stat().st_uid, folder.lstat().st_uid} - {os.geteuid()}
    if owners:
        raise ConfigError(
            f"{folder} belongs to uid {owners.pop()}, and this process runs as uid {os.geteuid()}: its owner could "
            "change what is read from there. Set RM_OPT_HOME to a folder of your own, or change the owner with chown."
        )


def digests_file() -> Path:
    """Where digests of large files next to the store are remembered; without it those files are read again."""
    return home() / "store" / ".digests.jsonl"


def compiled_folder() -> Path:
    """Folder of the kernels that torch compiles; its own is in /tmp, which is emptied."""
    return home() / "compiled"


def environment_for(prefect: str, secret: str, root: Path) -> dict[str, str]:
    """Variables of a process that works for Prefect at this address, with the flows of the folder `root`."""
    return {
        **QUIET_ENVIRONMENT,
        **os.environ,
        **SAFE_ENVIRONMENT,
        "RM_OPT_HOME": str(home()),
        PROJECT_VARIABLE: str(root),
        FOLDER_VARIABLE: str(Path.cwd()),
        PYTHON_VARIABLE: sys.executable,
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_API_URL": f"{prefect}/api",
        "PREFECT_API_AUTH_STRING": secret,
        "PREFECT_LOGGING_LEVEL": "INFO",  # the log of a flow run in the UI
        "PYTHONUNBUFFERED": "1",
    }


def configure_environment() -> None:
    """Set what Prefect, MLflow and the Hugging Face libraries read at import; call before importing any of them.

    With local services running (`rm-opt up`), Prefect and MLflow are pointed at them; without, at the embedded API
    and the SQLite file. A variable that is set already is left alone, but for the password: it goes with the address,
    so that the local servers get theirs and no other server does.

    Raises:
        ConfigError: the home cannot be made or is another user's, or a proxy is set that HTTP clients cannot use.
        ServiceError: the port of a local server is another user's.
    """
    directory = home()
    make_home(directory)
    running = {name: service.url for name, service in running_services(directory).items()}
    prefect_api = f"{running[PREFECT_SERVER]}/api" if PREFECT_SERVER in running else ""
    settings = {
        **QUIET_ENVIRONMENT,
        **SAFE_ENVIRONMENT,
        "RM_OPT_HOME": str(directory),
        DIGESTS_VARIABLE: str(digests_file()),
        "PREFECT_HOME": str(directory / "prefect"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled_folder()),
        "MLFLOW_TRACKING_URI": running.get(MLFLOW_SERVER) or default_tracking_uri(directory),
    }
    if prefect_api:
        settings["PREFECT_API_URL"] = prefect_api
    keep_direct(str(url.hostname) for url in map(urlsplit, filter(None, running.values())))
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    ours = {url for url in running.values() if url}
    if os.environ.get(HOME_MARK) == str(directory):  # a process below those of `rm-opt up`: a server may have died
        ours |= {os.environ[name] for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI") if name in os.environ}
    for address in ours:
        hold(address)
    secret = password(directory)
    # Of a server that Prefect itself would embed; flows/prefect_api.py makes one for each of its own.
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = secret
    if os.environ.get("PREFECT_API_URL", "").rstrip("/") in ("", prefect_api):
        os.environ["PREFECT_API_AUTH_STRING"] = secret
    if os.environ["MLFLOW_TRACKING_URI"].rstrip("/") == running.get(MLFLOW_SERVER):
        os.environ |= mlflow_login(secret)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes no parents
