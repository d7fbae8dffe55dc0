"""The processes that train one model together. One process is the common case, and costs nothing here."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rmcore.core.errors import ConfigError

LONGEST_WAIT = timedelta(hours=2)
"""Until a process counts as lost that joins, or reads or writes a large file, and others wait for: `Ranks.patient`."""
TO_BE_ALONE = "Without torchrun or another launcher, unset RANK and WORLD_SIZE: this process then trains alone."


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place among those that train together."""

    rank: int = 0
    world: int = 1
    patient: Any = None
    """The group (`dist.ProcessGroup`) of what may wait for another process's disk; None: the default one."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks; every rank gets the result."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def agree(self, decision: bool) -> bool:
        """Give every rank what rank 0 decided: clocks and signals differ between processes. Waits for no device."""
        if self.world == 1:
            return decision
        flag = torch.tensor(int(decision))
        dist.broadcast(flag, src=0)
        return bool(flag)

    def gather(self, value: object) -> list:
        """One Python value a rank, in rank order, on every rank; a rank may come to it much later than another."""
        if self.world == 1:
            return [value]
        gathered: list = [None] * self.world
        dist.all_gather_object(gathered, value, group=self.patient)
        return gathered

    def wait(self) -> None:
        """Wait until every rank is here, however long one of them reads or writes."""
        if self.world > 1:
            dist.barrier(group=self.patient)

    def check_divides(self, pairs_per_step: int) -> None:
        """Refuse a world size that would leave ranks with unequal work in every step.

        Raises:
            ConfigError: `pairs_per_step` is no multiple of the world size.
        """
        if pairs_per_step % self.world:
            raise ConfigError(
                f"pairs_per_step={pairs_per_step} does not divide among {self.world} processes, so some would idle in "
                f"every step; use a multiple of {self.world}, or start another number of processes."
            )


ALONE = Ranks()
"""One process."""


def environment_ranks() -> Ranks:
    """Read this process's place from what torchrun sets (RANK, WORLD_SIZE); alone where neither is set.

    Raises:
        ConfigError: these name no process among several.
    """
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ConfigError(f"RANK={rank!r} and WORLD_SIZE={world!r} are no place among processes. {TO_BE_ALONE}")
    return Ranks(int(rank), int(world))


def share_of_host() -> tuple[int, int]:
    """Read which process of its host this one is, from 0, and how many of the training run there.

    Raises:
        ConfigError: there are several processes, and the variables that torchrun sets do not tell.
    """
    ranks = environment_ranks()
    if ranks.world == 1:
        return 0, 1
    local = os.environ.get("LOCAL_RANK")
    of = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world) if local == str(ranks.rank) else None)
    if local is None or of is None or int(local) >= int(of):
        raise ConfigError(
            f"RANK={ranks.rank} of WORLD_SIZE={ranks.world}, with LOCAL_RANK={local}, LOCAL_WORLD_SIZE={of}: which "
            "processes share a host is not known. torchrun sets all four; with another launcher set them yourself."
        )
    return int(local), int(of)
