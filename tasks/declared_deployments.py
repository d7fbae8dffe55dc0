"""Prefect's server runs what prefect.yaml declares, and nothing that a request brings.

A deployment says which code a worker runs: steps before the flow, which may be a shell's, the flow's place, variables
of the process. Anyone who may change one runs code as the worker's user, and Prefect knows no right but the password.
So those parts of a deployment must be as declared, and work pools have our template. What a run brings of its own needs
no look: the template has no place for it, so that Prefect itself refuses it, and a worker would not read it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tasks.home import PYTHON_VARIABLE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOB_TEMPLATE = {
    # Names neither environment nor folder, so those are the worker's; and no run may bring values of its own: with
    # Prefect's template they are the choice of any user who may create a run. Where no command is named, Prefect (3.8)
    # starts a program before its engine, which imports all of Prefect once more.
    "job_configuration": {"command": f"'{{{{ ${PYTHON_VARIABLE} }}}}' -m prefect.engine", "stream_output": True},
    # Prefect wants the variable declared, and its worker reads it from its own environment, never from a run's values.
    "variables": {
        "type": "object",
        "properties": {f"${PYTHON_VARIABLE}": {"const": ""}},
        "additionalProperties": False,
    },
}
FIELDS = ("entrypoint", "pull_steps", "path", "base_job_template", "storage_document_id", "infrastructure_document_id")
PLACES = ("/api/deployments/", "/api/work_pools/")
"""Begin of the paths where Prefect reads them, each at the top of the body."""
MOST_BYTES = 2**26
"""The most of one request: it is read before the password is checked. Prefect takes parameters of half a MB at most."""
FILE = "flows/prefect.yaml"
"""In the folder that holds the packages."""


class Declared(NamedTuple):
    """The code that a project's prefect.yaml lets a worker run."""

    entrypoints: frozenset[str]
    pull_steps: Any

    def foreign(self, sent: Any) -> list[str]:
        """The fields of a deployment or a work pool that bring other code."""
        expected = {"pull_steps": self.pull_steps, "path": ".", "base_job_template": JOB_TEMPLATE}
        given = sent if isinstance(sent, dict) else {}
        # An empty template is no gap: a worker fills it with Prefect's own.
        found = {name: given[name] for name in FIELDS if given.get(name) not in (None, "", [])}
        if isinstance(entrypoint := found.get("entrypoint"), str) and entrypoint in self.entrypoints:
            del found["entrypoint"]
        return [name for name, value in found.items() if name not in expected or value != expected[name]]


def read_declared(project: Path) -> Declared:
    """Read the prefect.yaml of a folder that holds the packages."""
    found = yaml.safe_load((project / FILE).read_text(encoding="utf-8"))
    return Declared(frozenset(one["entrypoint"] for one in found["deployments"]), found["pull"])


class OnlyDeclared:
    """An ASGI application: Prefect's `app`, without requests that would have a worker run other code."""

    def __init__(self, app: "ASGIApp", declared: Declared) -> None:
        self.app = app
        self.declared = declared

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one connection: by `app`, or with 403 and the reason."""
        if scope["type"] != "http" or not scope["path"].startswith(PLACES):
            await self.app(scope, receive, send)
            return
        body, ends = b"", False
        while not ends:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            ends = not message.get("more_body", False) or len(body) > MOST_BYTES
        if reason := self._reason(body):
            from starlette.responses import JSONResponse

            await JSONResponse({"detail": reason}, 403)(scope, receive, send)
            return
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> "Message":
            return next(replayed, None) or await receive()

        await self.app(scope, again, send)

    def _reason(self, body: bytes) -> str | None:
        if len(body) > MOST_BYTES:
            return f"the request has more than {MOST_BYTES} bytes."
        try:
            foreign = self.declared.foreign(json.loads(body))
        except RecursionError:
            return "the request is nested too deeply."
        except ValueError:  # no JSON, which Prefect reads by the same function
            return None
        if not foreign:
            return None
        return f"{', '.join(foreign)} is not as {FILE} declares it: a worker runs what is declared there only."
