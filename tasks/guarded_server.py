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
"""

import asyncio
import base64
import gc
import hmac
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
from tasks.home import default_artifact_root, default_tracking_uri, home
from tasks.local_services import EMBEDDED_PREFECT, MLFLOW_SERVER, PREFECT_SERVER
from tasks.mlflow_client import alone_with
from tasks.passwords import PROOF_PATH, TOKEN, password, proof

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health", PROOF_PATH)
"""That the server lives, which `rm-opt info` asks, and that it is ours, which a worker asks before it logs in."""


class Guard:
    """An ASGI application that hands on only what may reach `app`.

    Args:
        app: what is guarded.
        address: `http://host:port` under which it is printed; the only one that it answers under.
        secret: password of HTTP's basic authentication, with any user name; the guard proves that it has it.
        app_asks: `app` asks for the password itself.
    """

    def __init__(self, app: "ASGIApp", address: str, secret: str, *, app_asks: bool = False) -> None:
        self.app = app
        self.address = address
        self._secret = secret
        self._app_asks = app_asks

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one connection: by `app`, or with a denial."""
        from starlette.responses import PlainTextResponse
        from starlette.websockets import WebSocketClose

        app = self.app
        if scope["type"] != "lifespan" and (denial := self._denial(scope)) is not None:
            login = {"www-authenticate": 'Basic realm="rm-opt", charset="UTF-8"'} if denial.status == 401 else {}
            is_socket = scope["type"] == "websocket"
            app = WebSocketClose(1008) if is_socket else PlainTextResponse(denial.reason, denial.status, login)
        elif scope["type"] == "http" and scope["path"] == PROOF_PATH:
            app = self._proof(scope)
        await app(scope, receive, send)

    def _proof(self, scope: "Scope") -> "ASGIApp":
        from starlette.requests import HTTPConnection
        from starlette.responses import PlainTextResponse

        question = HTTPConnection(scope).query_params.get("question", "")
        if TOKEN.fullmatch(question) is None:
            return PlainTextResponse("The question is no token.", 400)
        return PlainTextResponse(proof(self._secret, self.address.removeprefix("http://"), question))

    def _denial(self, scope: "Scope") -> Denial | None:
        headers = scope["headers"]
        denial = misaddressed(headers, self.address.removeprefix("http://").__eq__, self.address)
        if denial is not None or self._app_asks or scope["path"] in OPEN_PATHS:
            return denial
        scheme, _, credentials = "".join(values_of(headers, b"authorization")).partition(" ")
        try:
            given = base64.b64decode(credentials, validate=True).rpartition(b":")[2]
        except ValueError:  # no base64, or not even ASCII
            given = b""
        if scheme.lower() == "basic" and hmac.compare_digest(given, self._secret.encode()):
            return None
        return Denial(401, "The password is missing or wrong. `rm-opt info` says where it is.")


def migrate_prefect() -> None:
    """Make or update the tables of Prefect's database, one process at a time.

    Prefect's own lock is for the threads of a process, and each migration is a transaction of its own: of several
    servers that meet a fresh database at once, one makes what another has made, and dies.
    """
    from prefect.server.database import provide_database_interface

    with exclusive(Path(os.environ["PREFECT_HOME"]) / "prefect.db.lock"):
        asyncio.run(provide_database_interface().create_db())


def prefect_app(address: str) -> Guard:
    """Prefect's own application, which asks for the password that is in PREFECT_SERVER_API_AUTH_STRING."""
    os.environ["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"  # read at import
    from prefect.server.api.server import create_app

    migrate_prefect()
    return Guard(create_app(final=True), address, os.environ["PREFECT_SERVER_API_AUTH_STRING"], app_asks=True)


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

    return Guard(app, address, password(home()))


APPS: dict[str, Callable[[str], Guard]] = {
    PREFECT_SERVER: prefect_app,
    EMBEDDED_PREFECT: prefect_app,
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
