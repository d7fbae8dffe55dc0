"""The reward server as a protocol sees it: bodies within its limits, rewards of one version, the form of an answer."""

import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import anyio
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from rmcore.core.errors import RequestError, RmcoreError
from rmcore.core.printing import printable
from rmcore.data.rendering import Renderer
from rmcore.serving.messages import first_error
from rmcore.serving.protocols.rendered import Reading, Rendered
from rmcore.serving.served import ServedModel
from rmcore.serving.types import MAX_ROWS, ScoringRequest, ScoringResponse

Body = TypeVar("Body", bound=BaseModel)
Route = tuple[str, str, Callable[[Request], Awaitable[Response]]]
VERSION_HEADER, DIGEST_HEADER, WARNINGS_HEADER = "X-Weight-Version", "X-Checkpoint-Digest", "X-Reward-Warnings"
MAX_WARNINGS = 20
"""Most warnings of one answer: proxies and clients bound headers, often to 8 KiB."""
MAX_KINDS = 100
"""Most messages of the server's log: some quote what a client has sent."""


class Scorer(Protocol):
    """The HTTP app of `rmcore.serving.http_app`, as far as a protocol needs it."""

    served: ServedModel
    renderer: Renderer

    def read(self, request: Request, kind: type[Body]) -> AbstractAsyncContextManager[Body]:
        """The body of a request; its bytes count as pending inside the block."""

    async def score(self, asked: ScoringRequest) -> ScoringResponse:
        """Rewards as POST /score gives them."""


class Foreign(BaseModel):
    """A body of another program's request: what is not read of it is kept, to be said."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    def unread(self, known: Set[str] = frozenset()) -> list[str]:
        """A warning about the fields that are neither read nor known to change nothing."""
        extra = sorted((self.model_extra or {}).keys() - known)
        return [f"not read: {', '.join(extra)[:200]}"] if extra else []


class Desk:
    """Scores what a protocol reads, and tells the server's log what other trainers' clients throw away.

    Args:
        app: the HTTP app.
    """

    def __init__(self, app: Scorer) -> None:
        self._app = app
        self.served = app.served
        self.rendered = Rendered(app.renderer)
        self.max_seq_len = app.renderer.rendering.max_seq_len
        self._told = set[str]()

    @asynccontextmanager
    async def read(self, request: Request, kind: type[Body]) -> AsyncIterator[Body]:
        """The body of a request; why one is refused is logged, because such clients show no more than the status."""
        try:
            async with self._app.read(request, kind) as body:
                yield body
        except RmcoreError as error:
            self._tell(request, f"refused: {error}")
            raise

    async def score(
        self, num_inputs: int, read: Callable[[], Sequence[Reading]], **settings: Any
    ) -> tuple[ScoringResponse, list[str], dict[str, str]]:
        """Score what `read` returns for the inputs of a request in a thread, all of it by one version of the weights.

        Returns:
            The answer of POST /score, the warnings about the inputs, and the headers of weights and warnings.

        Raises:
            RmcoreError: as POST /score.
        """
        if num_inputs > MAX_ROWS:
            _asked(("x",) * num_inputs, {})  # raises before they are read, which is what takes time
        readings = await anyio.to_thread.run_sync(read)
        answer = await self._app.score(_asked([one.given for one in readings], settings))
        warnings = _gathered(readings)
        return answer, warnings, {VERSION_HEADER: str(answer.weight_version), DIGEST_HEADER: answer.checkpoint_digest}

    def answer(self, request: Request, content: Any, headers: dict[str, str], warnings: Iterable[str]) -> Response:
        """A JSON answer; its warnings are in a header, too, and each kind is once in the server's log."""
        told = list(warnings)
        for one in told:
            self._tell(request, one)
        if told:
            headers = headers | {WARNINGS_HEADER: json.dumps(told)}  # ASCII, as a header has to be
        return Response(json.dumps(content, allow_nan=False), headers=headers, media_type="application/json")

    def _tell(self, request: Request, message: str) -> None:
        """Log a message, each kind of them once: what differs in numbers is one kind."""
        shown = printable(message)  # it may quote what a client has sent
        kind = re.sub(r"\d+", "#", f"{request.url.path}: {shown}")
        if kind not in self._told and len(self._told) < MAX_KINDS:
            self._told.add(kind)
            print(f"warning: {request.url.path}: {shown} (others of this kind are not logged)", file=sys.stderr)


def _asked(inputs: Sequence[Any], settings: dict[str, Any]) -> ScoringRequest:
    try:
        return ScoringRequest.from_list(inputs, **settings)
    except ValidationError as error:
        named, why = first_error(error)
        raise RequestError(f"{named}: {why}.", field=named) from None


def _gathered(readings: Sequence[Reading]) -> list[str]:
    """Each warning once, with the first of the inputs that it is about."""
    places: dict[str, list[int]] = {}
    for index, one in enumerate(readings):
        for warning in one.warnings:
            places.setdefault(warning, []).append(index)
    told = [f"{_words(found)}: {warning}" for warning, found in places.items()]
    left = len(told) - MAX_WARNINGS
    return told if left <= 0 else [*told[:MAX_WARNINGS], f"and {left} more kinds"]


def _words(found: Sequence[int]) -> str:
    return f"inputs.{found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
