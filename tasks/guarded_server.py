"""Prefect's or MLflow's server behind a guard, as `rm-opt up` starts it.

    python -P -m tasks.guarded_server NAME HOST:PORT SOCKET [PARENT]

It ends with the process PARENT. SOCKET is an inherited file descriptor that listens there already: the port never was
another program's in between, as it is with `prefect server start` and `mlflow server`, which open theirs by themselves.

Anyone who may post to Prefect runs code as its user, and a port on loopback is reached by every user of the machine and
by every web page in a browser on it. So a request must name the server by its own address, come from no other page, and
carry the password. What the two programs (Prefect 3.8, MLflow 3.17) check by themselves is not enough:

            their own setting                 what it lets through
password    Prefect: auth string              nothing: it is used
            MLflow: `--app-name basic-auth`   server-info; not used: a request takes 392 ms in place of 10, as it hashes
                                              the password, and that of the first start stays in a database of users
Host        Prefect: none                     every name, web sockets too
            MLflow: `--allowed-hosts`         /health and /version
Origin      Prefect: CORS, CSRF               every page, web sockets too; with CSRF those that read
            MLflow: `--cors-allowed-origins`  reading by every page; changes, and answers that it may read, to each page
                                              of any port of this machine, where every user may have a server

Anyone who has the home's key may ask the guard to prove that it has it, too, before a password is sent.
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

from rmcore.core.files import exclusive
from rmcore.core.processes import die_with_parent
from rmcore.core.web import Denial, misaddressed, values_of
from tasks.database import DATABASE_VARIABLE, mlflow_address
from tasks.declared_deployments import OnlyDeclared, read_declared
from tasks.home import PROJECT_VARIABLE, default_artifact_root, default_tracking_uri, home
from tasks.local_services import EMBEDDED_PREFECT, MLFLOW_SERVER, PREFECT_SERVER
from tasks.mlflow_client import alone_with
from tasks.passwords import PROOF_PATH, TOKEN, Identity, identity

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULTS = {"mlflow.workflowType_v1": "machine_learning", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True}
"""Settings that MLflow's page keeps in the browser: the mode, and that its assistant need not open by itself."""
CHOOSE = (
    f"<script>try{{for(const [name,value] of Object.entries({json.dumps(DEFAULTS)}))"
    "localStorage.getItem(name)===null&&localStorage.setItem(name,JSON.stringify(value))}catch(refused){}</script>"
).encode()
"""Runs before MLflow's own code; what was chosen stays, and a browser that keeps nothing is left alone."""
_HEAD = b"<head>"
_CONDITIONS = (b"if-none-match", b"if-modified-since")
OPEN_PATHS = ("/health", PROOF_PATH)
"""That the server lives, and that it is ours; `rm-opt info` and clients ask before they know more."""


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
        from starlette.responses import PlainTextResponse
        from starlette.websockets import WebSocketClose

        app = self.app
        if scope["type"] != "lifespan" and (denial := self._denial(scope)) is not None:
            login = {"www-authenticate": 'Basic realm="rm-opt", charset="UTF-8"'} if denial.status == 401 else {}
            is_socket = scope["type"] == "websocket"
            app = WebSocketClose(1008) if is_socket else PlainTextResponse(denial.reason, denial.status, login)
        elif self._known is not None and scope.get("path") == PROOF_PATH:
            app = self._proof(self._known, scope)
        await app(scope, receive, send)

    def _proof(self, known: Identity, scope: "Scope") -> "ASGIApp":
        from starlette.requests import HTTPConnection
        from starlette.responses import JSONResponse

        question = HTTPConnection(scope).query_params.get("question", "")
        if TOKEN.fullmatch(question) is None:
            return JSONResponse({"detail": "question is no token"}, 400)
        return JSONResponse({"era": known.era, "proof": known.proof(self.address.removeprefix("http://"), question)})

    def _denial(self, scope: "Scope") -> Denial | None:
        headers = scope["headers"]
        denial = misaddressed(headers, self.address.removeprefix("http://").__eq__, self.address)
        if denial is not None or self._secret is None or scope["path"] in OPEN_PATHS:
            return denial
        scheme, _, credentials = "".join(values_of(headers, b"authorization")).partition(" ")
        try:
            given = base64.b64decode(credentials, validate=True).rpartition(b":")[2]
        except ValueError:  # no base64, or not even ASCII
            given = b""
        if scheme.lower() == "basic" and hmac.compare_digest(given, self._secret.encode()):
            return None
        return Denial(401, "The password is missing or wrong. `rm-opt info` says where it is.")


class ModelTrainingFirst:
    """An ASGI application: MLflow's `app`, whose start page chooses model training where nothing was chosen.

    MLflow's page shows an experiment in one of two modes. What decides is read in its own code (3.17): the parameter
    `workflowType` of the address (`comparison_view.ADDRESS_PARAMETER`), else what this browser chose last, in its local
    storage, else language-model applications, where an experiment of ours shows "Traces 0". So a script before MLflow's
    own chooses model training where nothing is chosen yet; the switch of the page works as ever.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        # A page that the browser kept from before would be taken for the same one.
        scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _CONDITIONS]}
        answer: list[Message] = []

        async def keep(message: "Message") -> None:
            answer.append(message)

        await self.app(scope, receive, keep)
        start, *parts = answer
        page = b"".join(part.get("body", b"") for part in parts).replace(_HEAD, _HEAD + CHOOSE, 1)
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(page)).encode())]})
        await send({"type": "http.response.body", "body": page})


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
    return Guard(OnlyDeclared(_prefect(), declared), address, known=identity(home()))


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
    name, address, descriptor, *parent = sys.argv[1:]
    if parent:
        die_with_parent(int(parent[0]))
    gc.set_threshold(100_000, 50, 50)  # nothing that imports make is garbage, and looking for it takes a tenth of them
    listener = socket.socket(fileno=int(descriptor))
    import uvicorn

    config = uvicorn.Config(APPS[name](f"http://{address}"), log_level="warning", access_log=False)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
