"""Rows without padding, in which a prompt that several sides share is computed once; and rows padded to one length.

A causal model reads `prompt + chosen` and `prompt + rejected` with the same states over the prompt, so the prompt needs
computing once. A packed row is one flat list of tokens:

    prompt  chosen  rejected | prompt  chosen  rejected | ...      tokens
    0 1 2   3 4 5   3 4      | 0 1     2 3     2 3 4    | ...      positions

Both sides take positions from the prompt's end, and a token sees what precedes it in its own group that is the shared
prefix or its own side. So every state is exactly what it is when that side is computed alone. A group may hold any
number of sides (N answers to one prompt). An encoder's tokens see their whole side, so its groups are single sides.

The shared part is found in the token ids, not in the text: where a tokenizer merges the end of the prompt with the
start of a completion, the two sides differ from that token on, and the prefix simply ends before it.

Attention runs over the query sequences of `AttentionPlan`, so no mask of row x row exists, whatever the row's length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rmcore.core.errors import DataError

LARGEST_GROUP = 64
"""Most sides of one group. Sharing among more saves little: with 64 the prefix costs 1/64 a side."""
MOST_REPEATED = 4
"""Keys of one group in attention, where the prefix is repeated for each side, as a multiple of its tokens' limit."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the rows of one model are packed."""

    causal: bool
    """Prefixes are shared, and the reward is read at a side's last token; else at its first, and nothing is shared."""
    kernel: Literal["sdpa", "varlen"]
    """Kernel of attention: torch's varlen kernel for all at once, or `scaled_dot_product_attention` by sequence, save
    for those that `rmcore.models.packing.buckets` computes."""
    grouped: bool = False
    """Whether the varlen kernel takes fewer key heads than query heads; else keys and values are repeated for it."""
    first_position: int = 0
    """Position of a side's first token: RoBERTa and its kin begin behind the pad token's id."""
    pad_id: int | None = None
    """Token that the model takes for padding even where it occurs in a text: see `reading_place` and `_positions`."""
    reads_last: bool = False
    """Whether the last layer computes keys and values for all tokens, and the rest only where rewards are read: see
    `rmcore.models.packing.forward`."""


@dataclass(frozen=True, slots=True)
class Span:
    """One query sequence of a row and its keys: `prefix` tokens from `prefix_start`, then its own."""

    start: int
    length: int
    prefix_start: int = 0
    prefix: int = 0

    @property
    def num_keys(self) -> int:
        """Tokens that its last query sees."""
        return self.prefix + self.length


@dataclass(frozen=True, slots=True)
class VarlenIndex:
    """The plan as a varlen kernel wants it: N query sequences, each with keys of its own."""

    query_ends: Tensor  # (N + 1,) int32, cumulative lengths of the query sequences, which tile the row
    key_ends: Tensor  # (N + 1,) int32, the same of the keys, in the order of key_at
    key_at: Tensor | None  # (K,) long, places in the row of the keys of each sequence; None: an encoder's, as they are
    longest: int
    """No sequence has more queries or keys: a power of two, and one number for both, because code that is compiled for
    one row may take a Python int, or that two of them are equal, for constant."""
    grouped: bool
    """See `Packing.grouped`."""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "VarlenIndex":
        """The same with `change` applied to its tensors."""
        return replace(
            self,
            query_ends=change(self.query_ends),
            key_ends=change(self.key_ends),
            key_at=None if self.key_at is None else change(self.key_at),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The U tokens of a row whose last states become rewards, which are the only queries of the last layer."""

    at: Tensor  # (U,) long, their places, each once, in the order of the row
    of_side: Tensor  # (S,) long, which of them each side is read at
    spans: tuple[Span, ...]
    """The keys of each: the prefix, and of its own sequence what it sees."""
    varlen: VarlenIndex | None
    """U query sequences of one token."""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Reading":
        """The same with `change` applied to its tensors."""
        varlen = None if self.varlen is None else self.varlen.map_tensors(change)
        return replace(self, at=change(self.at), of_side=change(self.of_side), varlen=varlen)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which tokens of a row see which.

    Each group is (prefix, side, side, ...): tokens of the shared prefix and of each side behind it. Its first query
    sequence is the prefix with the first side, over themselves; each further side is one over the prefix and itself.
    """

    groups: tuple[tuple[int, ...], ...]
    causal: bool
    varlen: VarlenIndex | None = None
    reading: Reading | None = None
    """The tokens that are read of a row whose last layer computes no more; None: it computes all."""
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)
    """Masks and batches that the first layer builds from the plan for all layers, by what they depend on besides."""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "AttentionPlan":
        """The same with `change` applied to its tensors, if it has any."""
        varlen = None if self.varlen is None else self.varlen.map_tensors(change)
        reading = None if self.reading is None else self.reading.map_tensors(change)
        return replace(self, varlen=varlen, reading=reading)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """S sides in one row of T tokens, none of them padding."""

    input_ids: Tensor  # (1, T) long
    position_ids: Tensor  # (1, T) long
    read_at: Tensor  # (S,) long, place of the token whose state becomes the reward of each side
    plan: AttentionPlan
    num_real_tokens: int
    """Tokens of all sides, each counted whole: more than T where prompts are shared."""

    @property
    def num_tokens(self) -> int:
        """T: tokens computed."""
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> "PackedRow":
        """The same on `device`; from page-locked memory without waiting."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PackedRow":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PackedRow":
        return PackedRow(
            change(self.input_ids),
            change(self.position_ids),
            change(self.read_at),
            self.plan.map_tensors(change),
            self.num_real_tokens,
        )


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists that leaves each at least one token of its own."""
    low, high = 0, max(0, min(len(a), len(b)) - 1)
    while low < high:  # bisection: comparing slices is far faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def pack_sides(sides: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], packing: Packing) -> PackedRow:
    """Lay sides out in one row.

    Args:
        sides: S token lists.
        groups: positions in `sides` of those that may share a prefix; every position exactly once. Equal sides of a
            group are computed once.
        packing: the form that the model wants.

    Raises:
        DataError: a side has no tokens, so there is nothing to read its reward at.
    """
    if not all(sides):
        raise DataError("a side has no tokens at all, so it cannot have a reward; look at the text or the render_fn.")
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    read_at = np.zeros(len(sides), dtype=np.int64)
    lengths: list[tuple[int, ...]] = []
    end = 0
    first_of, groups = _distinct(sides, groups)
    for group in groups if packing.causal else [[index] for members in groups for index in members]:
        group_start = end
        prefix = group_prefix([sides[index] for index in group])
        lengths.append((prefix, *(len(sides[index]) - prefix for index in group)))
        for place, index in enumerate(group):
            start = prefix if place else 0
            ids.append(np.asarray(sides[index][start:], dtype=np.int64))
            positions.append(_positions(ids[-1], start, packing))
            reads = reading_place(sides[index], packing)
            read_at[index] = reads + (group_start if reads < start else end - start)
            end += len(ids[-1])
    for index, first in first_of.items():
        read_at[index] = read_at[first]
    plan = _plan(tuple(lengths), read_at, packing)
    return PackedRow(
        input_ids=torch.from_numpy(np.concatenate(ids))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        read_at=torch.from_numpy(read_at),
        plan=plan,
        num_real_tokens=sum(len(side) for side in sides),
    )


def first_equals(sides: Sequence[Sequence[int]]) -> list[int]:
    """For each side the position of the first one that equals it, which is its own where none does before."""
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(tuple(side), place) for place, side in enumerate(sides)]


def _distinct(
    sides: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> tuple[dict[int, int], list[Sequence[int]]]:
    """For each side that equals an earlier one of its group that one, and the groups without them."""
    first_of: dict[int, int] = {}
    for group in groups:
        if len(group) > 2:  # a pair's sides differ
            firsts = first_equals([sides[index] for index in group])
            first_of |= {group[at]: group[first] for at, first in enumerate(firsts) if first != at}
    if not first_of:
        return first_of, [*groups]
    return first_of, [[index for index in group if index not in first_of] for group in groups]


def reading_place(side: Sequence[int], packing: Packing) -> int:
    """Place in a side of the token whose state becomes its reward, as Hugging Face's classes choose it.

    An encoder's first token; a causal model's last one that is not the pad token, wherever that came from.
    """
    if not packing.causal:
        return 0
    return next((place for place in range(len(side) - 1, 0, -1) if side[place] != packing.pad_id), 0)


def _positions(own: np.ndarray, start: int, packing: Packing) -> np.ndarray:
    """Positions of a side's own tokens, which `start` tokens precede."""
    if packing.first_position == 0:
        return np.arange(start, start + len(own), dtype=np.int64)
    counted = own != packing.pad_id  # RoBERTa gives a pad token no position; an encoder, so nothing precedes
    return np.cumsum(counted) * counted + packing.first_position - 1


def group_prefix(sides: Sequence[Sequence[int]]) -> int:
    """Tokens that all `sides` share; none for a single one, whose prefix would save nothing."""
    if len(sides) == 1:
        return 0
    return min(shared_prefix(sides[0], side) for side in sides[1:])


def group_tokens(sides: Sequence[Sequence[int]], packing: Packing) -> int:
    """Tokens that a group takes in a row."""
    if len(sides) > 2:  # equal ones are computed once; a pair's differ
        sides = [sides[at] for at, first in enumerate(first_equals(sides)) if first == at]
    saved = (len(sides) - 1) * group_prefix(sides) if packing.causal else 0
    return sum(len(side) for side in sides) - saved


def _plan(groups: tuple[tuple[int, ...], ...], read_at: np.ndarray, packing: Packing) -> AttentionPlan:
    """Make the plan of a row of these groups, whose sides are read at `read_at`, (S,)."""
    spans = spans_of(groups)
    by_kernel = packing.kernel == "varlen"
    reading = None
    if packing.reads_last:
        at, of_side = np.unique(read_at, return_inverse=True)
        owners = [spans[place - 1] for place in np.searchsorted([span.start for span in spans], at, side="right")]
        seen = tuple(
            replace(span, length=place - span.start + 1) if packing.causal else span
            for place, span in zip(at.tolist(), owners, strict=True)
        )
        index = _varlen_index([1] * len(seen), seen, packing) if by_kernel else None
        reading = Reading(torch.from_numpy(at), torch.from_numpy(of_side), seen, index)
    varlen = _varlen_index([span.length for span in spans], spans, packing) if by_kernel else None
    return AttentionPlan(groups, packing.causal, varlen, reading)


def _varlen_index(queries: Sequence[int], spans: Sequence[Span], packing: Packing) -> VarlenIndex:
    """Make the index of sequences of so many queries, with the keys of `spans`."""
    key_at = [
        np.arange(start, start + length)
        for span in spans
        for start, length in ((span.prefix_start, span.prefix), (span.start, span.length))
    ]
    keys = [span.num_keys for span in spans]
    return VarlenIndex(
        query_ends=torch.from_numpy(np.cumsum([0, *queries], dtype=np.int32)),
        key_ends=torch.from_numpy(np.cumsum([0, *keys], dtype=np.int32)),
        key_at=torch.from_numpy(np.concatenate(key_at)) if packing.causal else None,
        longest=1 << (max(keys) - 1).bit_length(),
        grouped=packing.grouped,
    )


def spans_of(groups: Sequence[tuple[int, ...]]) -> list[Span]:
    """The query sequences of a row, in its order: each prefix with its first side, then each further side."""
    spans = []
    for start, prefix, first, others in _places(groups):
        spans.append(Span(start, prefix + first))
        own = start + prefix + first
        for length in others:
            spans.append(Span(own, length, start, prefix))
            own += length
    return spans


def _places(groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Where each group starts in the row, with its prefix, first side and other sides."""
    start = 0
    for prefix, first, *others in groups:
        yield start, prefix, first, tuple(others)
        start += prefix + first + sum(others)


def find_groups(sides: Sequence[list[int]], *, most_tokens: int) -> list[list[int]]:
    """Group sides so that sharing prefixes saves most tokens.

    Sides with a long common prefix are neighbours in lexicographic order. Of the ways to cut that order into runs the
    best one is found, as a shortest path: a run of n sides with common prefix p saves (n - 1) p tokens.

    Args:
        sides: S different token lists.
        most_tokens: what a group may take in a row; a single side may take more.

    Returns:
        Positions in `sides`, each exactly once.
    """
    order = sorted(range(len(sides)), key=lambda index: sides[index])
    common = [0] + [shared_prefix(sides[a], sides[b]) for a, b in pairwise(order)]
    saved, cut = [0], [0]  # of the first sides in that order: most tokens saved, and where the last run then starts
    for end in range(1, len(order) + 1):
        best, start = saved[end - 1], end - 1
        prefix = total = len(sides[order[end - 1]])
        for first in range(end - 2, max(-1, end - 1 - LARGEST_GROUP), -1):
            prefix = min(prefix, common[first + 1])
            total += len(sides[order[first]])
            gain = (end - first - 1) * prefix
            if prefix == 0 or total - gain > most_tokens or total > MOST_REPEATED * most_tokens:
                break
            if saved[first] + gain > best:
                best, start = saved[first] + gain, first
        saved.append(best)
        cut.append(start)
    return cut_into_runs(order, cut)


def cut_into_runs(order: list[int], starts: Sequence[int]) -> list[list[int]]:
    """Follow a shortest path back, the last run of `order` first; `starts[end]`: where the run before `end` begins."""
    runs, end = [], len(order)
    while end:
        runs.append(order[starts[end] : end])
        end = starts[end]
    return runs


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """R sides as rows of one length L."""

    input_ids: Tensor  # (R, L) long, right-padded
    attention_mask: Tensor  # (R, L) long, 1 on real tokens
    num_real_tokens: int
    """Tokens that are not padding."""

    @property
    def num_tokens(self) -> int:
        """R x L: tokens computed."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "PaddedRows":
        """The same on `device`; from page-locked memory without waiting."""
        ids, mask = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.attention_mask))
        return PaddedRows(ids, mask, self.num_real_tokens)

    def pin_memory(self) -> "PaddedRows":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return PaddedRows(self.input_ids.pin_memory(), self.attention_mask.pin_memory(), self.num_real_tokens)


Rows = PaddedRows | PackedRow
"""The sides that one forward pass computes, in either form."""


def pad_rows(sides: Sequence[Sequence[int]], *, pad_id: int) -> PaddedRows:
    """Right-pad R sides to the longest; the mask alone says what is real."""
    longest = max(len(side) for side in sides)
    input_ids = np.full((len(sides), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros((len(sides), longest), dtype=np.int64)
    for position, side in enumerate(sides):
        input_ids[position, : len(side)] = side
        attention_mask[position, : len(side)] = 1
    return PaddedRows(torch.from_numpy(input_ids), torch.from_numpy(attention_mask), sum(len(side) for side in sides))
