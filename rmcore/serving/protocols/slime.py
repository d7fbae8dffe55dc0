"""slime's remote reward, POST /slime: a sample's `prompt`, `response` and `label` in, a number out; miles' is the same.

Read from slime 0.3.1 and miles 0.1 (`rollout/rm_hub/__init__.py`, `remote_rm`). The prompt is a message list, a user's
text, or with `--apply-chat-template` the rendered text that ends where the answer begins.
"""

from functools import partial
from typing import Any

from fastapi import Request, Response

from rmcore.serving.protocols.desk import Desk, Foreign, Route


class Sample(Foreign):
    """A prompt and what the policy answered."""

    prompt: str | tuple[dict[str, Any], ...]
    response: str
    label: Any = None
    """For rules; no reward model reads it."""


def routes(desk: Desk) -> list[Route]:
    """The one route; its warnings are in a header, because the whole body is the number."""
    return [("POST", "/slime", partial(_reward, desk))]


async def _reward(desk: Desk, request: Request) -> Response:
    async with desk.read(request, Sample) as body:
        answer, warnings, headers = await desk.score(1, lambda: [desk.rendered.pair(body.prompt, body.response)])
    return desk.answer(request, answer.rewards[0], headers, [*body.unread(), *warnings])
