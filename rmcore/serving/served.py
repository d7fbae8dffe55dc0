"""The model that is served: which weights, whether they may be trusted, and how they become others.

One rule holds everywhere: a reward is given only by a whole set of weights that reproduced its probe. An exchange runs
alone (no request under way), and if anything in it fails the old weights are loaded whole again and must reproduce
their own probe; where that fails too, vLLM is started again from the old folder, and until that succeeds nobody is
answered.
"""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rmcore.core.errors import NotReadyError, RequestError, RmcoreError, ServingError
from rmcore.models.seal import read_beta
from rmcore.serving.parity import check_probe
from rmcore.serving.types import RewardModelTrainingMode, RewardProbe, ServerState, VersionInfo, WeightUpdate
from rmcore.serving.updates import check_update, drop_left
from rmcore.serving.vllm_process import EngineFailure, VllmEngine
from rmcore.serving.weight_files import folder_digest

MAX_RESTARTS = 3
"""vLLM may fail to come back this often in a row before the server gives up."""


@dataclass(frozen=True)
class Weights:
    """One set of weights: its number, its folder, and what it must reproduce."""

    version: int
    folder: Path
    digest: str
    mode: RewardModelTrainingMode
    probe: RewardProbe
    beta: float = 1.0
    """Scale of the margins: P(first preferred) = sigmoid(beta * margin)."""


class ServedModel:
    """Rewards from one vLLM, by one version of the weights at a time.

    Args:
        engine: not yet started.
        first: the weights to begin with, staged in the weights folder.
        checkpoint: where they came from, for people.
    """

    def __init__(self, engine: VllmEngine, first: Weights, checkpoint: str) -> None:
        self.engine = engine
        self.checkpoint = checkpoint
        self.state: ServerState = "starting"
        self.reason: str | None = "vLLM is starting."
        self.num_restarts = 0
        self._weights = first
        self._gate = Gate()
        self._changing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._exchanges = set[asyncio.Task[VersionInfo]]()
        self._ending: asyncio.Task[None] | None = None

    @property
    def weights(self) -> Weights:
        """The weights that answer, or would if the server were ready."""
        return self._weights

    @property
    def is_ready(self) -> bool:
        """Whether a request is answered now, at most after an exchange."""
        return self.state in ("ready", "updating")

    def version(self) -> VersionInfo:
        """Which weights these are, and where the next ones are to be put."""
        weights = self._weights
        return VersionInfo(
            weight_version=weights.version,
            checkpoint_digest=weights.digest,
            checkpoint=self.checkpoint,
            mode=weights.mode,
            dtype=self.engine.settings.dtype,
            weights_folder=str(weights.folder.parent),
            layout_folder=str(weights.folder),
        )

    async def start(self) -> None:
        """Start vLLM, compare its rewards with the probe's, and begin to answer.

        Raises:
            ServingError: it did not start, or its rewards are not those of the checkpoint.
        """
        await self.engine.start(self._weights.folder)
        await self._verify(self._weights)
        self._become("ready")
        self._watch = asyncio.create_task(self._restart_when_it_dies())

    async def stop(self) -> None:
        """End vLLM; requests from now on are refused."""
        self._become("stopping")
        if self._watch is not None:
            self._watch.cancel()
        await self.engine.stop()

    async def score(self, token_ids: Sequence[Sequence[int]]) -> tuple[list[float], Weights]:
        """Rewards in logits, and the weights that gave all of them.

        Raises:
            NotReadyError: no trusted weights are served now, or vLLM ended meanwhile.
            RequestError: a row's reward is not finite, or vLLM refuses the rows.
            ServingError: vLLM did not answer in time.
        """
        async with self._gate.shared():
            if self.state != "ready":
                raise NotReadyError(f"the reward server is {self.state}: {self.reason}")
            weights = self._weights
            try:
                rewards = await self.engine.scores(token_ids)
            except (NotReadyError, EngineFailure) as error:
                if not await self.engine.is_healthy():
                    self._lose()
                    raise NotReadyError("vLLM ended while it scored; it is started again. Ask again.") from error
                if isinstance(error, NotReadyError):
                    raise
                # JSON has no NaN, so one bad row fails the call: find which.
                rewards = [await self._score_alone(row) for row in token_ids]
        for row, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise RequestError(
                    f"inputs.{row}: vLLM gives it no finite reward under these weights.", field=f"inputs.{row}"
                )
        return rewards, weights

    async def _score_alone(self, row: Sequence[int]) -> float:
        try:
            return (await self.engine.scores([row]))[0]
        except EngineFailure:
            return math.nan

    def _lose(self) -> None:
        """Answer nobody from now on, and let what is left of a dead vLLM end, so that it is started again."""
        if self.state == "ready":
            self._become("restarting", "vLLM ended while it scored.")
            self._ending = asyncio.create_task(self.engine.kill())

    async def update(self, update: WeightUpdate) -> VersionInfo:
        """Serve other weights, verified before anyone is answered by them.

        The exchange continues where its caller leaves, because half of one must never be the end of it.

        Raises:
            RequestError: the update or its probe does not fit what is served; nothing was touched.
            NotReadyError: the server is not ready, so there is nothing that an update could be laid on.
            ServingError: the exchange failed, above all because the new weights did not reproduce their probe; the old
                weights serve, or the server restarts from them.
        """
        exchange = asyncio.create_task(self._update(update))
        self._exchanges.add(exchange)  # the event loop keeps no task alive by itself
        exchange.add_done_callback(self._exchanges.discard)
        return await asyncio.shield(exchange)

    async def _update(self, update: WeightUpdate) -> VersionInfo:
        async with self._changing:  # until its own end and not its caller's
            old = self._weights
            over = {update.folder, old.folder.name}  # the one of both that is not served then is not requested again
            try:
                await self._exchange_for(update, old)
            except NotReadyError:
                over.discard(update.folder)  # the same request may work later
                raise
            finally:
                await asyncio.to_thread(drop_left, old.folder.parent, self._weights.folder.name, over)
            return self.version()

    async def _exchange_for(self, update: WeightUpdate, old: Weights) -> None:
        """Load other weights, which answer when this ends; where it fails, the old ones do or will."""
        if self.state != "ready":
            raise NotReadyError(f"the reward server is {self.state}: {self.reason}")
        new = await asyncio.to_thread(self._stage, update, old)
        async with self._gate.alone():
            if self.state != "ready":  # vLLM ended meanwhile
                raise NotReadyError(f"the reward server is {self.state}: {self.reason}")
            self._become("updating", f"version {new.version} is being loaded.")
            try:
                await self.engine.reload(new.folder)
                await self._verify(new)
            except BaseException as error:  # whatever it is, vLLM may hold weights that nobody has verified
                outcome = await self._back_to(old)
                if isinstance(error, RmcoreError):
                    raise ServingError(f"version {new.version} was not taken: {error} {outcome}") from error
                raise
            self._weights = new
            self._become("ready")

    def _stage(self, update: WeightUpdate, old: Weights) -> Weights:
        """Check an update. Nothing that serves is touched."""
        limit, longest = self.engine.settings.max_seq_len, max(map(len, update.probe.token_ids))
        if longest > limit:
            raise RequestError(
                f"the probe has a row of {longest} tokens and this server reads at most {limit}, so the update cannot "
                f"be verified here and was not loaded. Start the server with --max-seq-len {longest}, or publish a "
                "model that reads no more than the server."
            )
        folder = check_update(old.folder, update.folder, update.digest)
        digest, beta = folder_digest(folder), read_beta(folder)
        return Weights(old.version + 1, folder, digest, update.mode, update.probe, beta)

    async def _verify(self, weights: Weights) -> None:
        check_probe(weights.probe, await self.engine.scores(weights.probe.token_ids))

    async def _back_to(self, old: Weights) -> str:
        """Serve the old weights again after a failed exchange; in words, what came of it."""
        try:
            await self.engine.reload(old.folder)
            await self._verify(old)
        except BaseException as error:
            self._become("restarting", f"an exchange of weights failed, and so did going back ({_words(error)}).")
            await self.engine.kill()
            if not isinstance(error, RmcoreError):
                raise
            return f"Going back failed too, so vLLM is started again with version {old.version}."
        self._become("ready")
        return f"Version {old.version} serves on."

    async def _restart_when_it_dies(self) -> None:
        try:
            while self.state != "broken":
                status = await self.engine.exited()
                self._become("restarting", f"vLLM ended with status {status}.")
                async with self._gate.alone():  # those under way have failed, and no exchange may begin
                    await self._restart()
        except Exception as error:  # nobody watches from now on
            self._become("broken", f"vLLM could not be started again ({_words(error)}).")
            raise

    async def _restart(self) -> None:
        for attempt in range(1, MAX_RESTARTS + 1):
            self.num_restarts += 1
            await self.engine.stop()
            try:
                await self.engine.start(self._weights.folder)
                await self._verify(self._weights)
            except (RmcoreError, OSError) as error:
                self._become("restarting", f"attempt {attempt} of {MAX_RESTARTS} failed: {_words(error)}")
            else:
                self._become("ready")
                return
        await self.engine.stop()
        self._become("broken", f"vLLM did not come back in {MAX_RESTARTS} attempts. {self.reason}")

    def _become(self, state: ServerState, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        print(f"{time.strftime('%H:%M:%S')} {state}{f': {reason}' if reason else ''}", file=sys.stderr, flush=True)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, RmcoreError) else f"{type(error).__name__}: {error}"


class Gate:
    """A gate that requests pass together and an exchange of weights alone.

    A waiting exchange lets no new request in, so it comes to its turn under any load.
    """

    def __init__(self) -> None:
        self._open, self._idle, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._idle.set()
        self._num_inside = 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Be inside with others, after waiting for an exchange that is under way."""
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be inside alone: new requests wait from now on, and those under way are waited for."""
        async with self._turn:
            self._open.clear()
            try:
                await self._idle.wait()
                yield
            finally:
                self._open.set()
