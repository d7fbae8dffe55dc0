"""Prefect's or MLflow's server behind a guard, as `rm-opt up` starts it.

    python -P -m tasks.guarded_server NAME HOST:PORT SOCKET

SOCKET is an inherited file descriptor that listens there already: the port never was another program's in between.

Anyone who may post to Prefect runs code as its user, and a port on loopback is reached by every user of the machine and
by every web page in a browser on it. So a request must name the server by its own address (no other name that was made
to point here), must come from no other page, and must carry the password. Prefect checks the password by itself,
because its UI asks for it; MLflow's own login wants a user database, so the guard asks. Anyone who has the home's key
may ask the guard to prove that it has it, too, before a password is sent.
"""

import asyncio
import base64
import gc
import hmac
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from rmcore.core.files import exclusive
from rmcore.core.processes import die_with_parent
from rmcore.core.web import Denial, misaddressed, values_of
from tasks.database import DATABASE_VARIABLE, mlflow_address
from tasks.declared_deployments import OnlyDeclared, read_declared
from tasks.home import PROJECT_VARIABLE, default_artifact_root, default_tracking_uri, home
from tasks.local_services import EMBEDDED_PREFECT, MLFLOW_SERVER, PREFECT_SERVER
from tasks.mlflow_client import alone_with
from tasks.model_training import ModelTrainingFirst
from tasks.passwords import PROOF_PATH, TOKEN, Identity, identity

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATH = "/health"
"""Answers that the server lives, and nothing else; `rm-opt info` and clients ask it before they know more."""


class Guard:
    """An ASGI application that hands on only what may reach `app`.

    Args:
        app: what is guarded.
        address: `http://host:port` under which it is printed; the only one that it answers under.
        secret: password of HTTP's basic authentication, with any user name; None: `app` asks for it itself.
        known: what is proven to any client that asks; None: nothing.
    """

    def __init__(self, app: "ASGIApp", address: str, secret: str | None = None, known: Identity | None = None) -> None:
        self.app = app
        self.address = address
        self._secret = secret
        self._known = known

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one connection: by `app`, or with a denial."""
        if scope["type"] == "lifespan" or (denial := self._denial(scope)) is None:
            if self._known is not None and scope.get("path") == PROOF_PATH:
                await self._prove(self._known, scope, send)
                return
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": denial.reason})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            if denial.status == 401:
                headers.append((b"www-authenticate", b'Basic realm="rm-opt", charset="UTF-8"'))
            await send({"type": "http.response.start", "status": denial.status, "headers": headers})
            await send({"type": "http.response.body", "body": denial.reason.encode()})

    async def _prove(self, known: Identity, scope: "Scope", send: "Send") -> None:
        [question, *_] = [*parse_qs(scope["query_string"].decode("latin-1")).get("question", []), ""]
        place = self.address.removeprefix("http://")
        is_one = TOKEN.fullmatch(question) is not None
        said = (
            {"era": known.era, "proof": known.proof(place, question)} if is_one else {"detail": "question is no token"}
        )
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200 if is_one else 400, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    def _denial(self, scope: "Scope") -> Denial | None:
        headers = scope["headers"]
        denial = misaddressed(headers, self.address.removeprefix("http://").__eq__, self.address)
        if denial is not None:
            return denial
        authorization = values_of(headers, b"authorization")
        is_open = scope["path"] in (OPEN_PATH, PROOF_PATH)
        if self._secret is not None and not is_open and not self._is_secret(authorization):
            return Denial(401, "The password is missing or wrong. `rm-opt info` says where it is.")
        return None

    def _is_secret(self, authorization: list[str]) -> bool:
        scheme, _, credentials = "".join(authorization).partition(" ")
        try:
            secret = base64.b64decode(credentials, validate=True).rpartition(b":")[2]
        except ValueError:  # no base64, or not even ASCII
            return False
        return scheme.lower() == "basic" and hmac.compare_digest(secret, (self._secret or "").encode())


class AnyName:
    """Let the password of Prefect's log-in be given with any user name: its own field suggests `admin:pass`.

    Prefect compares the whole text with the one that it was started with, which is the password alone.

    Args:
        app: Prefect's.
        secret: the password.
    """

    def __init__(self, app: "ASGIApp", secret: str) -> None:
        self.app = app
        self._secret = secret.encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Hand a connection on, with the log-in as Prefect wants it."""
        headers = [
            (name, self._alone(value) if name == b"authorization" else value)
            for name, value in scope.get("headers", ())
        ]
        await self.app({**scope, "headers": headers} if headers else scope, receive, send)

    def _alone(self, value: bytes) -> bytes:
        scheme, _, credentials = value.partition(b" ")
        try:
            _, colon, secret = base64.b64decode(credentials, validate=True).rpartition(b":")
        except ValueError:
            return value
        is_ours = scheme.lower() == b"basic" and colon and hmac.compare_digest(secret, self._secret)
        return b"Basic " + base64.b64encode(self._secret) if is_ours else value


def migrate_prefect() -> None:
    """Make or update the tables of Prefect's database, one process at a time.

    Prefect's own lock is for the threads of a process, and each migration is a transaction of its own: of several
    servers that meet a fresh database at once, one makes what another has made, and dies.
    """
    from prefect.server.database import provide_database_interface

    with exclusive(Path(os.environ["PREFECT_HOME"]) / "prefect.db.lock"):
        asyncio.run(provide_database_interface().create_db())


def prefect_app(address: str) -> Guard:
    """Prefect's server, which runs what prefect.yaml declares only."""
    declared = read_declared(Path(os.environ[PROJECT_VARIABLE]))
    secret = os.environ["PREFECT_SERVER_API_AUTH_STRING"]
    return Guard(AnyName(OnlyDeclared(_prefect(), declared), secret), address, known=identity(home()))


def embedded_app(address: str) -> Guard:
    """Prefect's server of one run: no worker asks it."""
    return Guard(_prefect(), address)


def _prefect() -> "ASGIApp":
    """Prefect's own application; it finds its password in PREFECT_SERVER_API_AUTH_STRING."""
    os.environ["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"  # read at import
    from prefect.server.api.server import create_app

    migrate_prefect()
    return create_app(final=True)


def mlflow_app(address: str) -> Guard:
    """MLflow's server on the database of this home, or on PostgreSQL.

    On the home's own, artifacts are files that every process reads and writes by itself, as it does without a server.
    With PostgreSQL, machines may track here that do not see this one's files, so all artifacts go through the server:
    what `mlflow server --backend-store-uri … --serve-artifacts --artifacts-destination …` does in two processes.
    """
    from mlflow import server
    from mlflow.server.handlers import initialize_backend_stores

    shared = os.environ.get(DATABASE_VARIABLE)
    database, artifacts = default_tracking_uri(home()), default_artifact_root(home())
    if shared is not None:
        os.environ |= {server.SERVE_ARTIFACTS_ENV_VAR: "true", server.ARTIFACTS_DESTINATION_ENV_VAR: artifacts}
        database, artifacts = mlflow_address(shared), "mlflow-artifacts:/"
    os.environ |= {server.BACKEND_STORE_URI_ENV_VAR: database, server.ARTIFACT_ROOT_ENV_VAR: artifacts}
    with alone_with(database):
        initialize_backend_stores(database, database, artifacts)
    from mlflow.server.fastapi_app import app

    known = identity(home())
    return Guard(ModelTrainingFirst(app), address, known.password(MLFLOW_SERVER), known)


APPS: dict[str, Callable[[str], Guard]] = {
    PREFECT_SERVER: prefect_app,
    EMBEDDED_PREFECT: embedded_app,
    MLFLOW_SERVER: mlflow_app,
}


def main() -> None:
    """Serve until SIGTERM."""
    gc.set_threshold(100_000, 50, 50)  # nothing that imports make is garbage, and looking for it takes a tenth of them
    name, address, descriptor = sys.argv[1:]
    if name == EMBEDDED_PREFECT:
        die_with_parent(os.getppid())
    listener = socket.socket(fileno=int(descriptor))
    import uvicorn

    config = uvicorn.Config(APPS[name](f"http://{address}"), log_level="warning", access_log=False)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
