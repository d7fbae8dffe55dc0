"""Micro-batches under a token budget that never separate the two sides of a pair.

Where the model supports it, a micro-batch is one packed row (`rmcore.models.packing.layout`) without padding, in which
a pair's common prompt is computed once. Every division into micro-batches then computes the same tokens, so the pairs
of a step are distributed evenly over as few micro-batches as the budget allows (`even_shares`).

Otherwise the pairs are sorted by length and divided into micro-batches, each padded to its own longest side. More and
smaller micro-batches compute less padding, but each has a fixed overhead. `pack_pairs` finds the division of least
cost exactly: an optimal grouping of sorted lengths is contiguous, so it is a shortest path.

Losses are sums that are divided once per step, so the division into micro-batches does not change the gradient. That is
otherwise with `plain_micro_batches`, those of the usual hand-written loop, which it is compared with.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.packing.layout import (
    Packing,
    PaddedRows,
    Rows,
    cut_into_runs,
    find_groups,
    first_equals,
    group_tokens,
    pack_sides,
    pad_rows,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Batch = TypeVar("Batch", bound="DataclassInstance")
MICRO_BATCH_OVERHEAD_TOKENS = 128
"""Fixed cost of one more forward/backward, in the time of computing that many tokens.

Measured on 2 CPU cores (table and command in
benchmarks/results/micro-batches.md): the optimum is flat from 64 to 128 for a 1.3 M and a 22 M model alike.
"""


PACKED_TOKENS_ON_CPU = 4096
"""Tokens of a packed micro-batch beyond which a CPU gets no faster.

Measured: table and command in benchmarks/results/micro-batches.md.
"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward/backward: P whole pairs as R = 2P sides, the P chosen sides first, then their rejected sides."""

    rows: Rows
    target_margins: Tensor  # (P,) float32, annotated strength of each preference, NaN where not annotated
    indices: tuple[int, ...]  # positions of the P pairs in the list of the step
    idle: bool = False  # computed so that all ranks run equally many micro-batches; does not count
    weight: float = 1.0  # factor of its pairs in the gradient; logged means weight all pairs equally

    @property
    def labels(self) -> Tensor:
        """The target margins, which the loss receives together with the rows."""
        return self.target_margins

    @property
    def num_pairs(self) -> int:
        """Number of pairs that count in this micro-batch: P, or 0 if it is idle."""
        return 0 if self.idle else len(self.indices)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`; from page-locked memory the copy is asynchronous."""
        margins = self.target_margins.to(device, non_blocking=True)
        return replace(self, rows=self.rows.to(device), target_margins=margins)

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return replace(self, rows=self.rows.pin_memory(), target_margins=self.target_margins.pin_memory())


def pack_pairs(
    lengths: Sequence[int], token_budget: int, *, overhead_tokens: int = MICRO_BATCH_OVERHEAD_TOKENS
) -> list[list[int]]:
    """Group pairs into padded micro-batches of least total cost under a token budget.

    The cost of a micro-batch is its padded tokens, 2 x pairs x longest, plus `overhead_tokens`.

    Args:
        lengths: (P,) tokens of the longer side of each pair.
        token_budget: maximum of padded tokens in one micro-batch.
        overhead_tokens: fixed cost of a micro-batch in tokens.

    Returns:
        Micro-batches as lists of positions in `lengths`, longest pairs first, so that the first one needs the most
        memory. Every position occurs exactly once.

    Raises:
        ConfigError: a single pair exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if order and 2 * lengths[order[-1]] > token_budget:
        raise ConfigError(
            f"token_budget={token_budget} cannot hold one pair of 2 x {lengths[order[-1]]} tokens; "
            f"raise token_budget to at least {2 * lengths[order[-1]]} or lower max_seq_len."
        )
    # cost[j]: least cost of the j shortest pairs; cut[j]: start of the last micro-batch in that optimum.
    cost, cut = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        first = max(0, end - token_budget // (2 * longest))
        start = min(range(first, end), key=lambda s: cost[s] + 2 * (end - s) * longest)
        cost.append(cost[start] + 2 * (end - start) * longest + overhead_tokens)
        cut.append(start)
    return cut_into_runs(order, cut)


def even_shares(costs: Sequence[int], token_budget: int, *, num_ranks: int, aim: int) -> list[list[list[int]]]:
    """Distribute pairs over ranks and micro-batches so that all micro-batches cost about the same.

    The longest remaining pair goes to the emptiest micro-batch (Graham 1969): the largest micro-batch is then at most
    4/3 of the best possible one.

    Args:
        costs: (P,) tokens of each pair.
        token_budget: maximum of tokens in one micro-batch.
        num_ranks: number of processes that compute a step together.
        aim: desired tokens of a micro-batch; a single larger pair may exceed it, up to the budget.

    Returns:
        For each rank the same number of micro-batches as lists of positions in `costs`, largest first; some are empty
        if there are fewer pairs than micro-batches.

    Raises:
        ConfigError: a single pair exceeds the budget.
    """
    order = sorted(range(len(costs)), key=lambda index: costs[index], reverse=True)
    check_budget(token_budget, max(costs, default=0))
    enough = math.ceil(sum(costs) / (num_ranks * min(aim, token_budget)))
    count = max(1, min(enough, math.ceil(len(costs) / num_ranks)))  # more would stay empty
    while True:
        emptiest = [(0, number) for number in range(num_ranks * count)]
        bins: list[list[int]] = [[] for _ in emptiest]
        for index in order:
            load, number = heapq.heappop(emptiest)
            bins[number].append(index)
            heapq.heappush(emptiest, (load + costs[index], number))
        if max(load for load, _ in emptiest) <= token_budget:
            break
        count += 1
    largest_first = [bins[number] for _, number in sorted(emptiest, reverse=True)]
    return [largest_first[rank::num_ranks] for rank in range(num_ranks)]


def check_budget(token_budget: int, largest: int, what: str = "pair") -> None:
    """Check that the largest pair, of `largest` computed tokens, fits into the budget.

    Raises:
        ConfigError: it does not fit.
    """
    if largest > token_budget:
        raise ConfigError(
            f"token_budget={token_budget} cannot hold one {what} of {largest} tokens; raise token_budget to at least "
            f"{largest} or lower max_seq_len."
        )


def pair_tokens(pair: TokenizedPair, packing: Packing) -> int:
    """Return the number of tokens that a pair takes in a packed row."""
    return group_tokens([pair.chosen.ids, pair.rejected.ids], packing)


def collate(
    pairs: Sequence[TokenizedPair], indices: Sequence[int], *, pad_id: int, packing: Packing | None = None
) -> MicroBatch:
    """Return one micro-batch of the pairs at `indices`: packed as `packing` says, or right-padded where it is None."""
    chosen = [pairs[index].chosen.ids for index in indices]
    rejected = [pairs[index].rejected.ids for index in indices]
    if packing is None:
        rows: Rows = pad_rows(chosen + rejected, pad_id=pad_id)
    else:
        groups = [[at, len(chosen) + at] for at in range(len(chosen))]
        rows = pack_sides(chosen + rejected, groups, packing)
    margins = [pairs[index].target_margin for index in indices]
    target_margins = torch.tensor([math.nan if margin is None else margin for margin in margins], dtype=torch.float32)
    return MicroBatch(rows, target_margins, tuple(indices))


def pad_pairs(pairs: Sequence[TokenizedPair], *, pad_id: int) -> PaddedRows:
    """Return all `pairs` as the padded rows of one micro-batch, chosen sides first."""
    return pad_rows([pair.chosen.ids for pair in pairs] + [pair.rejected.ids for pair in pairs], pad_id=pad_id)


def micro_batches(
    pairs: Sequence[TokenizedPair],
    *,
    token_budget: int,
    pad_id: int,
    packing: Packing | None = None,
    rank: int = 0,
    world: int = 1,
) -> list[MicroBatch]:
    """Return the micro-batches of one step that process `rank` of `world` computes; each has the same number of them.

    Every process computes this from the same list. A process with fewer micro-batches than another adds idle ones of
    the shortest pair, because all processes gather sharded weights together.
    """
    if packing is None:
        lengths = [pair.num_tokens for pair in pairs]
        shares = _padded_shares(lengths, token_budget, world)
    else:
        aim = row_tokens(token_budget, packing)
        lengths = [pair_tokens(pair, packing) for pair in pairs]
        shares = even_shares(lengths, token_budget, num_ranks=world, aim=aim)
    return with_idle_ones(shares, rank, lengths, partial(collate, pairs, pad_id=pad_id, packing=packing))


def with_idle_ones(
    shares: Sequence[Sequence[Sequence[int]]],
    rank: int,
    costs: Sequence[int],
    collate: Callable[[Sequence[int]], Batch],
) -> list[Batch]:
    """Return the micro-batches of one rank, with idle ones of the cheapest item until all ranks have equally many.

    Args:
        shares: for each rank its micro-batches as lists of positions; empty lists are ignored.
        rank: the rank whose micro-batches are built.
        costs: cost of each item.
        collate: builds a micro-batch from positions.
    """
    own = [collate(group) for group in shares[rank] if group]
    missing = max(sum(map(bool, share)) for share in shares) - len(own)
    if not missing:
        return own
    cheapest = min(range(len(costs)), key=costs.__getitem__)
    return own + missing * [replace(collate([cheapest]), idle=True)]


def row_tokens(token_budget: int, packing: Packing) -> int:
    """Return the tokens of a packed row beyond which a larger one is not faster."""
    return min(token_budget, PACKED_TOKENS_ON_CPU) if packing.kernel == "sdpa" else token_budget


def _padded_shares(lengths: Sequence[int], token_budget: int, world: int) -> list[list[list[int]]]:
    """Return each rank's micro-batches. Pairs by length go to ranks 0 to n, then n to 0, which balances tokens."""
    if world == 1:
        return [pack_pairs(lengths, token_budget)]
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    turns = [*range(world), *reversed(range(world))]
    owned = [[index for at, index in enumerate(order) if turns[at % len(turns)] == rank] for rank in range(world)]
    return [
        [[share[position] for position in group] for group in pack_pairs([lengths[i] for i in share], token_budget)]
        for share in owned
    ]


def distinct_sides(sides: Sequence[TokenizedSide]) -> tuple[list[TokenizedSide], np.ndarray]:
    """Return the D distinct sides of N sides, and the index of each side among them: (N,) int.

    Each distinct side is computed once, so equal sides of one call have equal rewards to the last bit, and a tie is a
    tie.
    """
    firsts = np.array(first_equals([side.ids for side in sides]), dtype=np.int64)
    different, which = np.unique(firsts, return_inverse=True)  # in the order of their first places
    return [sides[at] for at in different], which


def scoring_chunks(sides: Sequence[list[int]], *, token_budget: int, packing: Packing | None) -> list[list[list[int]]]:
    """Divide S sides into batches for scoring, each of at most `token_budget` computed tokens or of one side.

    Returns:
        Batches as lists of groups, groups as lists of positions in `sides`. In packed rows, the sides of a group share
        a prefix, also across pairs. Longest first; every position occurs exactly once.
    """
    if packing is None:
        order = sorted(range(len(sides)), key=lambda index: len(sides[index]), reverse=True)
        chunks: list[list[list[int]]] = []
        done = 0
        while done < len(order):
            count = max(1, token_budget // len(sides[order[done]]))
            chunks.append([[index] for index in order[done : done + count]])
            done += count
        return chunks
    most = row_tokens(token_budget, packing)
    groups = find_groups(sides, most_tokens=most) if packing.causal else [[index] for index in range(len(sides))]
    costs = [group_tokens([sides[index] for index in group], packing) for group in groups]
    chunks, room = [], 0
    for cost, group in sorted(zip(costs, groups, strict=True), reverse=True):
        if cost > room:
            chunks.append([])
            room = most
        chunks[-1].append(group)
        room -= cost
    return chunks


class StepOrder(Sequence[list[int]]):
    """The pairs of each of `num_steps` optimizer steps; every epoch is a new permutation of all pairs.

    A pure function of its arguments, so a resumed training computes it again and skips the steps that are done. The
    last step of an epoch may be smaller; within an epoch every pair occurs exactly once. Memory holds one epoch's
    permutation, eight bytes per pair.
    """

    def __init__(self, num_pairs: int, pairs_per_step: int, num_steps: int, seed: int) -> None:
        self._num_pairs, self._pairs_per_step, self._num_steps, self._seed = num_pairs, pairs_per_step, num_steps, seed
        self._steps_an_epoch = max(1, math.ceil(num_pairs / pairs_per_step))
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._num_steps

    @overload
    def __getitem__(self, step: int) -> list[int]: ...
    @overload
    def __getitem__(self, step: slice) -> list[list[int]]: ...
    def __getitem__(self, step: int | slice) -> list[int] | list[list[int]]:
        if isinstance(step, slice):
            return [self[index] for index in range(*step.indices(len(self)))]
        if not 0 <= step < self._num_steps:
            raise IndexError(f"step {step} of {self._num_steps}")
        epoch, place = divmod(step, self._steps_an_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._drawn(np.random.default_rng((self._seed, epoch)))
        start = place * self._pairs_per_step
        return self._epoch[1][start : start + self._pairs_per_step].tolist()

    def _drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Return the order of the pairs in an epoch: (P,) int."""
        return rng.permutation(self._num_pairs)


def plain_groups(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Fill micro-batches in the given order; a new one begins where the next pair exceeds the token budget.

    Args:
        lengths: (P,) tokens of the longer side of each pair.
        token_budget: most padded tokens in one micro-batch, 2 x pairs x longest.

    Returns:
        Runs of positions in `lengths`, which joined are 0 .. P - 1.

    Raises:
        ConfigError: one pair alone exceeds the budget.
    """
    check_budget(token_budget, 2 * max(lengths, default=0))
    groups: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not groups or 2 * (len(groups[-1]) + 1) * longest > token_budget:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return groups


def plain_micro_batches(pairs: Sequence[TokenizedPair], *, token_budget: int, pad_id: int) -> list[MicroBatch]:
    """The micro-batches of a step of P pairs, in the order of `pairs`.

    Of B micro-batches one with p pairs weighs P / (B p): the trainer divides its summed loss by P
    (`rmcore.training.step`), so what it adds to the step's loss is its own mean divided by B.
    """
    groups = plain_groups([pair.num_tokens for pair in pairs], token_budget)
    return [
        replace(collate(pairs, group, pad_id=pad_id), weight=len(pairs) / (len(groups) * len(group)))
        for group in groups
    ]
