"""Scoring on a Ray cluster: one reward model a GPU (or core), wherever the cluster has them.

This process reads the source and writes the rewards, so the machines need no common disk for these; the checkpoint each
of them must see under the same name. An actor that dies, or whose machine does, is started again elsewhere, and the
part that it worked on is scored again.
"""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.data.parts import Part
from rmcore.ensembles.bulk import score_part

if TYPE_CHECKING:
    from types import TracebackType

ADDRESS, MODE, TOKEN = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
LOOPBACK = "127.0.0.2"
"""Ray turns 127.0.0.1 into the address of a network interface, and would listen there."""
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
    """Scores parts by actors of a Ray cluster; a context that ends them.

    The cluster is that of RAY_ADDRESS; without one this machine is a cluster of its own for as long as the block runs.

    Args:
        loading: the model.
        number: of actors; None: as many as the cluster has room for.

    Raises:
        ConfigError: Ray is not installed, the cluster has no login, or it has no room for so many actors, which would
            be waited for for ever.
        ServiceError: no cluster answers at that address.
    """

    def __init__(self, loading: Loading, number: int | None = None) -> None:
        address = os.environ.get(ADDRESS)
        _require_login(address)
        try:
            import ray  # which reads the variables of the login
        except ImportError as error:
            raise ConfigError(
                "--engine ray needs Ray: pip install 'rm-optimizer[cluster]', on all machines of the cluster."
            ) from error
        self._ray: Any = ray
        try:
            ray.init(
                address=address,
                include_dashboard=None if address else False,
                _node_ip_address=None if address else LOOPBACK,
                logging_level=logging.WARNING,
                log_to_driver=False,
            )
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            raise ServiceError(
                f"no Ray cluster answers at {address or 'this machine'} ({str(error).splitlines()[0]}): see that it "
                f"runs, and that {MODE} and {TOKEN} are those that it was started with."
            ) from error
        needs = "GPU" if self._has_gpus(loading.device) else "CPU"
        self.number = self._room(needs, number)
        actor = ray.remote(num_cpus=1, num_gpus=1 if needs == "GPU" else 0)(_Actor)
        self.actors: list[Any] = [
            actor.options(max_restarts=-1, max_task_retries=MOST_RETRIES).remote(loading) for _ in range(self.number)
        ]

    def __enter__(self) -> "RayScorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._ray.shutdown()

    def _has_gpus(self, device: str) -> bool:
        wanted = device.partition(":")[0]
        return wanted == "cuda" or (wanted == "auto" and self._ray.cluster_resources().get("GPU", 0) > 0)

    def _room(self, needs: str, number: int | None) -> int:
        free = int(min(self._ray.available_resources().get(name, 0) for name in {needs, "CPU"}))
        if free < (number or 1):
            raise ConfigError(
                f"the Ray cluster has room for {free} actors now, each with one {needs}, and {number or 1} are asked "
                "for: they would wait for ever. Ask for fewer with --actors, or wait until it is free."
            )
        return number or free

    def scored(self, parts: Iterable[Part]) -> Iterator[tuple[int, pd.DataFrame]]:
        """See `Scorer.scored`.

        Raises:
            ServiceError: a part's actors died again and again.
            RmcoreError: what an actor refused with.
        """
        busy: Counter[int] = Counter()
        running: dict[Any, int] = {}
        waiting = iter(parts)
        part = next(waiting, None)
        while part is not None or running:
            while part is not None and len(running) < PARTS_AN_ACTOR * self.number:
                which = min(range(self.number), key=lambda place: busy[place])
                running[self.actors[which].score.remote(part)] = which
                busy[which] += 1
                part = next(waiting, None)
            [done], _ = self._ray.wait(list(running), num_returns=1)
            busy[running.pop(done)] -= 1
            yield self._result(done)

    def _result(self, done: Any) -> tuple[int, pd.DataFrame]:
        try:
            found: tuple[int, pd.DataFrame] = self._ray.get(done)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayActorError as error:
            raise ServiceError(
                f"the processes that scored one part died {MOST_RETRIES + 1} times, often for lack of memory: make the "
                f"parts smaller with --part-rows. What was scored is kept. ({str(error).splitlines()[0]})"
            ) from error
        return found


def _require_login(address: str | None) -> None:
    """A cluster without one lets everybody who reaches its ports run code; our own gets one."""
    if address is None:
        os.environ.setdefault(MODE, "token")
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
        # Ray's own 15 starves its processes on a machine that has something else to do: minutes for their imports.
        os.environ.setdefault("RAY_worker_niceness", "0")
    if os.environ.get(MODE) != "token" or not os.environ.get(TOKEN):
        raise ConfigError(
            f"the Ray cluster at {address} is to be used without a login, which lets everybody who reaches it run "
            f"code: start it with {MODE}=token and {TOKEN} (32 characters or more), and set both here to the same."
        )
