"""The HTTP side of a reward server: rendering, limits, tokens, and nothing of vLLM's own routes.

- POST /score: rewards of texts, messages, token ids or prompt/response pairs
- GET /health: what this is and whether it answers now (200 or 503)
- GET /version: which weights are served
- GET /metrics: vLLM's own, as Prometheus text
- POST /weights: serve other weights (see `rmcore.serving.weight_sync`)
- the routes of other trainers' protocols that are switched on (see `rmcore.serving.protocols`)
"""

import asyncio
import base64
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from rmcore.core.errors import ConfigError, DataError, NotReadyError, RequestError, RmcoreError
from rmcore.data.control_tokens import texts_of
from rmcore.data.pair import Message, Prompt, as_answer, plain_prompt
from rmcore.data.readers.fields import RowRejected
from rmcore.data.readers.turns import framed
from rmcore.data.rendering import Renderer, TokenizedSide
from rmcore.serving.door import JSON, LOGGED_IN, Door, Refused, refusal_response
from rmcore.serving.protocols import PROTOCOLS, OtherTrainers
from rmcore.serving.served import ServedModel
from rmcore.serving.token_file import checked_token
from rmcore.serving.types import (
    ChatMessage,
    Dialogue,
    Health,
    PoolingType,
    PromptResponse,
    Refusal,
    ScoringInput,
    ScoringRequest,
    ScoringResponse,
    VersionInfo,
    WeightUpdate,
    first_error,
)

CHARACTERS_PER_TOKEN = 128
"""The longest token of the large vocabularies (spaces, in those of GPT-4, Llama 3 and Qwen). Text has four or five."""
SHORTEST_BOUND = 2**16
"""Characters that an input may always have: a tenth of a second of a tokenizer."""
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class HttpSettings:
    """Limits of the HTTP app.

    token: every route wants it as `Authorization: Bearer`; made up where none is given.
    names: hosts that requests may name besides localhost and addresses of the server (`rmcore.serving.door`).
    max_body_bytes: of one request.
    max_reading_bytes: of all bodies that are being read; beyond it requests are refused as busy.
    max_pending_rows: rows under way or waiting; beyond it requests are refused as busy.
    body_seconds: from the end of a request's headers to the end of its body.
    protocols: other trainers' protocols that are answered, too, by their names in `PROTOCOLS`. With one, the token may
        also come as the password of `Authorization: Basic`, because their clients send what their address has.
    """

    token: str = field(default_factory=secrets.token_urlsafe, repr=False)
    names: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_reading_bytes: int = 64 * 2**20
    max_pending_rows: int = 8192
    body_seconds: float = 60.0
    protocols: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_token(self.token)
        if unknown := set(self.protocols) - set(PROTOCOLS):
            raise ConfigError(
                f"protocols={','.join(self.protocols)}: the server does not speak {', '.join(sorted(unknown))}; take "
                f"any of {', '.join(PROTOCOLS)}, with commas between."
            )


class RewardApp:
    """Answers requests for one served model.

    Args:
        served: the model.
        renderer: turns text into token ids as the checkpoint was trained.
        pooling: which token its head reads.
        vocab_size: token ids lie below it.
        settings: limits.
    """

    def __init__(
        self, served: ServedModel, renderer: Renderer, *, pooling: PoolingType, vocab_size: int, settings: HttpSettings
    ) -> None:
        self.served = served
        self.renderer = renderer
        self.pooling = pooling
        self.vocab_size = vocab_size
        self.settings = settings
        self._pending_rows = 0
        self._reading_bytes = 0
        # One at a time: a tokenizer's padding and truncation state is shared, and it uses all cores by itself.
        self._tokenizing = anyio.CapacityLimiter(1)

    def app(self) -> FastAPI:
        """The web application."""
        app = FastAPI(
            title="rm-opt reward server",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            dependencies=[Depends(self._check_token)],
        )
        app.add_api_route("/score", self._score, methods=["POST"])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/version", self._version, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_api_route("/weights", self._update, methods=["POST"])
        if self.settings.protocols:
            others = OtherTrainers(self.renderer, self._read, self.score)
            for path, answer in map(others.route, self.settings.protocols):
                app.add_api_route(path, answer, methods=["POST"], response_model=None)
        app.add_exception_handler(RmcoreError, _refuse)
        app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=499))  # nobody is there to read it
        app.add_middleware(Door, names=self.settings.names)
        return app

    async def _check_token(self, request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic" and self.settings.protocols:
            given = _password(given)
        elif kind.lower() != "bearer":
            given = ""
        if not hmac.compare_digest(given.encode(), self.settings.token.encode()):
            raise Refused(
                "unauthorized",
                "the bearer token is missing or another one; send the one that the server printed at its start, or was "
                "given in RM_OPT_TOKEN, as `Authorization: Bearer ...`.",
                "authorization",
            )
        setattr(request.state, LOGGED_IN, True)

    async def _score(self, request: Request) -> ScoringResponse:
        return await self.score(await self._read(request, ScoringRequest))

    async def score(self, asked: ScoringRequest) -> ScoringResponse:
        """Rewards of one request, all of them by one version of the weights.

        Raises:
            RmcoreError: an input is refused, too much is under way, or no weights are served.
        """
        num_rows = len(asked.inputs)
        if self._pending_rows + num_rows > self.settings.max_pending_rows:
            raise Refused(
                "busy",
                f"{self._pending_rows} rows are under way and at most {self.settings.max_pending_rows} may be; ask "
                "again later, or with fewer requests at a time.",
            )
        self._pending_rows += num_rows
        try:
            sides = await anyio.to_thread.run_sync(self._tokenize, asked, limiter=self._tokenizing)
            rewards, weights = await self.served.score([side.ids for side in sides])
        finally:
            self._pending_rows -= num_rows
        return ScoringResponse(
            rewards=tuple(_sigmoid(weights.beta * one) if asked.normalize else one for one in rewards),
            num_tokens=tuple(len(side.ids) for side in sides),
            num_cut=tuple(side.num_cut for side in sides),
            normalized=asked.normalize,
            weight_version=weights.version,
            checkpoint_digest=weights.digest,
            policy_version=asked.policy_version,
        )

    async def _health(self, response: Response) -> Health:
        served = self.served
        response.status_code = 200 if served.is_ready else 503
        return Health(
            ready=served.is_ready,
            state=served.state,
            reason=served.reason,
            weight_version=served.weights.version,
            num_restarts=served.num_restarts,
            pooling=self.pooling,
            max_seq_len=self.renderer.rendering.max_seq_len,
            format=self.renderer.rendering.format,
        )

    async def _version(self) -> VersionInfo:
        return self.served.version()

    async def _metrics(self) -> Response:
        return Response(await self.served.engine.metrics(), media_type="text/plain; version=0.0.4")

    async def _update(self, request: Request) -> VersionInfo:
        return await self.served.update(await self._read(request, WeightUpdate))

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The body as JSON of the given kind. Only JSON: a page in a browser can send any other type unasked.

        As a parameter of the routes FastAPI would read it whole before it looks at the token.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Refused("invalid", f"send the body as {JSON}.", "content-type")
        body, settings = bytearray(), self.settings
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for part in request.stream():
                    body += part
                    self._reading_bytes += len(part)
                    if len(body) > settings.max_body_bytes:
                        raise Refused(
                            "too_large",
                            f"the body has more than {settings.max_body_bytes:,} bytes, the most that this server "
                            "reads; send fewer inputs at a time.",
                        )
                    if self._reading_bytes > settings.max_reading_bytes:
                        raise Refused(
                            "busy",
                            f"bodies of more than {settings.max_reading_bytes:,} bytes are being read; ask again "
                            "later, or with fewer requests at a time.",
                        )
        except TimeoutError:
            why = f"the body did not arrive within {settings.body_seconds:g} s; send it again, in smaller parts."
            raise Refused("slow", why) from None
        finally:
            self._reading_bytes -= len(body)
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            named, why = first_error(error)
            raise Refused("invalid", f"{named}: {why}.", named) from None

    def _tokenize(self, asked: ScoringRequest) -> list[TokenizedSide]:
        """Token ids of the inputs; runs in a thread.

        Raises:
            RmcoreError: an input is too long, cannot be rendered, or has an id that the model does not know.
        """
        pairs = {index: _prompt_and_response(index, given) for index, given in enumerate(asked.inputs)}
        rendered = {index: pair for index, pair in pairs.items() if pair is not None}
        texts = {index: given for index, given in enumerate(asked.inputs) if isinstance(given, str)}
        for index, pair in rendered.items():
            self._check_characters(index, sum(map(len, texts_of(*pair))))
        for index, text in texts.items():
            self._check_characters(index, len(text))
        sides: dict[int, TokenizedSide] = {}
        for index, found in zip(rendered, self.renderer.try_sides(list(rendered.values())), strict=True):
            if isinstance(found, DataError):
                raise RequestError(f"inputs.{index}: {found}", field=f"inputs.{index}") from found
            sides[index] = found
        sides |= zip(texts, self.renderer.tokenize_texts(list(texts.values())), strict=True)
        for index, given in enumerate(asked.inputs):
            if index not in sides:
                sides[index] = self._given_ids(index, [token for token in given if isinstance(token, int)])
        ordered = [sides[index] for index in range(len(asked.inputs))]
        self._check_lengths(asked, ordered)
        return ordered

    def _check_characters(self, index: int, found: int) -> None:
        """Before anything is tokenized, which takes a minute for 8 MB of text."""
        reads = self.renderer.rendering.max_seq_len
        limit = max(SHORTEST_BOUND, CHARACTERS_PER_TOKEN * reads)
        if found > limit:
            raise Refused(
                "too_large",
                f"inputs.{index}: {found:,} characters are more than the {limit:,} that this server tokenizes for the "
                f"{reads:,} tokens that its model reads. Shorten it.",
                f"inputs.{index}",
            )

    def _given_ids(self, index: int, ids: list[int]) -> TokenizedSide:
        if max(ids) >= self.vocab_size:
            raise RequestError(
                f"inputs.{index}: token id {max(ids)} is not below the model's {self.vocab_size}; these ids are of "
                "another tokenizer.",
                field=f"inputs.{index}",
            )
        limit = self.renderer.rendering.max_seq_len
        return TokenizedSide(ids[:limit], max(0, len(ids) - limit))

    def _check_lengths(self, asked: ScoringRequest, sides: Sequence[TokenizedSide]) -> None:
        for index, side in enumerate(sides):
            if side.num_cut and asked.over_length == "refuse":
                limit = self.renderer.rendering.max_seq_len
                raise RequestError(
                    f"inputs.{index}: {len(side.ids) + side.num_cut:,} tokens are more than the {limit:,} that this "
                    'model was trained to read. Shorten it, or send over_length="cut", which keeps the end of the '
                    "prompt and the beginning of the response.",
                    field=f"inputs.{index}",
                )
            if not side.ids:
                raise RequestError(f"inputs.{index}: no token is left to score.", field=f"inputs.{index}")


def _prompt_and_response(index: int, given: ScoringInput) -> tuple[Prompt, str] | None:
    """A dialogue and its last turn, or None for an input that is not rendered here.

    Raises:
        RequestError: a message has a part that is no text, or the tools are none.
    """
    if isinstance(given, str):
        return None
    try:
        if isinstance(given, PromptResponse):
            prompt = given.prompt
            turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(one.message() for one in prompt)
            answer = given.response if isinstance(given.response, str) else as_answer(given.response.message())
        else:
            listed = given.messages if isinstance(given, Dialogue) else given
            messages = [turn.message() for turn in listed if isinstance(turn, ChatMessage)]
            if not messages:
                return None
            turns, answer = tuple(messages[:-1]), as_answer(messages[-1])
        tools = given.tools if isinstance(given, PromptResponse | Dialogue) else None
        return plain_prompt(framed(turns, {"tools": tools and list(tools)})), answer
    except RowRejected as error:
        raise RequestError(f"inputs.{index}: {error.reason}.", field=f"inputs.{index}") from error


def _password(given: str) -> str:
    """The password of `Authorization: Basic`; empty where it is none."""
    try:
        return base64.b64decode(given.encode(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds)) if log_odds >= 0 else math.exp(log_odds) / (1 + math.exp(log_odds))


async def _refuse(request: Request, error: Exception) -> Response:
    """Every expected failure as a refusal."""
    refusal = Refusal(error="failed", message=str(error))
    if isinstance(error, Refused):
        refusal = error.refusal
    elif isinstance(error, NotReadyError):
        refusal = Refusal(error="not_ready", message=str(error))
    elif isinstance(error, RequestError):
        kind = "conflict" if request.url.path == "/weights" else "invalid"
        refusal = Refusal(error=kind, message=str(error), field=error.field)
    return refusal_response(refusal)
