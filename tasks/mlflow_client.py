"""The connection to MLflow.

MLflow is imported by the first use: its import takes 2 s, its first connection to a new database 5 s.
"""

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from rmcore.core.files import exclusive

if TYPE_CHECKING:
    from mlflow import MlflowClient

PROBE_TIMEOUT_S = 5.0
DATABASE_FILE = "sqlite:///"
PASSING = frozenset({"BAD_REQUEST", "INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "ABORTED", "RESOURCE_CONFLICT"})
"""MLflow's answers that the same call may not get again. BAD_REQUEST is how it tells that its database refused a row,
above all one that another run inserted between MLflow's own look and its insert; the call is rolled back then."""
RETRY_SECONDS = 30.0
"""No call is repeated later than this after its first try."""
PAUSE_SECONDS = 0.05, 1.0
LOCAL_FILE_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
T = TypeVar("T")


def connect(tracking_uri: str) -> "MlflowClient":
    """A client of `tracking_uri` whose calls are repeated where MLflow's answer may be another one the next time.

    A server is probed first, so a dead address costs seconds.

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
        client = persistent(lambda: MlflowClient(tracking_uri, registry_uri=tracking_uri))
        return cast("MlflowClient", _PersistentClient(client))


class _PersistentClient:
    """An MlflowClient, each call of which is `persistent`."""

    def __init__(self, client: "MlflowClient") -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *given, **named: persistent(partial(method, *given, **named))


def persistent(call: Callable[[], T]) -> T:
    """Return what one call to MLflow gives, repeating it for some seconds while its answer is a passing one.

    Four runs that begin at once meet in MLflow's tables: of two that insert one row, such as a tag of their experiment,
    the second is refused, and of two that write a SQLite file, one may be told that it is locked. Neither is an outage.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return call()
        except (MlflowException, SQLAlchemyError) as error:
            passes = isinstance(error, SQLAlchemyError) or error.error_code in PASSING
            # What `requests` raised was tried again below MLflow already: the server is away.
            if not passes or _is_connection_failure(error) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - runs that met must not meet again


def _is_connection_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, is of the network."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, LOCAL_FILE_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_outage(error: Exception) -> bool:
    """Whether MLflow does not answer, or has no database (500 or more, repeatedly): all calls would fail."""
    status = getattr(error, "get_http_status_code", None)  # MLflow's own errors; it may be what cannot be imported
    return _is_connection_failure(error) or (status is not None and status() >= 500)


def alone_with(tracking_uri: str) -> AbstractContextManager[None]:
    """Let one process at a time connect to a database file for the first time: two would both make its tables."""
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
    first = re.sub(r"//[^/\s@]*@", "//", next(iter(str(error).splitlines()), ""))  # an address may hold a password
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def without_login(address: str) -> str:
    """An address as it may be shown: without the user and password that it may carry.

    >>> without_login("https://me:secret@tracking.example/mlflow")
    'https://tracking.example/mlflow'
    """
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.netloc else address
