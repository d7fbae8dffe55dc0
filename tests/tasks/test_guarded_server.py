"""The guard before a server hands on what names it rightly and has the password, and refuses all else in words."""

import asyncio
import base64
import os
import subprocess
import sys

import pytest

from tasks.guarded_server import Guard
from tasks.model_training import CHOOSE, ModelTrainingFirst

ADDRESS, SECRET = "http://127.0.0.1:4200", "the-secret"


def status(*, host="127.0.0.1:4200", path="/", **headers):
    """What one request to a guarded application is answered with; 200 where it was handed on."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    given = [(b"host", host.encode())] + [(name.encode(), value) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "headers": given}
    asyncio.run(Guard(app, ADDRESS, SECRET)(scope, None, send))
    return sent[0]["status"]


def basic(text):
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize("login", [basic(f"any:{SECRET}"), basic(f"a:b:{SECRET}"), basic(f":{SECRET}")])
def test_the_password_lets_in_with_any_name(login):
    assert status(authorization=login) == 200


@pytest.mark.parametrize(
    "login",
    [b"", b"Basic", b"Basic \xe9", b"Basic ===", b"Bearer the-secret", basic("any:"), basic("any:\u00e9"), b"\xff\xfe"],
)
def test_whatever_else_is_sent_as_a_login_is_a_wrong_one(login):
    assert status(authorization=login) == 401
    assert status(path="//health", authorization=login) == status(path="/health/../x", authorization=login) == 401


def test_only_its_own_address_and_its_own_pages():
    login = basic(f"any:{SECRET}")
    for host in ("localhost:4200", "127.0.0.1", "127.0.0.1:4200.evil.example", "[::1]:4200", ""):
        assert status(host=host, authorization=login) == 421
    for origin in (b"null", b"http://127.0.0.1:5000", b"https://127.0.0.1:4200"):
        assert status(authorization=login, origin=origin) == 403
    assert status(authorization=login, origin=ADDRESS.encode()) == 200
    assert status(path="/health") == 200


def mlflow_page(path, method="GET", content=(b"<html><head>", b"<title></title></head></html>"), kind=b"text/html"):
    """The headers and the body that come by way of `ModelTrainingFirst`, and the headers that MLflow was asked with."""
    sent, asked = [], []

    async def app(scope, receive, send):
        asked.extend(name for name, _ in scope["headers"])
        length = str(sum(map(len, content))).encode()
        headers = [(b"content-type", kind), (b"content-length", length), (b"x-frame-options", b"DENY")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, part in enumerate(content):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(content)})

    async def send(message):
        sent.append(message)

    headers = [(b"if-none-match", b"x"), (b"if-modified-since", b"y"), (b"host", b"z")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(ModelTrainingFirst(app)(scope, None, send))
    return dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:]), asked


def test_mlflows_page_chooses_model_training_first_and_nothing_else_is_touched():
    headers, body, asked = mlflow_page("/")
    assert body == b"<html><head>" + CHOOSE + b"<title></title></head></html>"
    assert headers[b"content-length"] == str(len(body)).encode()
    assert headers[b"x-frame-options"] == b"DENY"
    assert asked == [b"host"]
    for untouched in ({"path": "/ajax-api/x"}, {"path": "/", "method": "POST"}):
        headers, body, asked = mlflow_page(**untouched)
        assert body == b"<html><head><title></title></head></html>"
        assert len(asked) == 3
    assert mlflow_page("/", content=(b"no page",))[1] == b"no page"


MIGRATE = """
from tasks.home import configure_environment
configure_environment()
import prefect.server.database
from tasks.guarded_server import migrate_prefect
print("imported", flush=True)
input()
migrate_prefect()
"""


@pytest.mark.services
def test_servers_that_meet_a_fresh_database_at_once_all_start(tmp_path):
    """They wait for each other after their imports, so that they begin within milliseconds."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=clean | {"RM_OPT_HOME": str(tmp_path / "home")},
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in started:
        assert process.stdout.readline() == "imported\n", process.communicate()[1]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0, 0, 0], ended
