"""Scoring on a Ray cluster: one reward model a GPU (or core), wherever the cluster has them.

This process reads the source and writes the rewards, so the machines need no common disk for these; the checkpoint each
of them must see under the same name. An actor that dies is started again, elsewhere if its machine is gone and there is
room, and the part that it worked on is scored again.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmcore.config.model import WeightDtype
from rmcore.core.errors import RmcoreError, ServiceError
from rmcore.core.ray_cluster import RayCluster
from rmcore.data.parts import Part
from rmcore.ensembles.bulk import ScoredPart, score_part

if TYPE_CHECKING:
    from types import TracebackType

PARTS_AN_ACTOR = 2
"""Parts that an actor is handed at once: the next one waits there while one is computed, and no more are in memory."""
LOOK_SECONDS = 5.0
"""Between two looks for parts that take too long."""
PATIENCE_SECONDS, PATIENCE_TIMES = 60.0, 3.0
"""A part takes too long after so many seconds, and so many times what the slowest one took."""
MOST_RETRIES = 3
"""Times that a part whose actor died is begun again there, and then elsewhere: one that kills them has a reason."""


@dataclass(frozen=True)
class Loading:
    """How each actor loads the model; arguments of `BradleyTerryRM.from_pretrained`."""

    checkpoint: str
    device: str
    max_seq_len: int | None = None
    render_fn: str | None = None
    dtype: WeightDtype = "float32"


class _Actor:
    """Holds one model and scores parts; runs in a process of Ray's."""

    def __init__(self, loading: Loading) -> None:
        from rmcore.models.reward_model import BradleyTerryRM

        self.refusal: RmcoreError | None = None
        try:
            self.rm = BradleyTerryRM.from_pretrained(
                loading.checkpoint,
                device=loading.device.partition(":")[0],  # Ray shows each actor its GPU and no other
                max_seq_len=loading.max_seq_len,
                render_fn=loading.render_fn,
                dtype=loading.dtype,
            )
        except RmcoreError as error:  # raised here, Ray would tell of a process that died
            self.refusal = error

    def score(self, part: Part) -> ScoredPart:
        if self.refusal is not None:
            raise self.refusal
        return score_part(self.rm, part)

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
        self._lost: set[int] = set()

    def __enter__(self) -> "RayScorer":
        with ExitStack() as stack:
            ray = stack.enter_context(self.cluster).ray
            gpus = 1 if self.cluster.has_gpus(self.loading.device) else 0
            number = self.number or max(1, self.cluster.room(1, gpus))
            self.cluster.require_room(1, gpus, number)
            actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=MOST_RETRIES)(_Actor)
            self.actors = [actor.remote(self.loading) for _ in range(number)]
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._open.close()

    def scored(self, parts: Iterable[Part]) -> Iterator[ScoredPart]:
        """See `Scorer.scored`.

        A part whose actor is lost goes to another one, and that actor gets nothing more unless all are lost. When no
        part is left to hand out, one that takes far longer than all before it is also given to an actor that
        has nothing to do, and whichever is done first counts: its machine may be gone for good (backup tasks: Dean and
        Ghemawat 2004, section 3.6).

        Raises:
            ServiceError: a part's actors died again and again; what was scored is kept.
            RmcoreError: what an actor refused with.
        """
        waiting = iter(parts)
        part = next(waiting, None)
        running: dict[Any, _Given] = {}
        open_parts: set[int] = set()
        self._lost.clear()
        tries = Counter[int]()
        slowest = 0.0
        while part is not None or open_parts:
            while part is not None and len(running) < PARTS_AN_ACTOR * max(1, len(self.actors) - len(self._lost)):
                self._give(part, running)
                open_parts.add(part.number)
                part = next(waiting, None)
            done = self.cluster.first_of(list(running), timeout=LOOK_SECONDS)
            if done is None:
                if part is None:
                    self._back_up(running, open_parts, max(PATIENCE_SECONDS, PATIENCE_TIMES * slowest))
                continue
            given = running.pop(done)
            number = given.part.number
            scored, lost = self.cluster.outcome(done)
            if lost:
                self._lost.add(given.actor)
                tries[number] += 1
                if tries[number] > MOST_RETRIES:
                    raise ServiceError(
                        f"{tries[number]} processes of the Ray cluster died over part {number}, often for lack of "
                        f"memory: make the parts smaller with --part-rows. What was scored is kept. ({lost})"
                    )
                if number in open_parts:
                    self._give(given.part, running)
                continue
            slowest = max(slowest, time.monotonic() - given.since)
            if number in open_parts:
                open_parts.remove(number)
                yield scored

    def _give(self, part: Part, running: dict[Any, "_Given"]) -> None:
        """Hand a part to the actor with the least to do, of those that are not lost."""
        busy = Counter(given.actor for given in running.values())
        which = min(range(len(self.actors)), key=lambda place: (place in self._lost, busy[place]))
        running[self.actors[which].score.remote(part)] = _Given(part, which, time.monotonic())

    def _back_up(self, running: dict[Any, "_Given"], open_parts: set[int], patience: float) -> None:
        idle = set(range(len(self.actors))) - {given.actor for given in running.values()} - self._lost
        times = Counter(given.part.number for given in running.values())
        for given in list(running.values()):
            number = given.part.number
            late = time.monotonic() - given.since > patience
            if late and idle and times[number] == 1 and number in open_parts:
                idle.pop()
                self._give(given.part, running)  # which takes one with nothing to do
                print(
                    f"note: part {number} has taken {patience:.0f} s and more: another process scores it, too",
                    file=sys.stderr,
                )


@dataclass(frozen=True)
class _Given:
    """A part that an actor was handed."""

    part: Part
    actor: int
    since: float
