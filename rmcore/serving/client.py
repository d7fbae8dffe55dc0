"""The client of a reward server: scores in order, of one weight version; readiness; updates of weights.

    with RewardClient("http://127.0.0.1:8100") as client:
        client.wait_ready(timeout_s=60)
        answer = client.score([{"prompt": "2 + 2?", "response": "4"}])

A list is cut into batches, which are sent at the same time. Where an update of the weights went by between them, the
batches of the old version are scored again: one list is always scored by one version. What failures mean:

    no connection, or one that broke   sent again, with growing pauses, then ServingError
    no answer within the time limit    ServingError at once: the server may still be computing, more load is no help
    429, 503                           NotReadyError    the same request may work later
    other 4xx                          RequestError     it will not work in this form
    everything else                    ServingError

No request that a server answered is repeated here: a refusal is the server's decision, and the caller's to handle.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import ValidationError

from rmcore.core.errors import ConfigError, NotReadyError, RequestError, RmcoreError, ServingError
from rmcore.core.loop_thread import LoopThread
from rmcore.core.web import uses_proxies
from rmcore.serving.token_file import checked_token, find_token
from rmcore.serving.types import (
    MAX_ROWS,
    Health,
    Refusal,
    ScoringRequest,
    ScoringResponse,
    VersionInfo,
    WeightUpdate,
    Wire,
    first_error,
)

OverLength = Literal["refuse", "cut"]
CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection in one try: a machine that is there answers within milliseconds."""
POLL_TIMEOUT_S = 5.0
"""Longest wait for one answer while a client waits for readiness: a server that hangs is asked again."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
"""Pauses between tries double from the first to the longest: a server that is back is seen soon."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_CONNECTION_FAULTS = (*_NOT_SENT, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
_INPUT_FIELD = re.compile(r"\binputs\.(\d+)")
Answer = TypeVar("Answer", bound=Wire)
Result = TypeVar("Result")


class RewardClient:
    """Asks one reward server over one pool of connections, from any number of threads; a context manager.

    Requests are made in an event loop of its own, where Ctrl-C ends those of the call that it interrupts.
    From an event loop: `await asyncio.to_thread(client.score, inputs)`. A process that it was forked into needs a
    client of its own.

    Args:
        address: `http://HOST:PORT`, with a path before the routes if there is one.
        token: the server's bearer token; it is in no message. None: RM_OPT_TOKEN, or what `rm-opt serve` of this user
            keeps for this very address.
        timeout_s: longest wait for an answer, in seconds.
        max_concurrency: most scoring requests on their way at once, over all calls of this client.
        batch_size: most inputs of one request.
        attempts: most tries of one request whose connection fails, and most rounds until a list is of one version.

    Raises:
        ConfigError: an argument cannot be used, or the environment names a proxy that HTTP clients cannot use.
        ServingError: a token is kept for this address, and cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        max_concurrency: int = 8,
        batch_size: int = 32,
        attempts: int = 5,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("attempts", attempts), ("max_concurrency", max_concurrency)):
            if not value > 0:
                raise ConfigError(f"{name}={value} lets no request through; give a number above 0.")
        if not 1 <= batch_size <= MAX_ROWS:
            raise ConfigError(f"batch_size={batch_size} is not in 1 to {MAX_ROWS}, the rows one request may have.")
        self.address, host = _checked_address(address)
        token = find_token(self.address) if token is None else token
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._batch_size = batch_size
        self._http = httpx.AsyncClient(
            base_url=self.address,
            headers={} if token is None else {"Authorization": f"Bearer {checked_token(token)}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            trust_env=uses_proxies(host),
        )
        self._slots = asyncio.Semaphore(max_concurrency)
        self._thread = LoopThread("reward-client")

    def __repr__(self) -> str:
        return f"RewardClient({self.address!r})"

    def score(
        self,
        inputs: Iterable[Any],
        *,
        normalize: bool = False,
        over_length: OverLength = "refuse",
        policy_version: int | None = None,
    ) -> ScoringResponse:
        """Score any number of inputs by one version of the weights.

        Args:
            inputs: texts, messages, token ids, or prompts with responses (see `ScoringRequest`). An empty list is
                sent too, so that the version of the answer is the served one.
            normalize: give sigmoid(beta * reward), in (0, 1) and with the checkpoint's beta, in place of the reward in
                logits.
            over_length: whether an input longer than the model reads is refused or cut; `num_cut` tells the cuts.
            policy_version: which policy wrote the inputs; comes back unchanged.

        Returns:
            Rewards in the order of the inputs, with the one weight version that gave them all.

        Raises:
            RequestError: an input or setting has no valid form (nothing was sent then), or the server refused it.
                The N of `inputs.N` in the message is the place in `inputs`, from 0.
            NotReadyError: the server starts, restarts or has too much to do.
            ServingError: there is no server, no answer in time, none that can be used, or the weights changed in each
                of `attempts` rounds.
        """
        settings = {"normalize": normalize, "over_length": over_length, "policy_version": policy_version}
        return self._run(self._score(_cut(inputs, self._batch_size, settings)))

    async def _score(self, batches: Sequence[ScoringRequest]) -> ScoringResponse:
        answers: dict[int, ScoringResponse] = {}
        waiting = list(range(len(batches)))
        for _ in range(self._attempts):
            arrived = await self._score_batches(batches, waiting, answers)
            # Versions rise while a server lives. After a restart they are lower: hence the newest of this round only,
            # and of equal ones the last to arrive.
            target = max(reversed(arrived), key=lambda one: one.weight_version).source
            waiting = [index for index, answer in answers.items() if answer.source != target]
            if not waiting:
                return _joined([answers[index] for index in range(len(batches))])
        versions = sorted({answer.weight_version for answer in answers.values()})
        raise ServingError(
            f"{len(batches)} batches came back by the weight versions {versions}, after {self._attempts} rounds in "
            "which older ones were scored again: updates follow each other faster than the list is scored. Score fewer "
            "inputs a call, publish less often, or raise attempts."
        )

    async def _score_batches(
        self, batches: Sequence[ScoringRequest], indices: Iterable[int], answers: dict[int, ScoringResponse]
    ) -> list[ScoringResponse]:
        """Score some batches at the same time, write down their answers, and return these as they arrived."""
        arrived: list[ScoringResponse] = []

        async def score_one(index: int) -> None:
            async with self._slots:
                answers[index] = await self._score_batch(batches[index], index * self._batch_size)
            arrived.append(answers[index])

        running = [asyncio.ensure_future(score_one(index)) for index in indices]
        try:
            await asyncio.gather(*running)
        finally:  # after a failure nothing more is sent, and what was sent ends
            for one in running:
                one.cancel()
        return arrived

    async def _score_batch(self, batch: ScoringRequest, first_input: int) -> ScoringResponse:
        answer = await self._exchange("POST", "/score", ScoringResponse, body=batch, first_input=first_input)
        if len(answer.rewards) != len(batch.inputs) or answer.normalized != batch.normalize:
            raise ServingError(
                f"POST /score of {self.address} answered {len(answer.rewards)} rewards, normalized={answer.normalized} "
                f"to {len(batch.inputs)} inputs with normalize={batch.normalize}: no reward can be trusted. See the "
                "server's log, and that both sides are of one release."
            )
        return answer

    def health(self) -> Health:
        """Ask what the server is and whether it answers requests now; an answer that says "not ready" is no error.

        Raises:
            RequestError, NotReadyError, ServingError: as in `score`.
        """
        return self._run(self._exchange("GET", "/health", Health, also=503))

    def version(self) -> VersionInfo:
        """Which weights are served, and where the next ones are to be put.

        Raises:
            RequestError, NotReadyError, ServingError: as in `score`.
        """
        return self._run(self._exchange("GET", "/version", VersionInfo))

    def wait_ready(self, timeout_s: float) -> Health:
        """Ask for the health, with growing pauses up to 1 s, until the server is ready; it need not run yet.

        Args:
            timeout_s: longest wait in seconds.

        Raises:
            RequestError: the server refuses to say, such as without its token.
            ServingError: it was not ready in time; the message has the last reason.
        """
        reason, end = "it did not answer", time.monotonic() + timeout_s
        for attempt in itertools.count(1):
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            limit_s = min(POLL_TIMEOUT_S, self._timeout_s, left_s)
            try:
                asked = self._exchange("GET", "/health", Health, also=503, attempts=1, timeout_s=limit_s)
                health = self._run(asked)
                if health.ready:
                    return health
                reason = health.state if health.reason is None else f"{health.state}, {health.reason}"
            except ServingError as error:
                reason = str(error)
            time.sleep(min(_pause_s(attempt), max(0.0, end - time.monotonic())))
        raise ServingError(
            f"{self.address} was not ready within {timeout_s:g} s; the last reason: {reason.rstrip('.')}. See the "
            "server's log, or wait longer."
        )

    def publish(self, update: WeightUpdate, timeout_s: float = 600.0) -> VersionInfo:
        """Have the server load other weights, and return the version it serves then.

        Sent at most once: where the connection breaks after that, the error says to ask `version()`.

        Args:
            update: what was put into the server's weights folder.
            timeout_s: longest wait in seconds for requests to end, the weights to load and the probe to agree.

        Raises:
            RequestError: the server refused the update and serves the old weights.
            NotReadyError: the server cannot take an update now.
            ServingError: there is no server, no answer in time, or the update failed there.
        """
        sent = self._exchange("POST", "/weights", VersionInfo, body=update, timeout_s=timeout_s, repeatable=False)
        return self._run(sent)

    def close(self) -> None:
        """Close all connections; calls that other threads wait for fail, and the client cannot be used any more."""
        if not self._thread.loop.is_closed():
            self._thread.close(self._http.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for what the loop does; where the wait ends, as by Ctrl-C, so do its requests."""
        if self._thread.loop.is_closed():
            coroutine.close()
            raise ServingError(f"{self} was closed and sends nothing any more; make a new one.")
        try:
            return self._thread.run(coroutine)
        except CancelledError:
            raise ServingError(
                f"{self} was closed while a call waited for its answer; close it after the last."
            ) from None

    async def _exchange(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: Wire | None = None,
        timeout_s: float | None = None,
        attempts: int | None = None,
        repeatable: bool = True,
        also: int | None = None,
        first_input: int = 0,
    ) -> Answer:
        """Send one request and read its answer, which a response of status `also` may hold, too.

        One that is not `repeatable` is sent again only where it was never sent. Errors count inputs from `first_input`.
        """
        what, limit_s = f"{method} {path}", timeout_s or self._timeout_s
        unknown = "" if repeatable else " Whether it took effect is unknown: version() tells what is served."
        content = None if body is None else body.model_dump_json().encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(limit_s, connect=min(CONNECT_TIMEOUT_S, limit_s))
        attempts = attempts or self._attempts
        for attempt in range(1, attempts + 1):
            try:
                response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
                break
            except _CONNECTION_FAULTS as error:
                if not (repeatable or isinstance(error, _NOT_SENT)):
                    raise ServingError(
                        f"the connection to {self.address} broke after {what} was sent ({_why(error)})." + unknown
                    ) from error
                if attempt == attempts:
                    raise ServingError(
                        f"{self.address} could not be reached, {what} failed in {attempts} tries ({_why(error)}): no "
                        "server listens there, or it ends. See that it runs; wait_ready() waits for one that starts."
                    ) from error
            except httpx.TimeoutException as error:
                raise ServingError(
                    f"{what} of {self.address} had no answer within {limit_s:.3g} s: the server has too much to do or "
                    f"hangs.{unknown} Raise timeout_s, send smaller batches, or ask health()."
                ) from error
            except httpx.HTTPError as error:
                raise ServingError(
                    f"{what} of {self.address} failed ({_why(error)}): the answer is not one of a reward server. See "
                    f"what listens at this address.{unknown}"
                ) from error
            await asyncio.sleep(_pause_s(attempt))
        return _read(response, f"{what} of {self.address}", answer, also, first_input)


def _pause_s(attempt: int) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** min(attempt - 1, 30), LONGEST_PAUSE_S))


def _cut(inputs: Iterable[Any], batch_size: int, settings: Mapping[str, Any]) -> list[ScoringRequest]:
    """Requests of at most batch_size inputs each; an empty one where there are no inputs."""
    if isinstance(inputs, str | bytes | Mapping):
        raise RequestError(f"inputs is one {type(inputs).__name__}, and a list of inputs is scored; write [it].")
    rows = list(inputs)
    batches = []
    for start in range(0, max(len(rows), 1), batch_size):
        try:
            batches.append(ScoringRequest.from_list(rows[start : start + batch_size], **settings))
        except ValidationError as error:
            field, why = first_error(error)
            raise RequestError(f"{_in_callers_list(field, start)}: {why}; nothing was sent. Correct it.") from error
    return batches


def _joined(answers: Sequence[ScoringResponse]) -> ScoringResponse:
    fields = ("rewards", "num_tokens", "num_cut")
    rows = {name: tuple(itertools.chain(*(getattr(one, name) for one in answers))) for name in fields}
    return answers[0].model_copy(update=rows)


def _in_callers_list(text: str, first_input: int) -> str:
    """Count the `inputs.N` of a message about one batch from the start of the caller's list."""
    return _INPUT_FIELD.sub(lambda match: f"inputs.{int(match[1]) + first_input}", text)


def _checked_address(address: str) -> tuple[str, str]:
    """The address without a slash at its end, and its host."""
    form = "give http://HOST:PORT, as the server printed it"
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the address of a reward server cannot be read ({error}); {form}.") from error
    if url.userinfo:  # not shown: it may be a password
        raise ConfigError(f"the address of a reward server holds a user's name or password; {form}, and pass token=.")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"{address!r} is not the address of a reward server; {form}.")
    return address.rstrip("/"), url.host


def _read(response: httpx.Response, what: str, answer: type[Answer], also: int | None, first_input: int) -> Answer:
    if response.is_success or response.status_code == also:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            if response.is_success:
                field, why = first_error(error)
                raise ServingError(
                    f"{what} answered {response.status_code} with no valid {answer.__name__} ({field}: {why}): nothing "
                    "of it can be used. See the server's log, and that both sides are of one release."
                ) from error
    raise _failure(response, what, first_input)


def _failure(response: httpx.Response, what: str, first_input: int) -> RmcoreError:
    status = response.status_code
    kind: type[RmcoreError] = ServingError
    if status in (429, 503):
        kind = NotReadyError
    elif 400 <= status < 500:
        kind = RequestError
    try:
        refusal = Refusal.model_validate_json(response.content)
    except ValidationError:
        return kind(
            f"{what} answered {status} {response.reason_phrase} and not as a reward server does "
            f"({response.text[:120]!r}): something else is at this address or before it. Correct the address."
        )
    message = _in_callers_list(refusal.message, first_input)
    field = "" if refusal.field is None else _in_callers_list(refusal.field, first_input)
    named = "" if field in message else f", field {field}"
    return kind(f"{what} answered {status} {refusal.error}{named}: {message}")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
