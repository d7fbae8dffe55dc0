"""MLflow's pages for model training, rather than those for language-model applications.

MLflow's page shows an experiment in one of two modes. What decides is read in its own code (3.17): the parameter
`workflowType` of the address, else what this browser chose last (its local storage), else language-model applications,
where an experiment of ours shows "Traces 0". Nothing that a run or an experiment stores is asked; older versions asked
a tag. So our addresses carry the parameter, our experiments the tag, and MLflow's page, as `rm-opt up` serves it,
chooses model training in a browser that has not chosen yet; its switch at the top of the left bar works as ever.
"""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS_PARAMETER = "workflowType=machine_learning"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
RUN_COLOUR = "mlflow.runColor"
"""Tag with the colour that MLflow's tables and charts give a run, `#rrggbb`; without it, one of a hash of its id."""
DEFAULTS = {"mlflow.workflowType_v1": "machine_learning", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True}
"""Settings that MLflow's page keeps in the browser: the mode, and that its assistant need not open by itself."""
CHOOSE = (
    f"<script>try{{for(const [name,value] of Object.entries({json.dumps(DEFAULTS)}))"
    "localStorage.getItem(name)===null&&localStorage.setItem(name,JSON.stringify(value))}catch(refused){}</script>"
).encode()
"""Runs before MLflow's own code; what was chosen stays, and a browser that keeps nothing is left alone."""
_HEAD = b"<head>"
_CONDITIONS = (b"if-none-match", b"if-modified-since")


class ModelTrainingFirst:
    """An ASGI application: MLflow's `app`, whose start page chooses model training where nothing was chosen."""

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
