"""Homes in which Prefect's and MLflow's databases stand already: to make them takes fifteen seconds of a core."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
from tasks.home import configure_environment, default_tracking_uri, home
configure_environment()
from prefect.server.database import provide_database_interface
from tasks.mlflow_client import connect
asyncio.run(provide_database_interface().create_db())
connect(default_tracking_uri(home())).search_experiments()
"""


def make_databases(shared: Path) -> Path:
    """The home in `shared` with nothing but both databases; of many processes the first one makes it."""
    home = shared / "databases"
    with (shared / "databases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "finished").exists():
            inherited = {
                name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))
            }
            subprocess.run([sys.executable, "-c", PROGRAM], env=inherited | {"RM_OPT_HOME": str(home)}, check=True)
            (home / "finished").touch()
    return home


def begin(home: Path, databases: Path) -> Path:
    """Make `home` one that was used before, as far as its databases are concerned."""
    for tool in ("prefect", "mlflow"):
        (home / tool).mkdir(parents=True, mode=0o700)
        for file in (databases / tool).glob(f"{tool}.db*"):  # what SQLite has not yet merged, too
            shutil.copy(file, home / tool)
    return home
