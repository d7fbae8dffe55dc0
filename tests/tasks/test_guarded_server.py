"""The guard before a server hands on what names it rightly and has the password, and refuses all else in words."""

import asyncio
import base64
import os
import subprocess
import sys

import httpx
import pytest

from machine import PATIENCE_S
from rmcore.core.errors import ServiceError
from tasks.guarded_server import Guard
from tasks.passwords import PROOF_PATH, require_proof

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


HOSTS = (
    "evil.example", "127.0.0.1.evil.example", "evil.example:4200", "127.0.0.1:4200.evil.example", "[::1", "8.8.8.8", "",
    "localhost@evil.example", "127.0.0.1, evil.example", "[fe80::1]:4200", "0", "localhost:4200", "127.0.0.1",
    "127.0.0.1:1", "[::1]:4200", "0.0.0.0:4200", "192.168.evil.example",
)  # fmt: skip
ORIGINS = (
    "null", "http://evil.example", "http://127.0.0.1:5000", "https://127.0.0.1:4200", "file://", "http://127.0.0.1",
    "http://localhost:4200", "http://[::1]:4200", "http://127.0.0.1.evil.example:4200", "",
)  # fmt: skip


def test_only_its_own_address_and_its_own_pages():
    login = basic(f"any:{SECRET}")
    for path in ("/", "/health", PROOF_PATH):
        assert {status(host=host, path=path, authorization=login) for host in HOSTS} == {421}
        origins = [origin.encode() for origin in ORIGINS]
        assert {status(path=path, authorization=login, origin=origin) for origin in origins} == {403}
    assert status(authorization=login, origin=ADDRESS.encode()) == 200
    assert status(path="/health") == 200


def test_a_server_proves_that_it_has_the_password_and_one_that_has_it_not_is_told_nothing(serve):
    told = []

    def relay(place):
        """Gives to all that ask it for a proof that of the server there."""

        async def app(scope, receive, send):
            told.extend(name for name, _ in scope["headers"])
            own = httpx.get(f"{place}{scope['path']}?{scope['query_string'].decode()}", timeout=PATIENCE_S)
            await send({"type": "http.response.start", "status": own.status_code, "headers": []})
            await send({"type": "http.response.body", "body": own.content})

        return lambda address: app

    async def silent(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"\xff"})

    honest = serve(lambda address: Guard(None, address, SECRET))
    require_proof(honest, SECRET)
    other = serve(lambda address: Guard(None, address, "another"))
    for impostor in (other, serve(relay(honest)), serve(lambda address: silent)):
        with pytest.raises(ServiceError, match="was sent no password"):
            require_proof(impostor, SECRET)
    assert told
    assert b"authorization" not in told
    for question in ("", "?question=short", f"?question={'q' * 44}", f"?question={'q' * 42}%0a"):
        assert httpx.get(f"{honest}{PROOF_PATH}{question}", timeout=PATIENCE_S).status_code == 400


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
@pytest.mark.night
def test_servers_that_meet_a_fresh_database_at_once_all_start(tmp_path):
    """They wait for each other after their imports, so that they begin within milliseconds."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=clean | {"RM_OPT_HOME": str(tmp_path / "home")},
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        assert process.stdout.readline() == "imported\n", process.communicate()[1]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0, 0], ended
