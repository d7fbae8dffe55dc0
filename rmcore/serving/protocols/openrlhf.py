"""OpenRLHF's POST /get_reward: `query`, `prompts` and `labels` in, `rewards` out.

Read from OpenRLHF 0.11 (`utils/agent.py`, `_fetch_rewards_via_http`; `cli/serve_rm.py`): a query is a prompt and its
response as the policy's tokens read, special ones included; the prompt is the text that the policy was given.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from rmcore.core.errors import RequestError
from rmcore.serving.protocols.desk import Desk, Foreign, Route
from rmcore.serving.protocols.rendered import Reading, Rendered


class Queries(Foreign):
    """Texts of prompt and response, and the prompts alone."""

    query: tuple[str, ...]
    prompts: tuple[Any, ...] | None = None
    labels: tuple[Any, ...] | None = None
    """For rules; no reward model reads them."""

    def readings(self, rendered: Rendered) -> Sequence[Reading]:
        """The inputs in their order: where the prompt is a user's text, what follows it is the response."""
        prompts = self.prompts or [None] * len(self.query)
        return [
            rendered.pair(prompt, query.removeprefix(prompt))
            if isinstance(prompt, str) and prompt and query.startswith(prompt)
            else rendered.text(query)
            for query, prompt in zip(self.query, prompts, strict=True)
        ]


def routes(desk: Desk) -> list[Route]:
    """The one route of OpenRLHF's own reward server."""
    return [("POST", "/get_reward", partial(_rewards, desk))]


async def _rewards(desk: Desk, request: Request) -> Response:
    async with desk.read(request, Queries) as body:
        if body.prompts and len(body.prompts) != len(body.query):
            raise RequestError(
                f"prompts: {len(body.prompts)} for {len(body.query)} queries; send one for each, or none.",
                field="prompts",
            )
        answer, warnings, headers = await desk.score(len(body.query), partial(body.readings, desk.rendered))
    warnings = [*body.unread(), *warnings]
    rewards = list(answer.rewards)  # `scores` are the same in its own server
    content = {"rewards": rewards, "scores": rewards, "extra_logs": {}, "warnings": warnings}
    return desk.answer(request, content, headers, warnings)
