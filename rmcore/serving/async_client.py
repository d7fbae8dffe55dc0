"""The async client of a reward server: scores in order, of one weight version; readiness; updates of weights.

A list is cut into batches, which are sent at the same time. Where an update of the weights went by between them, the
batches of the old version are scored again: one list is always scored by one version. `client_session` says which
failures are tried again and what each one raises.
"""

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import ValidationError

from rmcore.core.errors import ConfigError, RequestError, ServingError
from rmcore.serving.client_session import Session, in_callers_list
from rmcore.serving.messages import first_error
from rmcore.serving.types import MAX_ROWS, Health, ScoringRequest, ScoringResponse, VersionInfo, WeightUpdate

OverLength = Literal["refuse", "cut"]
POLL_TIMEOUT_S = 5.0
"""Longest wait for one answer while a client waits for readiness: a server that hangs is asked again."""


class AsyncRewardClient:
    """Asks one reward server. Holds one connection pool and lives in one event loop; an async context manager.

    Args:
        address: `http://HOST:PORT`, with a path before the routes if there is one.
        token: the server's bearer token; it is in no message. None: RM_OPT_TOKEN, or what `rm-opt serve` of this user
            keeps for this very address.
        timeout_s: longest wait for one answer, in seconds.
        max_concurrency: most scoring requests on their way at once, over all calls of this client.
        batch_size: most inputs of one request.
        attempts: most tries of one request whose connection fails, and most rounds until a list is of one version.
        backoff_s: first pause between tries in seconds; it doubles up to 1 s, and a random half of it is left out.

    Raises:
        ConfigError: an argument cannot be used.
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
        backoff_s: float = 0.1,
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency={max_concurrency} lets no request through; give at least 1.")
        if not 1 <= batch_size <= MAX_ROWS:
            raise ConfigError(f"batch_size={batch_size} is not in 1 to {MAX_ROWS}, the rows one request may have.")
        self._session = Session(
            address,
            token=token,
            timeout_s=timeout_s,
            keep_alive=max_concurrency,
            attempts=attempts,
            backoff_s=backoff_s,
        )
        self._batch_size = batch_size
        self._slots = asyncio.Semaphore(max_concurrency)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session.address!r})"

    async def score(
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
        batches = _cut(inputs, self._batch_size, settings)
        answers: dict[int, ScoringResponse] = {}
        waiting = list(range(len(batches)))
        for _ in range(self._session.attempts):
            arrived = await self._score_batches(batches, waiting, answers)
            # Versions rise while a server lives. After a restart they are lower: hence the newest of this round only,
            # and of equal ones the last to arrive.
            target = max(reversed(arrived), key=lambda one: one.weight_version).source
            waiting = [index for index, answer in answers.items() if answer.source != target]
            if not waiting:
                return _joined([answers[index] for index in range(len(batches))])
        versions = sorted({answer.weight_version for answer in answers.values()})
        raise ServingError(
            f"{len(batches)} batches came back by the weight versions {versions}, after {self._session.attempts} "
            "rounds in which older ones were scored again: updates follow each other faster than the list is scored. "
            "Score fewer inputs a call, publish less often, or raise attempts."
        )

    async def _score_batches(
        self, batches: list[ScoringRequest], indices: list[int], answers: dict[int, ScoringResponse]
    ) -> list[ScoringResponse]:
        """Score some batches at the same time, write down their answers, and return these as they arrived."""
        arrived: list[ScoringResponse] = []

        async def score_one(index: int) -> None:
            async with self._slots:
                answer = await self._score_batch(batches[index], index * self._batch_size)
            answers[index] = answer
            arrived.append(answer)

        try:
            async with asyncio.TaskGroup() as group:
                for index in indices:
                    group.create_task(score_one(index))
        except ExceptionGroup as failed:  # the first failure has ended the others
            raise failed.exceptions[0] from None
        return arrived

    async def _score_batch(self, batch: ScoringRequest, first_input: int) -> ScoringResponse:
        answer = await self._session.exchange("POST", "/score", ScoringResponse, body=batch, first_input=first_input)
        lengths = {len(answer.rewards), len(answer.num_tokens), len(answer.num_cut)}
        asked = (batch.normalize, batch.policy_version)
        if lengths != {len(batch.inputs)} or (answer.normalized, answer.policy_version) != asked:
            raise ServingError(
                f"POST /score of {self._session.address} answered {len(answer.rewards)} rewards, "
                f"{len(answer.num_tokens)} num_tokens, {len(answer.num_cut)} num_cut, normalized={answer.normalized}, "
                f"policy_version={answer.policy_version} to {len(batch.inputs)} inputs with "
                f"normalize={batch.normalize}, policy_version={batch.policy_version}: the server is at fault and no "
                "reward can be trusted. See its log, and that both sides are of one release."
            )
        return answer

    async def health(self) -> Health:
        """Ask what the server is and whether it answers requests now; an answer that says "not ready" is no error.

        Raises:
            RequestError, NotReadyError, ServingError: as in `score`.
        """
        return await self._health()

    async def _health(self, **limits: Any) -> Health:
        return await self._session.exchange("GET", "/health", Health, also=503, **limits)

    async def version(self) -> VersionInfo:
        """Which weights are served, and where the next ones are to be put.

        Raises:
            RequestError, NotReadyError, ServingError: as in `score`.
        """
        return await self._session.exchange("GET", "/version", VersionInfo)

    async def wait_ready(self, timeout_s: float) -> Health:
        """Ask for the health, with growing pauses up to 1 s, until the server is ready; it need not run yet.

        Args:
            timeout_s: longest wait in seconds.

        Raises:
            RequestError: the server refuses to say, such as without its token.
            ServingError: it was not ready in time; the message has the last reason.
        """
        reason = "it did not answer"
        limit_s = min(POLL_TIMEOUT_S, self._session.timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in itertools.count(1):
                    try:
                        health = await self._health(attempts=1, timeout_s=limit_s)
                        if health.ready:
                            return health
                        reason = health.state if health.reason is None else f"{health.state}, {health.reason}"
                    except ServingError as error:
                        reason = str(error)
                    await asyncio.sleep(self._session.pause_s(attempt))
        except TimeoutError:
            pass
        raise ServingError(
            f"{self._session.address} was not ready within {timeout_s:g} s; the last reason: {reason.rstrip('.')}. "
            "See the server's log, or wait longer."
        )

    async def publish(self, update: WeightUpdate, timeout_s: float = 600.0) -> VersionInfo:
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
        return await self._session.exchange(
            "POST", "/weights", VersionInfo, body=update, timeout_s=timeout_s, repeatable=False
        )

    async def aclose(self) -> None:
        """Close all connections; the client cannot be used any more."""
        await self._session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


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
            field = in_callers_list(field, start)
            raise RequestError(f"{field}: {why}; nothing was sent. Correct it.") from error
    return batches


def _joined(answers: list[ScoringResponse]) -> ScoringResponse:
    fields = ("rewards", "num_tokens", "num_cut")
    rows: dict[str, Any] = {name: _rows(getattr(answer, name) for answer in answers) for name in fields}
    return answers[0].model_copy(update=rows)


def _rows(batches: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(batches))
