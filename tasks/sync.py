"""Sending what MLflow missed: the runs that wait in `$RM_OPT_HOME/unsynced/` (`rm-opt store sync`)."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rmcore.core.errors import DataError, ServiceError
from rmcore.core.files import exclusive
from tasks.local_services import MLFLOW_SERVER, running_services
from tasks.mlflow_client import in_one_line
from tasks.mlflow_run import replay
from tasks.passwords import identity, mlflow_login
from tasks.run_owner import has_died
from tasks.run_record import SYNC_LOCK, RunRecord, read_record, unsynced_folder

logger = logging.getLogger(__name__)


def sync_pending(directory: Path, tracking_uri: str | None = None) -> list[str]:
    """Send every run that waits in `directory/unsynced/` to MLflow; names of the runs sent, parents first.

    Safe to repeat: what MLflow knows of a run in part is replaced, not doubled. A run that is still running is left to
    itself. What is gone from the store meanwhile is named in a warning and left out; the run is tagged
    `rm.missing_files`, so that the next start of the same run sends it.

    Args:
        directory: the home that holds the records.
        tracking_uri: where to send them; default: the address each run was meant for.

    Raises:
        ServiceError: MLflow still fails; the runs not sent yet stay.
        DataError: records are damaged; they are named and stay, all others were sent.
    """
    sent, damaged, failures = list[str](), list[str](), list[str]()
    waiting: dict[Path, RunRecord] = {}
    with exclusive(directory / SYNC_LOCK):
        for path in sorted(unsynced_folder(directory).glob("*.json")):
            try:
                record = read_record(path)
                if is_over(record):
                    waiting[path] = record
                else:
                    logger.warning("Run %s is still running: it sends its record itself, at its end.", record.run_name)
            except DataError as error:
                if path.exists():  # else its run has just sent it
                    damaged.append(str(error))
        order = sorted(waiting.items(), key=lambda one: (one[1].parent_uid is not None, one[1].started_ms, one[1].uid))
        for path, record in order:
            target = tracking_uri or record.tracking_uri
            try:
                with _login_for(target, directory):
                    replay(replace(record, tracking_uri=target), directory)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are sent and this one stays
                failures.append(f"{record.run_name} to {target}: {in_one_line(error)}")
                continue
            path.unlink(missing_ok=True)
            sent.append(record.run_name)
    if failures:
        raise ServiceError(
            f"MLflow still fails for {len(failures)} of {len(waiting)} waiting runs ({'; '.join(failures[:3])}); they "
            f"stay in {unsynced_folder(directory)}, {len(sent)} were sent. Start MLflow (`rm-opt up` for the local "
            "one) and run `rm-opt store sync` again, with --to ADDRESS if it has moved."
            + "".join(f" And {reason}" for reason in damaged)
        )
    if damaged:
        raise DataError(f"{len(damaged)} waiting records are damaged, {len(sent)} runs were sent. {' '.join(damaged)}")
    return sent


def is_over(record: RunRecord) -> bool:
    """Whether nothing more is written to a record: its run has ended, or its process has died."""
    return not record.owner or any(event["kind"] == "end" for event in record.events) or has_died(record.owner)


@contextmanager
def _login_for(tracking_uri: str, directory: Path) -> Iterator[None]:
    """Log in to this home's server with its password, and tell it to no other: a record may be meant for another's."""
    login, before = mlflow_login(identity(directory).password(MLFLOW_SERVER)), dict(os.environ)
    local = running_services(directory).get(MLFLOW_SERVER)
    if local is not None and tracking_uri == local.url:
        os.environ |= login
    elif login.items() <= before.items():
        for name in login:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ |= {name: before[name] for name in login if name in before}
