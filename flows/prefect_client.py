"""Questions to Prefect's API besides running flows: workers, and runs that died."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from json import JSONDecodeError
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import Abort, ObjectNotFound
from prefect.states import Cancelled, Crashed
from pydantic import ValidationError

from rmcore.core.errors import ServiceError
from rmcore.core.processes import OWNER_FIELDS, has_died, this_process

OWNER = "rm-owner"
"""Label that names the process of a flow run: `OWNER_FIELDS` with colons between. No page shows labels."""
REASON = "The process of this run has ended without reporting; start the run again."


@contextmanager
def prefect_at(api: str | None) -> Iterator[SyncPrefectClient]:
    """Prefect's client of an API, or of the one that this process's flows use; how it fails, in our words.

    The client asks a busy server again by itself (503: its SQLite file is locked by another request).

    Raises:
        ServiceError: Prefect does not answer, stays busy, refuses, or gives an unexpected answer.
    """
    secret = os.environ.get("PREFECT_API_AUTH_STRING")
    client = get_client(sync_client=True) if api is None else SyncPrefectClient(api, auth_string=secret)
    address = str(client.api_url).rstrip("/")
    try:
        with client:
            yield client
    except httpx.HTTPStatusError as error:
        raise _refused(address, error.response) from error
    except httpx.HTTPError as error:
        raise ServiceError(
            f"Prefect at {address} does not answer ({error}): the server is down or busy. See `rm-opt info`."
        ) from error
    except (JSONDecodeError, ValidationError) as error:
        raise ServiceError(
            f"Prefect at {address} gave an answer that cannot be read ({str(error)[:300]}): this version's API "
            "differs from the tested one, or something else listens there. Install the versions of constraints.txt."
        ) from error


def _refused(api: str, answer: httpx.Response) -> ServiceError:
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return ServiceError(
            f"Prefect at {api} refuses the password (401): it was started with another one. If it is the local one, "
            "run `rm-opt down` and `rm-opt up`; of another server, put the login into PREFECT_API_AUTH_STRING."
        )
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return ServiceError(
            f"Prefect at {api} is too busy to answer (503), though it was asked again for about a minute. Run the same "
            "command again when less runs next to it; finished stages are stored."
        )
    return ServiceError(
        f"Prefect refused {answer.url} with {answer.status_code} ({answer.text[:300]}): this version's API differs "
        "from the tested one. Install the versions of constraints.txt."
    )


def workers_online(pool: str, api: str | None = None) -> list[str]:
    """Names of the workers that poll a pool of an API, or of the one that this process's flows use.

    Raises:
        ServiceError: Prefect does not answer.
    """
    with prefect_at(api) as client:
        return [worker.name for worker in client.read_workers_for_work_pool(pool) if worker.status == "ONLINE"]


def claim_run(client: SyncPrefectClient, run_id: UUID) -> None:
    """Label a flow run with this process, by which `reap_dead_runs` sees that it has died."""
    owner = this_process()
    client.update_flow_run_labels(run_id, {OWNER: ":".join(owner[name] for name in OWNER_FIELDS)})


def is_of_worker() -> bool:
    """Whether a worker has started this process for a flow run."""
    started_as = sys.modules["__main__"].__spec__
    return started_as is not None and started_as.name == "prefect.engine"


@cache
def claim_loaded_run() -> None:
    """Claim the flow run that a worker started this process for, before Prefect calls it running.

    Called when a flow is defined, which Prefect's engine waits for: a process that is killed from then on is known as
    the run's. In all other processes nothing happens, also in children that inherit the engine's environment.

    Raises:
        Abort: a user has deleted the run meanwhile, or cancelled it, and it is Cancelled now; the engine would fail
            with a traceback, and a cancelled run be shown as Cancelling for ever.
    """
    if not is_of_worker():
        return
    run_id = UUID(sys.argv[1] if len(sys.argv) > 1 else os.environ["PREFECT__FLOW_RUN_ID"])
    with suppress(ServiceError), prefect_at(None) as client:  # it is tried again when the flow begins
        try:
            run = client.read_flow_run(run_id)
        except ObjectNotFound as deleted:
            raise Abort from deleted
        if run.state is not None and run.state.is_cancelling():
            client.set_flow_run_state(run_id, Cancelled(message="Cancelled by a user before it began."), force=True)
            raise Abort
        claim_run(client, run_id)


RUNNING_TYPES = (StateType.RUNNING, StateType.CANCELLING)


def reap_dead_runs(api: str | None = None) -> list[str]:
    """Mark flow runs of this machine, and their tasks, as Crashed whose process has ended; return the runs' names.

    After SIGKILL, or a machine that went down, Prefect shows a run as Running for ever.

    Args:
        api: address of Prefect's API, ending in `/api`; default: the one this process's flows use.

    Raises:
        ServiceError: Prefect does not answer.
    """
    running = FlowRunFilter.model_validate({"state": {"type": {"any_": list(RUNNING_TYPES)}}})
    with prefect_at(api) as client:
        runs: list[FlowRun] = []
        while page := client.read_flow_runs(flow_run_filter=running, offset=len(runs)):
            runs += page
        dead: list[str] = []
        for run in runs:
            if not has_died(_owner(run)):
                continue
            try:
                if _crash(client, run):
                    dead.append(run.name)
            except ObjectNotFound:
                continue  # it was deleted meanwhile
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:  # so were its tasks
                    raise
    return dead


def _crash(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Mark a flow run whose process has ended as Crashed, and its tasks; gives whether that is still true of it."""
    # Read once more: between the search and the look at its process it may have ended well, or been resumed.
    now = client.read_flow_run(run.id)
    if now.state is None or now.state.type not in RUNNING_TYPES or _owner(now) != _owner(run):
        return False
    for task in client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING"]}}}),
    ):
        client.set_task_run_state(task.id, Crashed(message=REASON), force=True)
    client.set_flow_run_state(run.id, Crashed(message=REASON), force=True)
    return True


def _owner(run: FlowRun) -> dict[str, str]:
    """The process that runs it; of one that was started again, the last."""
    return dict(zip(OWNER_FIELDS, str(run.labels.get(OWNER, "")).split(":"), strict=False))
