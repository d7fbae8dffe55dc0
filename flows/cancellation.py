"""The end of a run that a user cancels or deletes on its page in Prefect, as soon as its stages have saved.

Prefect's runner sends SIGTERM and calls a run Cancelled only after it has loaded the flow once more, to look for hooks.
Until then each task that was cut off would log its failure with a traceback, and it would stay red for ever. No
signal comes where a flow run was deleted, or cancelled though a command started it: its process looks at its page.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx

# The one place where the reason of a SIGTERM is known. The runner tells it only while Prefect's own handler of the
# signal is installed, so a handler of ours could not ask.
from prefect._internal.control_listener import get_intent
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from pydantic import ValidationError

from flows.prefect_api import api_is_embedded
from flows.prefect_client import is_of_worker, prefect_at
from rmcore.core.errors import INTERRUPTED, RmcoreError, ServiceError
from rmcore.core.processes import terminate_children
from rmcore.core.progress import below_the_echo

KEPT = "Finished stages and the state of a training are stored: the same run continues there."
MESSAGE = f"Cancelled by a user. {KEPT}"
TO_END = (
    "A command started this run, so this page has Cancel disabled. To end it, press Ctrl-C in its terminal or choose "
    f"Delete in the menu here. {KEPT}"
)
DELETED = f"The flow run was deleted in Prefect, which ends it. {KEPT}"
LOOK_SECONDS = 5.0
LOOKS = 2
"""How often in a row a server says that there is no such flow run until it counts as deleted."""
KIND_OF_BLOCK = "secret"
"""Each database of Prefect has this kind, which cannot be deleted."""
PREFECT_FAILED = (ServiceError, PrefectException, ValidationError, httpx.HTTPError)


class _Page:
    """The request of a user on the page of this process's flow run; the process is sent SIGTERM then, once."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """MESSAGE or DELETED."""
        self.told: RmcoreError | None = None
        """The refusal that the run's log has already."""
        self._database: UUID | None = None
        """The random id that this server's database gave to `KIND_OF_BLOCK`."""
        self._over = threading.Event()
        self._ending = threading.Lock()

    @contextmanager
    def watched(self, run: FlowRun) -> Iterator[None]:
        """Look at the page of a flow run from a thread, inside the block; an embedded server shows none."""
        if not api_is_embedded():
            with suppress(*PREFECT_FAILED), prefect_at(os.environ["PREFECT_API_URL"]) as client:
                self._database = client.read_block_type_by_slug(KIND_OF_BLOCK).id
            threading.Thread(target=self._watch, args=(run, is_of_worker()), name="flow-run-page", daemon=True).start()
        try:
            yield
        finally:
            with self._ending:
                self._over.set()

    def _watch(self, run: FlowRun, is_of_worker: bool) -> None:
        num_missing = 0
        while not self._over.wait(LOOK_SECONDS) and get_intent() is None:
            try:
                now = self._look(run)
            except PREFECT_FAILED:
                num_missing = 0  # the server is away or busy, of which `end_without_server` judges, or another one
                continue
            num_missing = num_missing + 1 if now is None else 0
            if num_missing == LOOKS:
                self._end(DELETED)
                return
            # The runner of a worker sends the signal by itself.
            if now is not None and now.state is not None and now.state.is_cancelling() and not is_of_worker:
                self._end(MESSAGE)
                return

    def is_deleted(self, run: FlowRun) -> bool:
        """Whether the server says right now that it had the flow run, and has it no more."""
        try:
            return not api_is_embedded() and self._look(run) is None
        except PREFECT_FAILED:
            return False

    def _look(self, run: FlowRun) -> FlowRun | None:
        """Read a flow run; None where it was deleted, alone or with its flow.

        Raises:
            One of `PREFECT_FAILED`: Prefect does not answer, or what does is a server with another database, or another
                program that answers 404.
        """
        with prefect_at(os.environ["PREFECT_API_URL"]) as client:
            try:
                found = client.read_flow_run(run.id)
                if self._database is None:  # a server that has the run is the right one
                    self._database = client.read_block_type_by_slug(KIND_OF_BLOCK).id
                return found
            except ObjectNotFound:
                if client.read_block_type_by_slug(KIND_OF_BLOCK).id != self._database:
                    raise
                return None

    def _end(self, asked: str) -> None:
        with self._ending:
            if not self._over.is_set():
                self.asked = asked
                os.kill(os.getpid(), signal.SIGTERM)


_page = _Page()


@contextmanager
def ended_on_its_page(run: FlowRun) -> Iterator[None]:
    """End the flow run `run` of this process if a user cancels or deletes it during the block.

    The process ends here, once all inside the block has saved: Prefect's engine would call the run Crashed, and take
    seconds to end. A SIGTERM for another reason ends it as Prefect does.

    Inside the block and after it, a refusal is one sentence in the log of the run, without a traceback.
    """
    global _page  # noqa: PLW0603 - one flow run a process
    _page = _Page()
    for name in ("flow_runs", "task_runs"):  # the filter stays: Prefect logs the end of the flow after the block
        logging.getLogger(f"prefect.{name}").addFilter(_is_wanted)
    if not api_is_embedded() and not is_of_worker():
        get_run_logger().info(TO_END)
    try:
        with _page.watched(run):
            yield
    except (TerminationSignal, *PREFECT_FAILED) as error:
        # It may meet the answer that there is no such run before its page was looked at.
        if not isinstance(error, TerminationSignal) and _page.asked is None and _page.is_deleted(run):
            _page.asked = DELETED
        if _is_cancelled():
            get_run_logger().info(MESSAGE)
            with suppress(ServiceError):  # the runner says so later
                _show_cancelled(run.id)
        elif _page.asked is None:
            raise
        if _page.asked is not None:
            below_the_echo()
            print(f"error: {_page.asked}", file=sys.stderr, flush=True)
        terminate_children()
        sys.stdout.flush()
        for handler in logging.getLogger("prefect.flow_runs").handlers:
            handler.flush()  # the last lines are on their way to the page
        if _page.asked is None:  # the runner of a worker has cancelled it, and hears by which signal it ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(INTERRUPTED)


def _show_cancelled(run: UUID) -> None:
    """Show a flow run as Cancelled, and its tasks, which Prefect calls Crashed: nothing is wrong with them."""
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run]}})
    cut_off = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CRASHED"]}}})
    with prefect_at(None) as client:
        for task in client.read_task_runs(flow_run_filter=of_run, task_run_filter=cut_off):
            client.set_task_run_state(task.id, Cancelled(), force=True)
        client.set_flow_run_state(run, Cancelled(message=MESSAGE), force=True)


def _is_cancelled() -> bool:
    return get_intent() == "cancel" or _page.asked == MESSAGE


def _is_wanted(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RmcoreError):  # written for users: where in the code it was raised says nothing to them
        if error is _page.told:
            return False  # Prefect logs it of the task, of the flow, and as the process ends
        _page.told = error
        record.msg, record.args, record.exc_info = str(error), (), None
    return not _is_cancelled() or record.getMessage() == MESSAGE
