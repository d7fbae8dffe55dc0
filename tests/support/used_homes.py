"""Homes in which Prefect's and MLflow's databases stand already: to make them takes fifteen seconds of a core."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tasks.home import QUIET_ENVIRONMENT, SAFE_ENVIRONMENT

SET_BY_US = (
    *(*QUIET_ENVIRONMENT, *SAFE_ENVIRONMENT, "PREFECT_HOME", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"),
    *("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
)
"""What `configure_environment` sets."""
PROGRAM = """
import asyncio
from tasks.home import configure_environment, default_tracking_uri, home
configure_environment()
from prefect.server.database import provide_database_interface
from tasks.mlflow_client import connect
asyncio.run(provide_database_interface().create_db())
connect(default_tracking_uri(home())).search_experiments()
"""


def clean_environment() -> dict[str, str]:
    """The variables of this process without those that name servers and what they are like."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}


def make_databases(shared: Path) -> Path:
    """The home in `shared` with nothing but both databases; of many processes the first one makes it."""
    home = shared / "databases"
    with (shared / "databases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "finished").exists():
            environment = clean_environment() | {"RM_OPT_HOME": str(home)}
            subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
            (home / "finished").touch()
    return home


def take_as_home(directory: Path, monkeypatch) -> Path:
    """Make `directory` this test's home; what `configure_environment` sets is taken away at its end."""
    for name in SET_BY_US:
        monkeypatch.setenv(name, "")  # so that monkeypatch knows it
        monkeypatch.delenv(name)
    monkeypatch.setenv("RM_OPT_HOME", str(directory))
    return directory


def begin(home: Path, databases: Path) -> Path:
    """Make `home` one that was used before, as far as its databases are concerned."""
    for tool in ("prefect", "mlflow"):
        (home / tool).mkdir(parents=True, mode=0o700)
        for file in (databases / tool).glob(f"{tool}.db*"):  # what SQLite has not yet merged, too
            shutil.copy(file, home / tool)
    return home
