"""What we make of the answers of a Prefect server that is not well."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import BlockType, FlowRun
from prefect.states import Running

from flows import cancellation, deploy, prefect_client
from flows.prefect_api import EMBEDDED_VARIABLE
from flows.prefect_client import owner_tag
from machine import wait_for
from rmcore.core.errors import INTERRUPTED, ServiceError
from rmcore.core.processes import PID, this_process
from tasks.declared_deployments import JOB_TEMPLATE
from tasks.local_services import CELLS_POOL, WORK_POOL


@pytest.fixture
def server():
    """Answers with the statuses of `server.statuses` in turn, the last one again and again, and has `server.others`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            if (other := served.others.get(self.path)) is not None:
                self.say(200, other)
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
        pool = {"id": str(uuid4()), "name": WORK_POOL, "type": "process", "base_job_template": JOB_TEMPLATE}
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


@pytest.fixture
def page(server, monkeypatch):
    """The page of a flow run on that server, looked at all the time, and the signals that this process is sent."""
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.01)
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    monkeypatch.delenv(EMBEDDED_VARIABLE, raising=False)
    watched, watched.signals = cancellation._Page(), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: watched.signals.append(number))
    yield watched
    signal.signal(signal.SIGTERM, before)


MISSING = b'{"detail":"Flow run not found"}'
RUN = FlowRun(flow_id=uuid4(), tags=[owner_tag(this_process() | {PID: str(2**22 + 1)})], state=Running())


KIND = "/api/block_types/slug/secret"


@pytest.fixture
def began(server):
    """The server is the one where `RUN` began, by the random id that each database of Prefect has."""
    server.others[KIND] = BlockType(id=uuid4(), name="Secret", slug="secret").model_dump_json().encode()


def test_nothing_is_shown_of_a_run_that_its_server_has_no_more(server, monkeypatch):
    server.statuses, server.body = [404], MISSING
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    prefect_at = prefect_client.prefect_at
    monkeypatch.setattr(prefect_client, "prefect_at", lambda api: prefect_at(server.api))
    assert prefect_client.show_state("Waiting for the device") is False


def test_a_flow_run_that_its_server_has_no_more_ends_its_process_once(server, began, page):
    """Whether it was deleted alone or with its flow: nothing but the database is known there."""
    server.statuses, server.body = [404], MISSING
    with page.watched(RUN):
        wait_for(lambda: page.signals)
        threading.Event().wait(0.1)  # in which a further signal would come
    assert (page.asked, page.signals) == (cancellation.DELETED, [signal.SIGTERM])


def test_a_server_that_was_busy_at_the_start_is_known_by_the_run_that_it_has(server, began, page):
    known = server.others.pop(KIND)
    server.statuses, server.body = [503], b""
    with page.watched(RUN):
        server.body, server.others[KIND] = RUN.model_dump_json().encode(), known
        server.statuses = [200, 200, 404]
        wait_for(lambda: page.signals)
    assert page.asked == cancellation.DELETED


@pytest.mark.parametrize(
    ("statuses", "body"),
    [
        ([404, 500] * 20, MISSING),  # not twice in a row
        ([401], MISSING),
        ([200], b"{}"),
        ([502], b""),
    ],
)
def test_a_server_that_is_away_or_not_well_ends_no_run(server, began, page, statuses, body):
    server.statuses, server.body = statuses, body
    with page.watched(RUN):
        wait_for(lambda: len(server.asked) > 5)
    assert (page.asked, page.signals) == (None, [])


@pytest.mark.parametrize("body", [MISSING, b"<title>404 of a proxy</title>"], ids=["database", "program"])
def test_a_server_that_is_another_one_ends_no_run(server, began, page, body):
    server.statuses, server.body = [404], body
    with page.watched(RUN):
        known = json.loads(server.others.pop(KIND))
        if body == MISSING:
            server.others[KIND] = json.dumps(known | {"id": str(uuid4())}).encode()
        wait_for(lambda: len(server.asked) > 8)
    assert (page.asked, page.signals) == (None, [])


def test_a_run_that_is_deleted_while_the_dead_ones_are_looked_for_is_skipped(server):
    """Its process is dead, so it is read once more; by then it is not there."""
    server.statuses, server.body = [404], MISSING
    pages = iter([[RUN], []])
    server.search = lambda: json.dumps([run.model_dump(mode="json") for run in next(pages)]).encode()
    assert prefect_client.reap_dead_runs(server.api) == []
    assert server.asked[-1] == f"/api/flow_runs/{RUN.id}"


DELETED_RUN = """
import sys
from prefect.exceptions import ObjectNotFound
from flows import cancellation
from flows.cancellation import ended_on_its_page

run = cancellation.FlowRun.model_validate_json(sys.argv[1])
cancellation.get_run_logger = cancellation.logging.getLogger
with ended_on_its_page(run):
    raise ObjectNotFound(Exception("Flow run not found"))
"""


def test_a_stage_that_meets_the_deletion_first_ends_the_run_in_the_same_words(server, began):
    server.statuses, server.body = [404], MISSING
    program = [sys.executable, "-c", DELETED_RUN, RUN.model_dump_json()]
    environment = {name: value for name, value in os.environ.items() if name != EMBEDDED_VARIABLE}
    environment["PREFECT_API_URL"] = server.api
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, f"error: {cancellation.DELETED}\n")
