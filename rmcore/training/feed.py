"""The micro-batches of every step, in order, built ahead by worker processes where that pays."""

import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import full_places
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import token_lengths
from rmcore.data.tokenized_observations import TokenizedObservation, side_lengths
from rmcore.models.batching import StepOrder, micro_batches, pair_tokens
from rmcore.models.observation_batching import observation_micro_batches, observation_tokens, padded_tokens
from rmcore.models.packing.layout import Packing
from rmcore.models.plain_batching import plain_micro_batches
from rmcore.training.ranks import Ranks
from rmcore.training.step import Batch

WORKERS_ON_GPU = 2
"""A CPU trains in the time that a worker would take from it; a GPU must not wait for packing or padding."""


class LostWorkerError(TrainingError):
    """The micro-batches of a step did not come from the worker processes; the steps before it are whole."""


@dataclass(frozen=True, slots=True)
class StepFeed(Dataset):
    """Step by number: the positions of its pairs and this rank's micro-batches. A pure function of its fields."""

    pairs: Sequence[TokenizedPair]
    order: Sequence[Sequence[int]]
    """Positions of the pairs of each step."""
    token_budget: int
    pad_id: int
    ranks: Ranks
    packing: Packing | None = None
    plain: bool = False
    """Cut as the usual loop does, see `rmcore.models.plain_batching`."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, step: int) -> tuple[list[int], list[Batch]]:
        indices = list(self.order[step])
        return indices, self.cut(indices, self.token_budget)

    @property
    def named(self) -> str:
        """One of what it feeds, in messages."""
        return "pair"

    def num_terms(self, indices: Sequence[int]) -> float:
        """The number that the summed loss of a step over these positions is divided by."""
        return len(indices)

    def least_budget(self) -> int:
        """Tokens of the largest micro-batch of a single pair: a smaller token budget cannot hold every pair."""
        lengths = token_lengths(self.pairs)  # (P, 2)
        if self.packing is None:
            return 2 * int(lengths.max())
        most, totals = 0, lengths.sum(axis=1)
        for place in map(int, np.argsort(-totals, kind="stable")):  # no list: there may be ten million
            if totals[place] <= most:  # longest first: what is shorter in all than the largest so far cannot be larger
                break
            most = max(most, pair_tokens(self.pairs[place], self.packing))
        return most

    def cut(self, indices: Sequence[int], token_budget: int) -> list[Batch]:
        """Cut the pairs at `indices` under some other budget; gives this rank's micro-batches."""
        pairs = [self.pairs[index] for index in indices]
        if self.plain:
            return [*plain_micro_batches(pairs, token_budget=token_budget, pad_id=self.pad_id)]
        cut = micro_batches(
            pairs,
            token_budget=token_budget,
            pad_id=self.pad_id,
            packing=self.packing,
            rank=self.ranks.rank,
            world=self.ranks.world,
        )
        return [*cut]


@dataclass(frozen=True, slots=True)
class ObservationFeed(StepFeed):
    """The same over observations of any kind."""

    pairs: Sequence[TokenizedObservation]  # type: ignore[assignment]

    @property
    def named(self) -> str:
        """One of what it feeds, in messages; and what to do where it is too large."""
        return "observation, all of its answers (train.objective=pairs takes two at a time),"

    def num_terms(self, indices: Sequence[int]) -> float:
        """Weighted terms of the likelihood."""
        return sum(self.pairs[index].num_terms for index in indices)

    def least_budget(self) -> int:
        """Tokens of the largest observation: a smaller token budget cannot hold every one."""
        lengths = side_lengths(self.pairs)
        if self.packing is None:
            return max(map(padded_tokens, lengths))
        most, totals = 0, np.array([sum(one) for one in lengths])
        for place in map(int, np.argsort(-totals, kind="stable")):
            if totals[place] <= most:  # longest first, as for pairs
                break
            most = max(most, observation_tokens(self.pairs[place], self.packing))
        return most

    def cut(self, indices: Sequence[int], token_budget: int) -> list[Batch]:
        """Cut the observations at `indices` under some other budget; gives this rank's micro-batches."""
        cut = observation_micro_batches(
            [self.pairs[index] for index in indices],
            token_budget=token_budget,
            pad_id=self.pad_id,
            packing=self.packing,
            rank=self.ranks.rank,
            world=self.ranks.world,
        )
        return [*cut]


def make_feed(
    pairs: Sequence[TokenizedPair] | Sequence[TokenizedObservation],
    config: TrainConfig,
    *,
    num_steps: int,
    seed: int,
    token_budget: int,
    pad_id: int,
    ranks: Ranks,
    packing: Packing | None = None,
) -> StepFeed:
    """The feed of a whole training; the same arguments give the same steps, so a resumed run skips what was done.

    Raises:
        ConfigError: plain batching on several processes, or of other observations than pairs.
    """
    plain = config.batching == "plain"
    observed = any(isinstance(one, TokenizedObservation) for one in pairs[:1])
    if plain and observed:
        raise ConfigError(
            "batching=plain is the usual loop over pairs, and these are other observations too; use batching=pairs, or "
            "train on the pairs alone (train.objective=pairs)."
        )
    if plain and ranks.world > 1:
        raise ConfigError(
            f"batching=plain on {ranks.world} processes: its loss is a mean over the micro-batches of a step, which "
            "would depend on how pairs are shared out. Train in one process, or use batching=pairs."
        )
    order = StepOrder(len(pairs), config.pairs_per_step, num_steps, seed)
    kind: Any = ObservationFeed if observed else StepFeed
    return kind(pairs, order, token_budget, pad_id, ranks, packing, plain)


@contextmanager
def steps_from(
    feed: StepFeed, start: int, config: TrainConfig, device: torch.device
) -> Iterator[Iterator[tuple[list[int], list[Batch]]]]:
    """The steps from `start` (steps already done) on, for use inside the block.

    Raises:
        LostWorkerError: a worker process gave nothing for `fetch_timeout_seconds`, or died. The next step is where that
            is raised: what is done with the one before is not disturbed.
    """
    on_gpu = device.type == "cuda"
    workers = (WORKERS_ON_GPU if on_gpu else 0) if config.num_workers is None else config.num_workers
    loader: DataLoader = DataLoader(
        feed,
        batch_size=None,
        sampler=range(start, len(feed)),
        num_workers=workers,
        timeout=config.fetch_timeout_seconds if workers else 0,
        pin_memory=on_gpu,
        generator=torch.Generator(),  # its own: the loader would draw from the one that dropout uses
        collate_fn=_unchanged,
        worker_init_fn=_leave_interruption_to_the_trainer,
    )
    steps: Any = iter(loader)
    if not workers:
        yield steps
        return
    try:
        with closing(_fetched(steps, workers)) as fetched:
            yield fetched
    finally:
        try:  # else torch continues watching them, and the death of any child raises anywhere, however much later
            with suppress(RuntimeError):  # the death that is being reported may be signalled once more meanwhile
                steps._shutdown_workers()
        finally:
            for worker in steps._workers:  # one that hangs ignores the SIGTERM that torch sends in the end
                worker.kill()
                worker.join()


def _fetched(steps: Iterator[Any], workers: int) -> Generator[tuple[list[int], list[Batch]]]:
    """The steps as they come. A tensor is handed over by a socket of the worker's, so a death may show there first.

    torch reports a death by SIGCHLD, wherever the trainer happens to be: in an update, too, which it would cut in half.
    It is heard here alone.
    """
    is_waiting = False

    def hear_if_waiting(number: int, frame: FrameType | None) -> None:
        if is_waiting:
            hear(number, frame)

    hear: Any = signal.getsignal(signal.SIGCHLD)  # torch's, but in a thread of a program that has used it in no other
    is_heard = callable(hear) and threading.current_thread() is threading.main_thread()
    try:
        if is_heard:
            signal.signal(signal.SIGCHLD, hear_if_waiting)
        while True:
            is_waiting = True
            if is_heard:
                hear(signal.SIGCHLD, None)  # of a death meanwhile
            step = next(steps, None)
            is_waiting = False
            if step is None:
                return
            yield step
    except (ConnectionError, EOFError, FileNotFoundError, RuntimeError) as error:
        is_waiting = False  # first of all: the signal of the same death may come only now, and would replace this error
        if isinstance(error, TrainingError) or (isinstance(error, RuntimeError) and "DataLoader" not in str(error)):
            raise
        full = full_places()
        raise LostWorkerError(
            f"the next step's micro-batches did not come from the {workers} worker processes ({error}); "
            f"{full and f'{full}, and '}a worker was killed, often for lack of memory, or the machine is overloaded. "
            "Lower num_workers (0 builds them in this process) or raise fetch_timeout_seconds."
        ) from error
    finally:
        if is_heard:
            signal.signal(signal.SIGCHLD, hear)


def _unchanged(item: Any) -> Any:
    return item


def _leave_interruption_to_the_trainer(worker: int) -> None:
    """Ctrl-C reaches the whole process group, and so does SIGTERM from Slurm, systemd or `timeout`, but the step that
    they let finish may still need its micro-batches. Where the trainer is gone, torch's watch in a worker ends it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
