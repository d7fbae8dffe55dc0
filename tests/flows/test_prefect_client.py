"""What we make of the answers of a Prefect server that is not well."""

import json
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import BlockType, FlowRun
from prefect.states import Cancelling, Running

from flows import cancellation, deploy, prefect_client
from machine import wait_for
from rmcore.core.errors import ServiceError
from rmcore.core.processes import OWNER_FIELDS, PID, this_process
from tasks.local_services import CELLS_POOL, WORK_POOL


@pytest.fixture
def server():
    """Answers with the statuses of `server.statuses` in turn, the last one again and again; `others`, by its path."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path in served.others:
                self.say(200, served.others[self.path])
                return
            self.say(served.statuses.pop(0) if len(served.statuses) > 1 else served.statuses[0], served.body)
            served.asked.append(self.path)

        def say(self, status, body):
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.say(200, served.search())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as served:
        served.api, served.asked, served.others = f"http://127.0.0.1:{served.server_port}/api", [], {}
        pool = {"id": str(uuid4()), "name": WORK_POOL, "type": "process", "base_job_template": deploy.JOB_TEMPLATE}
        served.body = json.dumps(pool).encode()
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_a_busy_server_is_asked_again(server):
    server.statuses = [503, 503, 200]
    deploy.ensure_work_pools(server.api)
    assert server.asked == [*[f"/api/work_pools/{WORK_POOL}"] * 3, f"/api/work_pools/{CELLS_POOL}"]


def test_one_that_stays_busy_is_named_as_that_and_not_as_another_version(server):
    server.statuses = [503]
    with pytest.raises(ServiceError, match="too busy to answer"):
        deploy.ensure_work_pools(server.api)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "refuses the password .* PREFECT_API_AUTH_STRING"), (422, "work_pools/rm-opt with 422")]
)
def test_a_refusal_is_not_repeated(server, status, words):
    server.statuses = [status, 200]
    with pytest.raises(ServiceError, match=words):
        deploy.ensure_work_pools(server.api)
    assert server.statuses == [200]


@pytest.mark.parametrize("body", [b"<html>", b'{"found": 1}'], ids=["no JSON", "another JSON"])
def test_an_answer_of_something_else_is_named_as_that(server, body):
    server.statuses, server.body = [200], body
    with pytest.raises(ServiceError, match="something else listens there"):
        deploy.ensure_work_pools(server.api)


def test_a_server_that_is_away_is_named():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ServiceError, match=f"{port}/api does not answer .*down or busy"):
        deploy.ensure_work_pools(f"http://127.0.0.1:{port}/api")


MISSING = b'{"detail":"Flow run not found"}'
DEAD = this_process() | {PID: str(2**22 + 1)}
RUN = FlowRun(
    flow_id=uuid4(), labels={prefect_client.OWNER: ":".join(DEAD[name] for name in OWNER_FIELDS)}, state=Running()
)


KIND = "/api/block_types/slug/secret"


def database():
    """What a server says that has a database of its own."""
    return BlockType(id=uuid4(), name="Secret", slug="secret").model_dump_json().encode()


@pytest.fixture
def looked_at(server, monkeypatch):
    """A process that looks at its flow run, once it has seen it: gives the server, and all signals that it gets."""
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cancellation._wanted, "asked", None)
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    server.statuses, server.body, server.others[KIND] = [200], RUN.model_dump_json().encode(), database()
    signals, over = [], threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    looking = threading.Thread(target=cancellation._look, args=(RUN.id, over))
    looking.start()
    try:
        wait_for(lambda: len(server.asked) > cancellation.LOOKS)
        yield server, signals
    finally:
        over.set()
        looking.join()
        signal.signal(signal.SIGTERM, before)


def look_on(server, signals):
    """Until the process is asked to end, or has looked more often than it ever needs to."""
    begun = len(server.asked)
    wait_for(lambda: signals or len(server.asked) > begun + 3 * cancellation.LOOKS)


@pytest.mark.parametrize(
    ("statuses", "after", "ends"),
    [
        ([404], "the same", True),
        ([404, 404, 500] * 20, "the same", False),
        ([401], "the same", False),
        ([404], "another database", False),
        ([404], "another program", False),
    ],
)
def test_a_flow_run_that_its_database_has_no_more_ends_its_process_once(looked_at, statuses, after, ends):
    server, signals = looked_at
    if after == "another database":
        server.others[KIND] = database()
    elif after == "another program":
        del server.others[KIND]
    server.statuses = statuses
    look_on(server, signals)
    assert (len(signals), cancellation._wanted.asked) == (ends, cancellation.DELETED if ends else None)


@pytest.mark.parametrize("of_worker", [False, True])
def test_a_flow_run_that_is_cancelled_ends_the_command_that_started_it(looked_at, monkeypatch, of_worker):
    """The runner of a worker ends what that has started."""
    server, signals = looked_at
    monkeypatch.setattr(cancellation, "is_of_worker", lambda: of_worker)
    server.body = RUN.model_copy(update={"state": Cancelling()}).model_dump_json().encode()
    look_on(server, signals)
    assert (len(signals), cancellation._wanted.asked) == ((0, None) if of_worker else (1, cancellation.MESSAGE))


def test_a_run_that_is_deleted_while_the_dead_ones_are_looked_for_is_skipped(server):
    """Its process is dead, so it is read once more; by then it is not there."""
    server.statuses, server.body = [404], MISSING
    pages = iter([[RUN], []])
    server.search = lambda: json.dumps([run.model_dump(mode="json") for run in next(pages)]).encode()
    assert prefect_client.reap_dead_runs(server.api) == []
    assert server.asked[-1] == f"/api/flow_runs/{RUN.id}"
