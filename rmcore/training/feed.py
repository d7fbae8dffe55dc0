"""The micro-batches of every step, in order, built ahead of time by worker processes on a GPU."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from rmcore.models.batching import MicroBatch, StepOrder, micro_batches, pair_tokens, plain_micro_batches
from rmcore.models.observation_batching import (
    ObservationBatch,
    observation_micro_batches,
    observation_tokens,
    padded_tokens,
)
from rmcore.models.packing.layout import Packing
from rmcore.training.ranks import Ranks
from rmcore.training.resume import is_of_a_worker

Batch = MicroBatch | ObservationBatch
FETCH_SECONDS = 300.0
"""Longest wait for the micro-batches of a step, which take milliseconds: a worker that hangs ends the training."""
WORKERS_ON_GPU = 2
"""Workers keep a GPU from waiting for packing and padding. On a CPU they would take time from the training."""


@dataclass(frozen=True, slots=True)
class StepFeed(Dataset):
    """Maps a step's number to its pairs' positions and this rank's micro-batches. A pure function of its fields."""

    pairs: Sequence[TokenizedPair]
    order: Sequence[Sequence[int]]
    """Positions of the pairs of each step."""
    token_budget: int
    pad_id: int
    ranks: Ranks
    packing: Packing | None = None
    plain: bool = False
    """Whether to build micro-batches as common training loops do; see `rmcore.models.batching`."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, step: int) -> tuple[list[int], list[Batch]]:
        indices = list(self.order[step])
        return indices, self.cut(indices, self.token_budget)

    @property
    def named(self) -> str:
        """The name of one item, for messages."""
        return "pair"

    def num_terms(self, indices: Sequence[int]) -> float:
        """Return the divisor of the summed loss of a step over these positions."""
        return len(indices)

    def least_budget(self) -> int:
        """Return the least token budget that holds every pair: the tokens of the largest micro-batch of one pair."""
        lengths = token_lengths(self.pairs)  # (P, 2)
        if self.packing is None:
            return 2 * int(lengths.max())
        return self._most_packed(lengths.sum(axis=1), partial(pair_tokens, packing=self.packing))

    def _most_packed(self, totals: np.ndarray, tokens_of: Callable[[Any], int]) -> int:
        """Most tokens that an item takes in a packed row, of items of so many tokens in all."""
        most = 0
        for place in map(int, np.argsort(-totals, kind="stable")):  # not a list: there may be ten million
            if totals[place] <= most:  # sorted by total length: the rest cannot be larger
                break
            most = max(most, tokens_of(self.pairs[place]))
        return most

    def cut(self, indices: Sequence[int], token_budget: int) -> list[Batch]:
        """Return this rank's micro-batches of the pairs at `indices` under the given budget."""
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
    """A feed of observations of any kind."""

    pairs: Sequence[TokenizedObservation]  # type: ignore[assignment]

    @property
    def named(self) -> str:
        """The name of one item, for messages, with the setting that splits it."""
        return "observation, all of its answers (train.objective=pairs takes two at a time),"

    def num_terms(self, indices: Sequence[int]) -> float:
        """Return the number of weighted likelihood terms at these positions."""
        return sum(self.pairs[index].num_terms for index in indices)

    def least_budget(self) -> int:
        """Return the least token budget that holds every observation: the tokens of the largest one."""
        lengths = side_lengths(self.pairs)
        if self.packing is None:
            return max(map(padded_tokens, lengths))
        totals = np.array([sum(one) for one in lengths])
        return self._most_packed(totals, partial(observation_tokens, packing=self.packing))

    def cut(self, indices: Sequence[int], token_budget: int) -> list[Batch]:
        """Return this rank's micro-batches of the observations at `indices` under the given budget."""
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
    """Return the feed of a whole training. The same arguments give the same steps, so a resumed run skips those done.

    Raises:
        ConfigError: plain batching on several processes, or of observations other than pairs.
    """
    plain = config.batching == "plain"
    observed = any(isinstance(one, TokenizedObservation) for one in pairs[:1])
    if plain and observed:
        raise ConfigError(
            "batching=plain is a loop over pairs, and the training data have other observations too. Use "
            "batching=pairs, or train on the pairs alone (train.objective=pairs)."
        )
    if plain and ranks.world > 1:
        raise ConfigError(
            f"batching=plain on {ranks.world} processes: its loss is a mean over the micro-batches of a step, which "
            "would depend on the number of processes. Train in one process, or use batching=pairs."
        )
    order = StepOrder(len(pairs), config.pairs_per_step, num_steps, seed)
    kind: Any = ObservationFeed if observed else StepFeed
    return kind(pairs, order, token_budget, pad_id, ranks, packing, plain)


@contextmanager
def steps_from(
    feed: StepFeed, start: int, config: TrainConfig, device: torch.device
) -> Iterator[Iterator[tuple[list[int], list[Batch]]]]:
    """Provide the steps from number `start` (the steps already done) on, inside the block.

    Raises:
        TrainingError: a worker process delivered nothing for `FETCH_SECONDS`, or died.
    """
    on_gpu = device.type == "cuda"
    workers = (WORKERS_ON_GPU if on_gpu else 0) if config.num_workers is None else config.num_workers
    loader: DataLoader = DataLoader(
        feed,
        batch_size=None,
        sampler=range(start, len(feed)),
        num_workers=workers,
        timeout=FETCH_SECONDS if workers else 0,
        pin_memory=on_gpu,
        generator=torch.Generator(),  # else the loader draws from the generator that dropout uses
        collate_fn=_unchanged,
        worker_init_fn=_leave_interruption_to_the_trainer,
    )
    steps: Any = iter(loader)
    if not workers:
        yield steps
        return
    try:
        yield _fetched(steps)
    except RuntimeError as error:
        if not is_of_a_worker(error):
            raise
        full = full_places()
        raise TrainingError(
            f"the {workers} worker processes did not deliver the next step's micro-batches ({error}): "
            f"{full and f'{full}, and '}a worker was killed, often for lack of memory, or the machine is overloaded. "
            "Lower num_workers (0 builds them in this process). The same command resumes from the last state."
        ) from error
    finally:
        try:  # else torch continues to watch them, and the death of any child process raises, however much later
            with suppress(RuntimeError):  # torch may signal the reported death a second time
                steps._shutdown_workers()
        finally:
            for worker in steps._workers:  # one that hangs ignores the SIGTERM that torch sends
                worker.kill()
                worker.join()


def _fetched(steps: Iterator[Any]) -> Iterator[tuple[list[int], list[Batch]]]:
    """Yield the steps. A worker passes tensors through a socket, so its death may show as an error of that first."""
    try:
        yield from steps
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        raise RuntimeError(f"DataLoader worker cannot be reached: {error}") from error


def _unchanged(item: Any) -> Any:
    return item


def _leave_interruption_to_the_trainer(worker: int) -> None:
    """Ignore the signals that stop a training, in a worker process.

    Ctrl-C reaches the whole process group, and so does SIGTERM from Slurm, systemd or `timeout`, and the trainer may
    still need micro-batches for the step that it finishes. When the trainer has ended, torch's own check in the worker
    ends the worker.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
