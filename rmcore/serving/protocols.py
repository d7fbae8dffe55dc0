"""The reward server under other trainers' protocols, translated to a ScoringRequest and off unless it is named.

    openrlhf   POST /get_reward: `query` and `prompts` in, `rewards` out. Read from OpenRLHF 0.11 (`utils/agent.py`,
               `_fetch_rewards_via_http`): a query is a prompt and its response as the policy's tokens read, special
               ones included; the prompt is the text that the policy was given.
    slime      POST /slime: `prompt` and `response` in, a number out. Read from slime 0.3.1 and miles 0.1
               (`rollout/rm_hub/__init__.py`, `remote_rm`): the prompt is a message list, a user's text, or the rendered
               text that ends where the answer begins.

Login, limits and refusals are those of POST /score. Labels are for rules; no reward model reads them.
"""

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rmcore.core.errors import RequestError, RmcoreError
from rmcore.core.printing import printable
from rmcore.data.rendering import Renderer
from rmcore.serving.rendered import Reading, Rendered
from rmcore.serving.types import MAX_ROWS, ScoringRequest, ScoringResponse, first_error

PROTOCOLS = ("openrlhf", "slime")
MAX_KINDS = 100
"""Most messages of the server's log: some quote what a client has sent."""


class Queries(BaseModel):
    """OpenRLHF's texts of prompt and response, and the prompts alone."""

    model_config = ConfigDict(frozen=True)

    query: tuple[str, ...] = Field(max_length=MAX_ROWS)
    prompts: tuple[Any, ...] | None = None

    def readings(self, rendered: Rendered) -> list[Reading]:
        """The inputs in their order: where the prompt is a user's text, what follows it is the response.

        Raises:
            RequestError: there are as many prompts as queries or none, and these are others.
        """
        prompts = self.prompts or [None] * len(self.query)
        if len(prompts) != len(self.query):
            raise RequestError(
                f"prompts: {len(prompts)} for {len(self.query)} queries; send one for each, or none.", field="prompts"
            )
        return [
            rendered.pair(prompt, query.removeprefix(prompt))
            if isinstance(prompt, str) and prompt and query.startswith(prompt)
            else rendered.text(query)
            for query, prompt in zip(self.query, prompts, strict=True)
        ]


class Sample(BaseModel):
    """A prompt of slime's and what the policy answered."""

    model_config = ConfigDict(frozen=True)

    prompt: str | tuple[dict[str, Any], ...]
    response: str

    def readings(self, rendered: Rendered) -> list[Reading]:
        """The one input."""
        return [rendered.pair(self.prompt, self.response)]


class OtherTrainers:
    """Scores what a protocol reads, and tells the server's log what other trainers' clients would not show.

    Args:
        renderer: of the checkpoint.
        read: gives the body of a request as JSON of a kind.
        score: gives rewards as POST /score does.
    """

    def __init__(
        self,
        renderer: Renderer,
        read: Callable[[Request, type[Any]], Awaitable[Any]],
        score: Callable[[ScoringRequest], Awaitable[ScoringResponse]],
    ) -> None:
        self._rendered, self._read, self._rewards = Rendered(renderer), read, score
        self._told = set[str]()

    def route(self, protocol: str) -> tuple[str, Callable[[Request], Awaitable[Any]]]:
        """The path of a protocol, to which requests are posted, and what answers them."""
        return {"openrlhf": ("/get_reward", self._get_reward), "slime": ("/slime", self._slime)}[protocol]

    async def _get_reward(self, request: Request) -> dict[str, Any]:
        rewards = await self._score(request, Queries)  # `scores` are the same in its own server
        return {"rewards": rewards, "scores": rewards, "extra_logs": {}}

    async def _slime(self, request: Request) -> float:
        return (await self._score(request, Sample))[0]

    async def _score(self, request: Request, kind: type[Queries | Sample]) -> list[float]:
        """Score a request, and log the warnings about it, or why it is refused."""
        try:
            body = await self._read(request, kind)
            readings = await anyio.to_thread.run_sync(body.readings, self._rendered)
            answer = await self._rewards(_asked(readings))
        except RmcoreError as error:
            self._tell(request, f"refused: {error}")
            raise
        for reading in readings:
            for warning in reading.warnings:
                self._tell(request, warning)
        return list(answer.rewards)

    def _tell(self, request: Request, message: str) -> None:
        """Log a message, each kind of them once: what differs in numbers is one kind."""
        shown = printable(message)  # it may quote what a client has sent
        kind = re.sub(r"\d+", "#", f"{request.url.path}: {shown}")
        if kind not in self._told and len(self._told) < MAX_KINDS:
            self._told.add(kind)
            print(f"warning: {request.url.path}: {shown} (others of this kind are not logged)", file=sys.stderr)


def _asked(readings: Sequence[Reading]) -> ScoringRequest:
    try:
        return ScoringRequest.from_list([one.given for one in readings])
    except ValidationError as error:
        named, why = first_error(error)
        raise RequestError(f"{named}: {why}.", field=named) from None
