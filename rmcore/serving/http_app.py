"""The HTTP side of a reward server: rendering, limits, tokens, and nothing of vLLM's own routes.

- POST /score: rewards of texts, messages, token ids or prompt/response pairs
- GET /health: what this is and whether it answers now (200 or 503)
- GET /version: which weights are served
- GET /metrics: Prometheus text
- POST /weights: serve other weights (see `rmcore.serving.weight_sync`)
"""

import hmac
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

import anyio
from fastapi import Depends, FastAPI, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from rmcore.core.errors import DataError, NotReadyError, RequestError, RmcoreError
from rmcore.data.pair import Message, Prompt
from rmcore.data.rendering import Renderer, TokenizedSide
from rmcore.serving.messages import checked_token, first_error
from rmcore.serving.served import ServedModel
from rmcore.serving.types import (
    ChatMessage,
    Health,
    PoolingType,
    PromptResponse,
    Refusal,
    ScoringInput,
    ScoringRequest,
    ScoringResponse,
    VersionInfo,
    WeightUpdate,
)

JSON = "application/json"
BEARER = HTTPBearer(auto_error=False)
STATUSES = {
    "invalid": 422,
    "unauthorized": 401,
    "too_large": 413,
    "busy": 429,
    "not_ready": 503,
    "conflict": 409,
    "failed": 500,
}
RETRY_SECONDS = "1"
LATENCY_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, float("inf"))
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class HttpSettings:
    """Limits of the HTTP app.

    token: every route asks for it as `Authorization: Bearer`; None asks for nothing.
    max_body_bytes: of one request.
    max_pending_rows: rows under way or waiting; beyond it requests are refused as busy.
    """

    token: str | None = None
    max_body_bytes: int = 8 * 2**20
    max_pending_rows: int = 8192

    def __post_init__(self) -> None:
        if self.token is not None:
            checked_token(self.token)


class Refused(RmcoreError):
    """A request that ends with a refusal."""

    def __init__(self, error: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(error=error, message=message, field=field)


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
        self.metrics = ServerMetrics(served)
        self._pending_rows = 0
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
        app.add_exception_handler(RmcoreError, _refuse)
        app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=499))  # nobody is there to read it
        app.add_middleware(_Counting, metrics=self.metrics)
        return app

    async def _check_token(self, given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        token = self.settings.token
        if token is not None and (given is None or not hmac.compare_digest(given.credentials.encode(), token.encode())):
            raise Refused(
                "unauthorized",
                "the bearer token is missing or another one; send the one that the server was started with as "
                "`Authorization: Bearer ...`.",
                "authorization",
            )

    async def _score(self, request: Request) -> ScoringResponse:
        asked = await self._read(request, ScoringRequest)
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
        self.metrics.scored(len(sides), sum(len(side.ids) for side in sides))
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
            pooling=self.pooling,
            max_seq_len=self.renderer.rendering.max_seq_len,
            format=self.renderer.rendering.format,
        )

    async def _version(self) -> VersionInfo:
        return self.served.version()

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _update(self, request: Request) -> VersionInfo:
        return await self.served.update(await self._read(request, WeightUpdate))

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The body as JSON of the given kind. Only JSON: a page in a browser can send any other type unasked.

        As a parameter of the routes FastAPI would read it whole before it looks at the token.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Refused("invalid", f"send the body as {JSON}.", "content-type")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.settings.max_body_bytes:
                raise Refused(
                    "too_large",
                    f"the body has more than {self.settings.max_body_bytes:,} bytes, the most that this server reads; "
                    "send fewer inputs at a time.",
                )
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            field, why = first_error(error)
            raise Refused("invalid", f"{field}: {why}.", field) from None

    def _tokenize(self, asked: ScoringRequest) -> list[TokenizedSide]:
        """Token ids of all inputs; runs in a thread.

        Raises:
            RequestError: an input is too long, cannot be rendered, or has an id that the model does not know.
        """
        pairs = {index: _prompt_and_response(given) for index, given in enumerate(asked.inputs)}
        rendered = {index: pair for index, pair in pairs.items() if pair is not None}
        texts = {index: given for index, given in enumerate(asked.inputs) if isinstance(given, str)}
        sides: dict[int, TokenizedSide] = {}
        for index, found in zip(rendered, self.renderer.try_sides(list(rendered.values())), strict=True):
            if isinstance(found, DataError):
                raise RequestError(f"inputs.{index}: {found}", field=f"inputs.{index}") from found
            sides[index] = found
        sides |= zip(texts, self.renderer.tokenize_texts(list(texts.values())), strict=True)
        for index, given in enumerate(asked.inputs):
            if index not in sides:
                sides[index] = self._given_ids(index, [token for token in given if isinstance(token, int)])
        self._check_length(asked, sides)
        return [sides[index] for index in range(len(asked.inputs))]

    def _given_ids(self, index: int, ids: list[int]) -> TokenizedSide:
        if max(ids) >= self.vocab_size:
            raise RequestError(
                f"inputs.{index}: token id {max(ids)} is not below the model's {self.vocab_size}; these ids are of "
                "another tokenizer.",
                field=f"inputs.{index}",
            )
        limit = self.renderer.rendering.max_seq_len
        return TokenizedSide(ids[:limit], max(0, len(ids) - limit))

    def _check_length(self, asked: ScoringRequest, sides: dict[int, TokenizedSide]) -> None:
        for index, side in sorted(sides.items()):
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


def _prompt_and_response(given: ScoringInput) -> tuple[Prompt, str] | None:
    """A dialogue and its last turn, or None for an input that is not rendered here."""
    if isinstance(given, PromptResponse):
        if isinstance(given.prompt, str):
            return given.prompt, given.response
        return tuple(Message(turn.role, turn.content) for turn in given.prompt), given.response
    turns = [Message(turn.role, turn.content) for turn in given if isinstance(turn, ChatMessage)]
    return (tuple(turns[:-1]), turns[-1].content) if turns else None


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
    headers = {"Retry-After": RETRY_SECONDS} if refusal.error in ("busy", "not_ready") else {}
    if refusal.error == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return Response(refusal.model_dump_json(), STATUSES[refusal.error], headers, media_type=JSON)


class ServerMetrics:
    """Counts of what one server has done. Each has a registry of its own, so that several may live in one process."""

    def __init__(self, served: ServedModel) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("rm_requests", "Requests", ["path", "status"], registry=self._registry)
        self._seconds = Histogram(
            "rm_request_seconds", "Seconds of a request", ["path"], buckets=LATENCY_BOUNDS, registry=self._registry
        )
        self._rows = Counter("rm_rows", "Rows scored", registry=self._registry)
        self._tokens = Counter("rm_tokens", "Tokens read", registry=self._registry)
        for name, words, read in (
            ("rm_ready", "1 while requests are answered", lambda: float(served.is_ready)),
            ("rm_weight_version", "Version of the weights that are served", lambda: float(served.weights.version)),
            ("rm_engine_restarts", "Times that vLLM was started again", lambda: float(served.num_restarts)),
        ):
            Gauge(name, words, registry=self._registry).set_function(read)
        updates = Gauge("rm_weight_updates", "Updates of the weights by outcome", ["outcome"], registry=self._registry)
        for outcome in served.num_updates:
            updates.labels(outcome).set_function(partial(_count, served, outcome))

    def saw(self, path: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def scored(self, num_rows: int, num_tokens: int) -> None:
        """Count rows and tokens of one request."""
        self._rows.inc(num_rows)
        self._tokens.inc(num_tokens)

    def text(self) -> str:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Counting:
    """Counts answers of our routes. FastAPI's own form of a middleware would double what a small request costs."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()

        async def counted(event: Event) -> None:
            if event["type"] == "http.response.start" and "route" in scope:
                self.metrics.saw(scope["path"], event["status"], time.perf_counter() - started)
            await send(event)

        await self.app(scope, receive, counted)


def _count(served: ServedModel, outcome: str) -> float:
    return float(served.num_updates[outcome])
