"""The connection to MLflow.

MLflow is imported by the first use: its import takes 2 s, its first connection to a new database 5 s.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from rmcore.core.files import exclusive

if TYPE_CHECKING:
    from mlflow import MlflowClient

PROBE_TIMEOUT_S = 5.0


DATABASE_FILE = "sqlite:///"


def connect(tracking_uri: str) -> "MlflowClient":
    """A client of `tracking_uri`; a server is asked for a sign of life first, so a dead address costs seconds.

    Raises:
        OSError: no server answers there.
    """
    if tracking_uri.startswith("http"):
        import requests

        # urllib3 reports each retry by itself; an outage is told once, by the tracker.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        requests.get(f"{tracking_uri}/health", timeout=PROBE_TIMEOUT_S)
    from mlflow import MlflowClient

    with alone_with(tracking_uri):
        return MlflowClient(tracking_uri, registry_uri=tracking_uri)


def alone_with(tracking_uri: str) -> AbstractContextManager[None]:
    """Let one process at a time connect to a database file for the first time.

    The first one makes its tables, and several at once would make them on top of each other and fail half-way.
    """
    if not tracking_uri.startswith(DATABASE_FILE):
        return nullcontext()
    database = Path(tracking_uri.removeprefix(DATABASE_FILE))
    return exclusive(database.with_name(f"{database.name}.lock"))


@contextmanager
def tolerating(error_code: str) -> Iterator[None]:
    """Swallow MLflow's answer `error_code`, and nothing else."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != error_code:
            raise


def in_one_line(error: Exception) -> str:
    """Kind and first line of an error, short enough for a message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else type(error).__name__


def without_login(address: str) -> str:
    """An address as it may be shown: without the user and password that it may carry.

    >>> without_login("https://me:secret@tracking.example/mlflow")
    'https://tracking.example/mlflow'
    """
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
