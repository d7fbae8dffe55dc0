"""Scoring by vLLM servers that are started for it, one a GPU, and ended after it.

Texts become tokens here, as the model reads them, so that a row which it cannot read costs that row alone. The servers
answer this process only: on loopback, on ports of their own, with a token that no other process is told.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch

from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.data.parts import Part
from rmcore.data.rendering import Renderer, TokenizedSide
from rmcore.ensembles.bulk import ScoredPart, score_part
from rmcore.models.trained import load_renderer
from rmcore.serving.client import RewardClient
from rmcore.serving.server import RewardServer, ServeSettings
from rmcore.serving.vllm_process import EngineDtype

REQUEST_TIMEOUT_S = 600.0
"""Longest wait for a batch. Nobody else is served, so a late answer means a slow machine and not a busy server."""


@dataclass(frozen=True)
class ServedSides:
    """A served reward model as what scores sides; see `rmcore.ensembles.score.SideScorer`."""

    renderer: Renderer
    client: RewardClient

    def score_sides(self, sides: Sequence[TokenizedSide], *, report: Report = silent) -> np.ndarray:
        """Rewards of N sides: (N,) float32 in logits. `report` is told at the end.

        Raises:
            ServingError, NotReadyError, RequestError: as `RewardClient.score`.
        """
        rewards = self.client.score([side.ids for side in sides]).rewards
        report(len(sides), len(sides), "sides")
        return np.array(rewards, dtype=np.float32)


class VllmScorer:
    """Scores parts by vLLM, for as long as the block runs.

    Args:
        checkpoint: a folder, or a hub name.
        max_seq_len: tokens of a side; None: as recorded.
        render_fn: the checkpoint's rendering function, as `module:function`, where it has one.
        number: of servers; None: one for each GPU that this process sees, and one without any.
        dtype: what vLLM computes in.

    Raises:
        ConfigError: there are GPUs, and fewer than servers.
        RmcoreError: on entering, as `rmcore.serving.server.serve`.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        max_seq_len: int | None = None,
        render_fn: str | None = None,
        number: int | None = None,
        dtype: EngineDtype = "float32",
    ) -> None:
        self._settings = ServeSettings(checkpoint, port=0, dtype=dtype, max_seq_len=max_seq_len, render_fn=render_fn)
        self._gpus = _visible_gpus()
        self._number = number or max(1, len(self._gpus))
        if self._gpus and self._number > len(self._gpus):
            raise ConfigError(
                f"--actors {self._number}, and {len(self._gpus)} GPUs are seen: vLLM wants one for itself."
            )
        self.servers: list[RewardServer] = []

    def __enter__(self) -> "VllmScorer":
        settings = self._settings
        renderer = load_renderer(settings.checkpoint, max_seq_len=settings.max_seq_len, render_fn=settings.render_fn)
        with ExitStack() as stack:
            self.servers = [RewardServer(settings, environment=self._place(place)) for place in range(self._number)]
            for server in self.servers:
                stack.callback(server.stop)  # also those that did start where another one failed
            with ThreadPoolExecutor(self._number) as starting:  # each takes half a minute and more
                list(starting.map(RewardServer.__enter__, self.servers))
            clients = [stack.enter_context(one.client(timeout_s=REQUEST_TIMEOUT_S)) for one in self.servers]
            self._free: SimpleQueue[ServedSides] = SimpleQueue()
            for client in clients:
                self._free.put(ServedSides(renderer, client))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def scored(self, parts: Iterable[Part]) -> Iterator[ScoredPart]:
        """See `rmcore.ensembles.bulk.Scorer.scored`; each server has one part, and the next one waits.

        Raises:
            ServingError, NotReadyError, RequestError: as `RewardClient.score`; what was scored is kept.
        """
        pool = ThreadPoolExecutor(self._number)
        running: set[Future[ScoredPart]] = set()
        try:
            for part in parts:
                running.add(pool.submit(self._score, part))
                if len(running) > self._number:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from _whole(done, running)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from _whole(done, running)
        finally:  # on Ctrl-C nobody waits for parts of many minutes: the servers end, and with them the requests
            pool.shutdown(wait=False, cancel_futures=True)

    def _score(self, part: Part) -> ScoredPart:
        sides = self._free.get()
        try:
            return score_part(sides, part)
        finally:
            self._free.put(sides)

    def _place(self, place: int) -> Mapping[str, str]:
        """Give each server a GPU of its own, where there are some."""
        return {"CUDA_VISIBLE_DEVICES": self._gpus[place]} if self._gpus else {}


def _whole(done: set[Future[ScoredPart]], running: set[Future[ScoredPart]]) -> Iterator[ScoredPart]:
    """The parts that are done; before an error those that came through, also of those that still run."""
    failed = next((one for one in done if one.exception() is not None), None)
    if failed is not None:
        done = done | wait([one for one in running if not one.cancel()]).done
    yield from (one.result() for one in done if one.exception() is None)
    if failed is not None:
        failed.result()


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = torch.cuda.device_count()
    return [one.strip() for one in named.split(",")][:there] if named else [str(index) for index in range(there)]
