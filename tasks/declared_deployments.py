"""Prefect's server runs what prefect.yaml declares, and nothing that a request brings.

A deployment says which code a worker runs: steps before the flow, which may be a shell's, the flow's place, variables
of the process. Anyone who may change one runs code as the worker's user. So those parts must be as declared, in
whatever request they come, and work pools have our template, which lets a run name neither command nor environment nor
folder.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOB_TEMPLATE = {
    # Names neither command nor environment nor folder, so those are the worker's; and no run may bring values of its
    # own: with Prefect's template they are the choice of any user who may create a run.
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
NEVER = ("job_variables", "infra_overrides", "storage_document_id", "infrastructure_document_id")
FIELDS = ("entrypoint", "pull_steps", "path", "base_job_template", *NEVER)
MOST_BYTES = 2**26
"""The most of one request: it is read before the password is checked. Prefect takes parameters of half a MB at most."""
FREE = ("parameters", "parameter_openapi_schema")
"""Parts of a request whose contents are a flow's own, under names that it chooses."""
FILE = "flows/prefect.yaml"
"""In the folder that holds the packages."""


class Declared(NamedTuple):
    """The code that a project's prefect.yaml lets a worker run."""

    entrypoints: frozenset[str]
    pull_steps: Any

    def refusal(self, sent: Any, fields: tuple[str, ...] = FIELDS) -> str | None:
        """Why the body of a request is refused; None: it brings no code of its own."""
        if isinstance(sent, list):
            return next(filter(None, (self.refusal(one, fields) for one in sent)), None)
        if not isinstance(sent, dict):
            return None
        for name, value in sent.items():
            if name in fields and value and not self._allows(name, value):
                return f"{name} is not as {FILE} declares it: a worker runs what is declared there only."
            if name not in FREE and name not in fields and (found := self.refusal(value, fields)):
                return found
        return None

    def _allows(self, name: str, value: Any) -> bool:
        if name == "entrypoint":
            return value in self.entrypoints if isinstance(value, str) else False
        expected = {"pull_steps": self.pull_steps, "path": ".", "base_job_template": JOB_TEMPLATE}
        return name in expected and value == expected[name]


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
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        body = b""
        ends = False
        while not ends:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            ends = not message.get("more_body", False) or len(body) > MOST_BYTES
        if reason := self._reason(body, scope["path"]):
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"detail": reason}).encode()})
            return
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> "Message":
            return next(replayed, None) or await receive()

        await self.app(scope, again, send)

    def _reason(self, body: bytes, place: str) -> str | None:
        if len(body) > MOST_BYTES:
            return f"the request has more than {MOST_BYTES} bytes."
        # Most bodies name none of the fields. One could be hidden by an escape, or by another encoding of JSON.
        if not any(name.encode() in body for name in FIELDS) and b"\\u" not in body and b"\0" not in body:
            return None
        try:
            # In requests about anything else, a path is not where code is.
            fields = FIELDS if "deployments" in place else tuple(name for name in FIELDS if name != "path")
            return self.declared.refusal(json.loads(body), fields)
        except RecursionError:
            return "the request is nested too deeply."
        except ValueError:  # no JSON, which Prefect reads by the same function
            return None
