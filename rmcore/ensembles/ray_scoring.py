"""Scoring on a Ray cluster: one reward model a GPU (or core), wherever the cluster has them.

This process reads the source and writes the rewards, so the machines need no common disk for these; the checkpoint each
of them must see under the same name. An actor that dies, or whose machine does, is started again elsewhere, and the
part that it worked on is scored again.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from rmcore.core.ray_cluster import RayCluster
from rmcore.data.parts import Part
from rmcore.ensembles.bulk import score_part

if TYPE_CHECKING:
    from types import TracebackType

PARTS_AN_ACTOR = 2
"""Parts that an actor is handed at once: the next one waits there while one is computed, and no more are in memory."""
MOST_RETRIES = 3
"""Times that a part is given to another actor whose actor died; one that kills four has a reason of its own."""


@dataclass(frozen=True)
class Loading:
    """How each actor loads the model; arguments of `BradleyTerryRM.from_pretrained`."""

    checkpoint: str
    device: str
    max_seq_len: int | None = None
    render_fn: str | None = None


class _Actor:
    """Holds one model and scores parts; runs in a process of Ray's."""

    def __init__(self, loading: Loading) -> None:
        from rmcore.models.reward_model import BradleyTerryRM

        self.rm = BradleyTerryRM.from_pretrained(
            loading.checkpoint,
            device=loading.device,
            max_seq_len=loading.max_seq_len,
            render_fn=loading.render_fn,
        )

    def score(self, part: Part) -> tuple[int, pd.DataFrame]:
        return part.number, score_part(self.rm, part)

    def pid(self) -> int:
        return os.getpid()


class RayScorer:
    """Scores parts by actors of a Ray cluster, for as long as the block runs.

    Args:
        loading: the model.
        number: of actors; None: as many as the cluster has room for.

    Raises:
        ConfigError, ServiceError: on entering; see `RayCluster`, and `RayCluster.room`.
    """

    def __init__(self, loading: Loading, number: int | None = None) -> None:
        self.loading, self.number = loading, number
        self.cluster = RayCluster("--engine ray")
        self.actors: list[Any] = []

    def __enter__(self) -> "RayScorer":
        with ExitStack() as stack:
            ray = stack.enter_context(self.cluster).ray
            number = self.cluster.room(self.loading.device, self.number)
            gpus = 1 if self.cluster.has_gpus(self.loading.device) else 0
            actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=MOST_RETRIES)(_Actor)
            self.actors = [actor.remote(self.loading) for _ in range(number)]
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._open.close()

    def scored(self, parts: Iterable[Part]) -> Iterator[tuple[int, pd.DataFrame]]:
        """See `Scorer.scored`.

        Raises:
            ServiceError: a part's actors died again and again; what was scored is kept.
            RmcoreError: what an actor refused with.
        """
        busy: Counter[int] = Counter()
        running: dict[Any, int] = {}
        waiting = iter(parts)
        part = next(waiting, None)
        while part is not None or running:
            while part is not None and len(running) < PARTS_AN_ACTOR * len(self.actors):
                which = min(range(len(self.actors)), key=lambda place: busy[place])
                running[self.actors[which].score.remote(part)] = which
                busy[which] += 1
                part = next(waiting, None)
            done = self.cluster.first_of(list(running))
            busy[running.pop(done)] -= 1
            yield self.cluster.result(done)
