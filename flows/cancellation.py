"""The end of a run that a user cancels in Prefect: Cancelled as soon as its stages have saved, and one line in its log.

Prefect's runner sends SIGTERM and calls the run Cancelled only after it has loaded the flow once more, to look for
hooks. Until then each task that was cut off would log its failure with a traceback, and it would stay red for ever.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect import runtime

# The one place where the reason of a SIGTERM is known. The runner tells it only while Prefect's own handler of the
# signal is installed, so a handler of ours could not ask.
from prefect._internal.control_listener import get_intent
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from flows.prefect_client import prefect_at
from rmcore.core.errors import ServiceError

MESSAGE = "Cancelled by a user. Finished stages and the state of a training are stored: the same run continues there."


@contextmanager
def quiet_cancellation() -> Iterator[None]:
    """End the flow run of this process as Cancelled if a user cancels it during the block.

    A SIGTERM for another reason ends it as Prefect does.
    """
    for name in ("flow_runs", "task_runs"):  # the filter stays: Prefect logs the end of the flow after the block
        logging.getLogger(f"prefect.{name}").addFilter(_is_wanted)
    try:
        yield
    except TerminationSignal:
        if _is_cancelled():
            get_run_logger().info(MESSAGE)
            with suppress(ServiceError):  # the runner says so later
                _show_cancelled(UUID(str(runtime.flow_run.id)))
        raise


def _show_cancelled(run: UUID) -> None:
    """Show a flow run as Cancelled, and its tasks, which Prefect calls Crashed: nothing is wrong with them."""
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run]}})
    cut_off = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CRASHED"]}}})
    with prefect_at(None) as client:
        for task in client.read_task_runs(flow_run_filter=of_run, task_run_filter=cut_off):
            client.set_task_run_state(task.id, Cancelled(), force=True)
        client.set_flow_run_state(run, Cancelled(message=MESSAGE), force=True)


def _is_cancelled() -> bool:
    return get_intent() == "cancel"


def _is_wanted(record: logging.LogRecord) -> bool:
    return not _is_cancelled() or record.getMessage() == MESSAGE
