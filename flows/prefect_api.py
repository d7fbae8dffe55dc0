"""What we ask of Prefect's API beside running flows: the device limit, the worker's presence, and runs that died.

Plain HTTP, because the command line starts servers before Prefect may be imported with their address.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from rmcore.cli.common import FAILED
from rmcore.core.errors import ServiceError
from rmcore.core.processes import terminate_children
from tasks.device import device_slots
from tasks.home import DEVICE_LIMIT
from tasks.local_services import WORK_POOL, basic_authorization
from tasks.run_owner import HOST, PID, STARTED, has_died, this_process

OWNER_PREFIX = "rm-"
"""Of the tags that name the process of a flow run."""
JOB_TEMPLATE = {
    # Names neither command nor environment nor folder, so those are the worker's; and no run may bring values of its
    # own: with Prefect's template they are the choice of whoever may create a run.
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
BUSY_SECONDS = 60.0
WATCH_SECONDS = 1.0
REFUSALS_OF_A_DEAD_SERVER = 3
"""So that a server that is started anew at once is not missed."""


def ask(method: str, url: str, body: dict[str, Any] | None = None, *, tolerate: int | None = None) -> Any:
    """Send a request to Prefect's API and return its JSON answer; a status of `tolerate` is an answer too.

    A server that says it is busy (503: its SQLite file is locked by another request) is asked again, as Prefect's own
    client does.

    Raises:
        ServiceError: Prefect does not answer, stays busy for `BUSY_SECONDS`, or refuses.
    """
    secret = os.environ.get("PREFECT_API_AUTH_STRING")
    deadline, pause = time.monotonic() + BUSY_SECONDS, 0.2
    try:
        while True:
            answer = httpx.request(
                method, url, json=body, timeout=30, headers=basic_authorization(secret) if secret else None
            )
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
    except httpx.HTTPError as error:
        raise ServiceError(
            f"Prefect at {url} does not answer ({error}): the server is down or busy. See `rm-opt status`."
        ) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ServiceError(
            f"Prefect at {url} refuses the password (401): it was started with another one. If it is the local one, "
            "run `rm-opt down` and `rm-opt up`; of another server, put the login into PREFECT_API_AUTH_STRING."
        )
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServiceError(
            f"Prefect at {url} has been too busy to answer for {BUSY_SECONDS:.0f} s (503). Run the same command again "
            "when less runs beside it; finished stages are stored."
        )
    if not answer.is_success and answer.status_code != tolerate:
        raise ServiceError(
            f"Prefect refused {url} with {answer.status_code} ({answer.text[:300]}): this version's API differs from "
            "the tested one. Install the versions of constraints.txt."
        )
    return answer.json() if answer.content else None


def leave_dead_server() -> None:
    """Use the embedded API where the configured server does not answer, and say so: the run matters more than its page.

    Call it before Prefect is imported, which reads the address then.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if not configured:
        return
    try:
        httpx.get(f"{configured.rstrip('/')}/health", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        del os.environ["PREFECT_API_URL"]
        os.environ["PREFECT_API_AUTH_STRING"] = os.environ["PREFECT_SERVER_API_AUTH_STRING"]
        print(
            f"warning: Prefect at {configured} does not answer ({error}); the embedded API is used, so this run will "
            "not show on that server. `rm-opt up` starts one here.",
            file=sys.stderr,
        )


def current_api() -> str:
    """Address of the API that this process's flows use: the configured server, else Prefect's embedded one."""
    if configured := os.environ.get("PREFECT_API_URL"):
        return configured.rstrip("/")
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return str(client.api_url).rstrip("/")


@contextmanager
def end_without_server(advice: str) -> Iterator[None]:
    """End this process with one sentence, and `advice`, if Prefect's server goes away during the block.

    A flow cannot go on without it, and Prefect's client would try for minutes and log a traceback for each attempt.
    The embedded server is started here, if it is the one in use.

    Raises:
        ServiceError: the embedded server did not start.
    """
    try:
        api = httpx.URL(current_api())
    except RuntimeError as error:  # what Prefect raises
        raise ServiceError(f"Prefect's embedded server did not start: {error}") from error
    # Python writes a byte for every signal that it handles: whoever is asked to end needs no reason, and Ctrl-C in a
    # terminal reaches the embedded server at the same time.
    asked_to_end, asking = socket.socketpair()
    asking.setblocking(False)
    hears_signals = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(asking.fileno(), warn_on_full_buffer=False) if hears_signals else -1
    # The embedded server has answered already; nothing is said of a server that never takes a connection from here: it
    # is reached through a proxy.
    was_there = "PREFECT_API_URL" not in os.environ
    watch = (api, advice, asked_to_end, was_there)
    threading.Thread(target=_watch, args=watch, name="prefect-watch", daemon=True).start()
    try:
        yield
    finally:
        if hears_signals:
            signal.set_wakeup_fd(before)
        asking.close()  # its other end becomes readable, which ends the watch


def _watch(api: httpx.URL, advice: str, asked_to_end: socket.socket, was_there: bool) -> None:
    """Look whether someone listens at all: a busy server does, and may take its time to answer."""
    port = api.port or (443 if api.scheme == "https" else 80)
    num_refused = 0
    with asked_to_end:
        while num_refused < REFUSALS_OF_A_DEAD_SERVER:
            try:
                socket.create_connection((api.host, port), timeout=10).close()
                num_refused, was_there = 0, True
            except ConnectionRefusedError:
                num_refused += was_there
            except OSError:  # the network's trouble, of which Prefect's client judges by itself
                pass
            if select.select([asked_to_end], [], [], WATCH_SECONDS)[0]:
                while asked_to_end.recv(64):  # until the other end is closed: a later signal must find a reader
                    pass
                return
    sys.stdout.flush()
    print(f"error: Prefect's server at {api} has ended during the run. {advice}", file=sys.stderr, flush=True)
    terminate_children()
    os._exit(FAILED)  # threads of Prefect's wait for an answer, so no other end comes soon


def ensure_device_limit(api: str | None = None) -> None:
    """Give the device limit its slots: Prefect lets everybody through a limit that does not exist.

    Args:
        api: address of Prefect's API, ending in `/api`; default: the one this process's flows use.

    Raises:
        ServiceError: Prefect does not answer.
    """
    url, slots = f"{api or current_api()}/v2/concurrency_limits/", device_slots()
    # Asked first: Prefect's server logs a traceback for a second creation.
    found = ask("GET", url + DEVICE_LIMIT, tolerate=404)
    if found.get("name") != DEVICE_LIMIT:
        ask("POST", url, {"name": DEVICE_LIMIT, "limit": slots, "active": True}, tolerate=409)
    elif found["limit"] != slots:
        ask("PATCH", url + DEVICE_LIMIT, {"limit": slots})


def free_leaked_device(device_is_free: bool) -> None:
    """Take back the device slot of a run that was killed: Prefect's embedded API would keep it occupied for ever.

    Args:
        device_is_free: nobody on this machine holds the store's device lock, which the kernel frees with its holder.
            (Someone who has the slot and not yet the lock loses the slot, and is still held back by the lock.)
    """
    if device_is_free:
        ask("PATCH", f"{current_api()}/v2/concurrency_limits/{DEVICE_LIMIT}", {"active_slots": 0})


def ensure_work_pool(api: str) -> None:
    """Make the worker's pool, or give the one that is there our template: Prefect's own lets a run name its command.

    Raises:
        ServiceError: Prefect does not answer.
    """
    url = f"{api}/work_pools/"
    found = ask("GET", url + WORK_POOL, tolerate=404)
    if found.get("name") != WORK_POOL:
        ask("POST", url, {"name": WORK_POOL, "type": "process", "base_job_template": JOB_TEMPLATE})
    elif found["base_job_template"] != JOB_TEMPLATE:
        ask("PATCH", url + WORK_POOL, {"base_job_template": JOB_TEMPLATE})


def worker_is_online(api: str) -> bool:
    """Whether a worker polls our work pool."""
    workers = ask("POST", f"{api}/work_pools/{WORK_POOL}/workers/filter", {}, tolerate=404)
    return isinstance(workers, list) and any(worker["status"] == "ONLINE" for worker in workers)


def run_owner_tags() -> list[str]:
    """Prefect tags that name this process, by which `reap_dead_runs` sees that its run has died with it."""
    return [f"{OWNER_PREFIX}{name}:{value}" for name, value in this_process().items()]


def is_owner_tag(tag: str) -> bool:
    """Whether a tag of a flow run says which process runs it, or ran it before it was started again."""
    return tag.startswith(tuple(f"{OWNER_PREFIX}{name}:" for name in (HOST, PID, STARTED)))


def reap_dead_runs(api: str | None = None) -> list[str]:
    """Mark flow runs of this machine, and their tasks, as Crashed whose process has ended; return the runs' names.

    After SIGKILL, or a machine that went down, Prefect shows a run as Running for ever.

    Args:
        api: address of Prefect's API, ending in `/api`; default: the one this process's flows use.

    Raises:
        ServiceError: Prefect does not answer.
    """
    api = api or current_api()
    running = {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
    mine = {"tags": {"all_": [f"{OWNER_PREFIX}{HOST}:{this_process()[HOST]}"]}}
    runs = ask("POST", f"{api}/flow_runs/filter", {"flow_runs": {**running, **mine}})
    dead = [run for run in runs if has_died(_owner(run["tags"]))]
    for run in dead:
        message = "The process of this run has ended without reporting; start the run again."
        state = {"type": "CRASHED", "name": "Crashed", "message": message}
        parts = {"flow_runs": {"id": {"any_": [run["id"]]}}, "task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
        for task in ask("POST", f"{api}/task_runs/filter", parts):
            ask("POST", f"{api}/task_runs/{task['id']}/set_state", {"state": state, "force": True})
        ask("POST", f"{api}/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return [run["name"] for run in dead]


def _owner(tags: list[str]) -> dict[str, str]:
    return dict(tag.removeprefix(OWNER_PREFIX).split(":", 1) for tag in tags if is_owner_tag(tag))
