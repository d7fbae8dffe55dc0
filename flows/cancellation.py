"""The end of a run that a user cancels or deletes on its page in Prefect, as soon as its stages have saved.

Prefect's runner sends SIGTERM and calls a run Cancelled only after it has loaded the flow once more, to look for hooks.
Until then each task that was cut off would log its failure with a traceback, and it would stay red for ever. No signal
comes where a flow run was deleted, or cancelled though a command started it: its process looks at it.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

# The one place where the reason of a SIGTERM is known. The runner tells it only while Prefect's own handler of the
# signal is installed, so a handler of ours could not ask.
from prefect._internal.control_listener import get_intent
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.exceptions import ObjectNotFound, PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from flows.prefect_api import api_is_embedded
from flows.prefect_client import is_of_worker, prefect_at
from rmcore.core.errors import INTERRUPTED, RmcoreError, ServiceError
from rmcore.core.processes import terminate_children

KEPT = "Finished stages and the state of a training are stored: the same run continues there."
MESSAGE = f"Cancelled by a user. {KEPT}"
DELETED = f"The flow run was deleted in Prefect, which ends it. {KEPT}"
LOOK_SECONDS = 5.0
LOOKS = 3
"""How often in a row a server says that there is no such flow run until it counts as deleted."""
KIND_OF_BLOCK = "secret"
"""Each database of Prefect gives this kind, which cannot be deleted, a random id of its own."""


class _Wanted(logging.Filter):
    """Shows a refusal once, as one sentence, and of a cancelled run only that it was cancelled."""

    told: RmcoreError | None = None
    asked: str | None = None
    """MESSAGE or DELETED, where this process has seen by itself that a user asks for its end."""

    def is_cancelled(self) -> bool:
        return get_intent() == "cancel" or self.asked == MESSAGE

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RmcoreError):  # written for users: where in the code it was raised says nothing to them
            if error is self.told:
                return False  # Prefect logs it of the task, of the flow, and as the process ends
            self.told = error
            record.msg, record.args, record.exc_info = str(error), (), None
        return not self.is_cancelled() or record.getMessage() == MESSAGE


_wanted = _Wanted()


@contextmanager
def ended_on_its_page(run_id: UUID) -> Iterator[None]:
    """End this process if a user cancels or deletes its flow run in the block, once all inside the block has saved.

    Prefect's engine would call the run Crashed, and take seconds to end. A SIGTERM for another reason ends it as
    Prefect does. Inside the block and after it, a refusal is one sentence in the log of the run, without a traceback.
    """
    for name in ("flow_runs", "task_runs"):  # the filter stays: Prefect logs the end of the flow after the block
        logging.getLogger(f"prefect.{name}").addFilter(_wanted)
    over, _wanted.asked = threading.Event(), None
    if not api_is_embedded():
        threading.Thread(target=_look, args=(run_id, over), name="flow-run-page", daemon=True).start()
    try:
        yield
    except TerminationSignal:
        if _wanted.is_cancelled():
            get_run_logger().info(MESSAGE)
            with suppress(ServiceError):  # the runner says so later
                _show_cancelled(run_id)
        elif _wanted.asked is None:
            raise
        if _wanted.asked is not None:
            print(f"error: {_wanted.asked}", file=sys.stderr, flush=True)
        terminate_children()
        sys.stdout.flush()
        for handler in logging.getLogger("prefect.flow_runs").handlers:
            handler.flush()  # the last lines are on their way to the page
        if _wanted.asked is not None:
            os._exit(INTERRUPTED)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the runner hears by which signal it ended
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        over.set()


def _look(run_id: UUID, over: threading.Event) -> None:
    """Ask this process to end (SIGTERM) once its flow run is deleted, or cancelled where no runner of a worker asks."""
    database: UUID | None = None
    asked, num_missing = DELETED, 0
    while num_missing < LOOKS:
        try:
            with prefect_at(os.environ["PREFECT_API_URL"]) as client:
                try:
                    state = client.read_flow_run(run_id).state
                    if state is not None and state.is_cancelling() and not is_of_worker():
                        asked = MESSAGE
                        break
                    num_missing, database = 0, database or client.read_block_type_by_slug(KIND_OF_BLOCK).id
                except ObjectNotFound:  # also of another home's server there, or of a proxy
                    is_same = client.read_block_type_by_slug(KIND_OF_BLOCK).id == database
                    num_missing = num_missing + 1 if is_same else 0
        except (ServiceError, PrefectException):  # it is away or busy, of which `end_without_server` judges
            num_missing = 0
        if over.wait(LOOK_SECONDS):
            return
    if not over.is_set():
        _wanted.asked = asked
        os.kill(os.getpid(), signal.SIGTERM)


def _show_cancelled(run_id: UUID) -> None:
    """Show a flow run as Cancelled, and its tasks, which Prefect calls Crashed: nothing is wrong with them."""
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run_id]}})
    cut_off = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CRASHED"]}}})
    with prefect_at(None) as client:
        for task in client.read_task_runs(flow_run_filter=of_run, task_run_filter=cut_off):
            client.set_task_run_state(task.id, Cancelled(), force=True)
        client.set_flow_run_state(run_id, Cancelled(message=MESSAGE), force=True)
