"""What we make of the answers of a Prefect server that is not well."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows import prefect_api
from rmcore.core.errors import ServiceError


@pytest.fixture
def server():
    """Answers with the statuses of `server.statuses` in turn, the last one again and again."""

    class Answer(BaseHTTPRequestHandler):
        def do_PATCH(self):
            status = served.statuses.pop(0) if len(served.statuses) > 1 else served.statuses[0]
            self.send_response(status)
            body = b'{"found": 1}'
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as served:
        served.url = f"http://127.0.0.1:{served.server_port}/limits"
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_a_busy_server_is_asked_again(server):
    server.statuses = [503, 503, 200]
    assert prefect_api.ask("PATCH", server.url) == {"found": 1}
    assert server.statuses == [200]


def test_one_that_stays_busy_is_named_as_that_and_not_as_another_version(server, monkeypatch):
    server.statuses = [503]
    monkeypatch.setattr(prefect_api, "BUSY_SECONDS", 1.0)
    with pytest.raises(ServiceError, match="too busy to answer"):
        prefect_api.ask("PATCH", server.url)


def test_a_refusal_is_not_repeated(server):
    server.statuses = [422, 200]
    with pytest.raises(ServiceError, match="with 422"):
        prefect_api.ask("PATCH", server.url)
    assert server.statuses == [200]
