"""Prefect's or MLflow's server, or the start page, behind a guard, as `rm-opt up` starts it.

    python -P -m tasks.guarded_server NAME HOST:PORT [SOCKET]

SOCKET is an inherited file descriptor that listens there already; such a server ends with its parent.

Whoever may post to Prefect runs code as its user, and a port on loopback is reached by every user of the machine and by
every web page in a browser on it. So a request must name the server by its own address (no other name that was made to
point here), must come from no other page, and must carry the password. Prefect checks the password by itself, because
its UI asks for it; MLflow's own login wants a user database, so the guard asks.
"""

import asyncio
import base64
import hmac
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rmcore.core.files import exclusive
from rmcore.core.processes import die_with_parent
from tasks.database import DATABASE_VARIABLE, mlflow_address
from tasks.home import default_artifact_root, default_tracking_uri, home
from tasks.local_services import EMBEDDED_PREFECT, MLFLOW_SERVER, PREFECT_SERVER, START_PAGE, password
from tasks.mlflow_client import alone_with
from tasks.model_training import ModelTrainingFirst

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATH = "/health"
"""Answers that the server lives, and nothing else; `rm-opt status` and clients ask it before they know more."""


class Denial(NamedTuple):
    """Why a request goes no further."""

    status: int
    reason: str


class Guard:
    """An ASGI application that hands on only what may reach `app`.

    Args:
        app: what is guarded.
        address: `http://host:port` under which it is printed; the only one that it answers under.
        secret: password of HTTP's basic authentication, with any user name; None: `app` asks for it itself.
    """

    def __init__(self, app: "ASGIApp", address: str, secret: str | None = None) -> None:
        self.app = app
        self.address = address
        self._secret = secret

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one connection: by `app`, or with a denial."""
        if scope["type"] == "lifespan" or (denial := self._denial(scope)) is None:
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

    def _denial(self, scope: "Scope") -> Denial | None:
        def given(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in scope["headers"] if key == name]

        if given(b"host") != [self.address.removeprefix("http://")]:
            return Denial(421, f"This server answers as {self.address} only.")
        if given(b"origin") not in ([], [self.address]):
            return Denial(403, "Pages of other addresses may not use this server.")
        if self._secret is not None and scope["path"] != OPEN_PATH and not self._is_secret(given(b"authorization")):
            return Denial(401, "The password is missing or wrong. `rm-opt status` says where it is.")
        return None

    def _is_secret(self, authorization: list[str]) -> bool:
        scheme, _, credentials = "".join(authorization).partition(" ")
        try:
            secret = base64.b64decode(credentials, validate=True).rpartition(b":")[2]
        except ValueError:  # no base64, or not even ASCII
            return False
        return scheme.lower() == "basic" and hmac.compare_digest(secret, (self._secret or "").encode())


def migrate_prefect() -> None:
    """Make or update the tables of Prefect's database, one process at a time.

    Prefect's own lock is for the threads of a process, and each migration is a transaction of its own: of several
    servers that meet a fresh database at once, one makes what another has made, and dies.
    """
    from prefect.server.database import provide_database_interface

    with exclusive(Path(os.environ["PREFECT_HOME"]) / "prefect.db.lock"):
        asyncio.run(provide_database_interface().create_db())


def prefect_app(address: str) -> Guard:
    """Prefect's server; it finds its password in PREFECT_SERVER_API_AUTH_STRING."""
    os.environ["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"  # read at import
    from prefect.server.api.server import create_app

    migrate_prefect()
    return Guard(create_app(final=True), address)


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

    return Guard(ModelTrainingFirst(app), address, password(home()))


def start_app(address: str) -> Guard:
    """The start page, and the reports of this home."""
    from tasks.start_page import start_page_app

    return Guard(start_page_app(home()), address, password(home()))


APPS: dict[str, Callable[[str], Guard]] = {
    START_PAGE: start_app,
    PREFECT_SERVER: prefect_app,
    EMBEDDED_PREFECT: prefect_app,
    MLFLOW_SERVER: mlflow_app,
}


def main() -> None:
    """Serve until SIGTERM."""
    name, address = sys.argv[1:3]
    host, _, port = address.rpartition(":")
    sockets = None
    if len(sys.argv) > 3:
        die_with_parent(os.getppid())
        sockets = [socket.socket(fileno=int(sys.argv[3]))]
    import uvicorn

    app = APPS[name](f"http://{address}")
    config = uvicorn.Config(app, host=host, port=int(port), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets)


if __name__ == "__main__":
    main()
