"""Token-budget micro-batches that never cut a pair.

Where the model allows it, a micro-batch is one packed row (`rmcore.models.packing.layout`): no padding, a pair's
common prompt once. Then any cut computes the same tokens, so the pairs of a step are shared out evenly over as few
micro-batches as the budget allows (`even_shares`).

Where it does not, the pairs are sorted by length and cut into micro-batches, each padded to its own longest side. Two
forces oppose: more, smaller micro-batches compute less padding; each one costs a fixed overhead. `pack_pairs` finds
the cheapest cut exactly: on sorted lengths an optimal grouping is contiguous, so it is a shortest path.

Because losses are sums and the division happens once a step, the cut does not change the gradient.
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
    cut_into_runs,
    find_groups,
    first_equals,
    group_tokens,
    pack_sides,
)
from rmcore.models.packing.rows import PaddedRows, Rows, pad_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Batch = TypeVar("Batch", bound="DataclassInstance")
MICRO_BATCH_OVERHEAD_TOKENS = 128
"""Fixed cost of one more forward/backward, in the time of computing that many tokens.

Measured with benchmarks/micro_batch_overhead.py on 2 CPU cores (table in
benchmarks/results/micro-batches.md): the optimum is flat from 64 to 128 for a 1.3 M and a 22 M model alike.
"""


PACKED_TOKENS_ON_CPU = 4096
"""Tokens of a packed micro-batch beyond which a CPU gets no faster.

Measured with benchmarks/micro_batch_overhead.py --packed (table in benchmarks/results/micro-batches.md).
"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward/backward: P whole pairs as R = 2P sides, the P chosen sides first, then their rejected sides."""

    rows: Rows
    target_margins: Tensor  # (P,) float32, annotated strength of each preference, NaN where there is none
    indices: tuple[int, ...]  # position of each of the P pairs in the list it came from
    idle: bool = False  # computed to keep step with other processes, counts for nothing
    weight: float = 1.0  # of its pairs in the gradient; logged means count all pairs alike

    @property
    def labels(self) -> Tensor:
        """The target margins, which the loss is given beside the rows."""
        return self.target_margins

    @property
    def num_pairs(self) -> int:
        """Pairs that count in this micro-batch: P, none if it is idle."""
        return 0 if self.idle else len(self.indices)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`; from page-locked memory without waiting."""
        margins = self.target_margins.to(device, non_blocking=True)
        return replace(self, rows=self.rows.to(device), target_margins=margins)

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return replace(self, rows=self.rows.pin_memory(), target_margins=self.target_margins.pin_memory())


def pack_pairs(
    lengths: Sequence[int], token_budget: int, *, overhead_tokens: int = MICRO_BATCH_OVERHEAD_TOKENS
) -> list[list[int]]:
    """Group pairs into micro-batches at the least cost under a token budget.

    The cost of a micro-batch is its padded tokens, 2 x pairs x longest, plus `overhead_tokens`.

    Args:
        lengths: (P,) tokens of the longer side of each pair.
        token_budget: most padded tokens in one micro-batch.
        overhead_tokens: fixed cost of a micro-batch in tokens.

    Returns:
        Micro-batches as lists of positions in `lengths`, longest pairs first so that memory peaks at once. Every
        position occurs exactly once.

    Raises:
        ConfigError: one pair alone exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if order and 2 * lengths[order[-1]] > token_budget:
        raise ConfigError(
            f"token_budget={token_budget} cannot hold one pair of 2 x {lengths[order[-1]]} tokens; "
            f"raise token_budget to at least {2 * lengths[order[-1]]} or lower max_seq_len."
        )
    # cost[j]: least cost of the j shortest pairs; cut[j]: where the last micro-batch of that optimum starts.
    cost, cut = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        first = max(0, end - token_budget // (2 * longest))
        start = min(range(first, end), key=lambda s: cost[s] + 2 * (end - s) * longest)
        cost.append(cost[start] + 2 * (end - start) * longest + overhead_tokens)
        cut.append(start)
    return cut_into_runs(order, cut)


def even_shares(costs: Sequence[int], token_budget: int, *, num_ranks: int, aim: int) -> list[list[list[int]]]:
    """Share pairs out over ranks and micro-batches so that all micro-batches cost about the same.

    Longest first, each to the emptiest micro-batch (Graham 1969): at most 4/3 of the best largest one.

    Args:
        costs: (P,) tokens of each pair.
        token_budget: most tokens in one micro-batch.
        num_ranks: processes that compute a step together.
        aim: tokens that a micro-batch need not exceed; one that cannot be cut may, up to the budget.

    Returns:
        For each rank equally many micro-batches as lists of positions in `costs`, largest first; some may be empty
        where there are fewer pairs than micro-batches.

    Raises:
        ConfigError: one pair alone exceeds the budget.
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
    """Refuse a budget under which the `largest` pair, in computed tokens, does not fit.

    Raises:
        ConfigError: it does not.
    """
    if largest > token_budget:
        raise ConfigError(
            f"token_budget={token_budget} cannot hold one {what} of {largest} tokens; raise token_budget to at least "
            f"{largest} or lower max_seq_len."
        )


def pair_tokens(pair: TokenizedPair, packing: Packing) -> int:
    """Tokens that a pair takes in a packed row."""
    return group_tokens([pair.chosen.ids, pair.rejected.ids], packing)


def collate(
    pairs: Sequence[TokenizedPair],
    indices: Sequence[int],
    *,
    pad_id: int,
    packing: Packing | None = None,
) -> MicroBatch:
    """One micro-batch of the pairs at `indices`: packed as the model wants it, else right-padded."""
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
    """All `pairs` as the padded rows of one micro-batch, chosen sides first."""
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
    """The micro-batches of one step that process `rank` of `world` computes: whole pairs, equally many micro-batches.

    Every process works this out for itself from the same list. Where one has fewer micro-batches than another it
    computes idle ones of the shortest pair, because sharded weights are gathered by all processes together.
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
    """The micro-batches of one rank, with idle ones of the cheapest item until it has as many as any other.

    Args:
        shares: for each rank its micro-batches as positions; empty ones are none.
        rank: whose micro-batches.
        costs: of each item.
        collate: positions to a micro-batch.
    """
    own = [collate(group) for group in shares[rank] if group]
    missing = max(sum(map(bool, share)) for share in shares) - len(own)
    if not missing:
        return own
    cheapest = min(range(len(costs)), key=costs.__getitem__)
    return own + missing * [replace(collate([cheapest]), idle=True)]


def row_tokens(token_budget: int, packing: Packing) -> int:
    """Tokens of a packed row beyond which nothing is gained."""
    return min(token_budget, PACKED_TOKENS_ON_CPU) if packing.kernel == "sdpa" else token_budget


def _padded_shares(lengths: Sequence[int], token_budget: int, world: int) -> list[list[list[int]]]:
    """For each rank its micro-batches. The pairs, by length, go round the ranks and back: about as many tokens each."""
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
    """The D different ones of N sides, and for each side which of them it is: (N,) int.

    Each is computed once: equal sides of one call then have equal rewards to the last bit, so a tie is a tie.
    """
    firsts = np.array(first_equals([side.ids for side in sides]), dtype=np.int64)
    different, which = np.unique(firsts, return_inverse=True)  # in the order of their first places
    return [sides[at] for at in different], which


def scoring_chunks(sides: Sequence[list[int]], *, token_budget: int, packing: Packing | None) -> list[list[list[int]]]:
    """Cut S sides into batches for scoring, each of at most `token_budget` computed tokens or one side.

    Returns:
        Batches as lists of groups, groups as lists of positions in `sides`. Those of a group share a prefix where rows
        are packed, whatever pair they belong to. Longest first; every position exactly once.
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
    """The pairs of each of `num_steps` optimizer steps: epoch after epoch, each a fresh permutation.

    A pure function of its arguments, so a resumed run replays it and skips what was done. The last step of an epoch
    may be smaller; no pair is repeated or lost within an epoch. Memory holds one epoch's permutation, eight bytes a
    pair.
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
        """The pairs of an epoch in their order: (P,)."""
        return rng.permutation(self._num_pairs)
