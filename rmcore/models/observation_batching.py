"""Token-budget micro-batches of observations: the answers to one prompt are never separated.

As `rmcore.models.batching` for pairs. The K answers of an observation are one group of a packed row, so a causal model
computes their prompt once; and K answers are K sides, where the pairs that they give are K (K - 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from rmcore.data.tokenized_observations import TokenizedObservation
from rmcore.models.batching import check_budget, even_shares, row_tokens, with_idle_ones
from rmcore.models.packing.layout import Packing, Rows, group_tokens, pack_sides, pad_rows


@dataclass(frozen=True, slots=True)
class ObservationLabels:
    """The judgements of G observations on the S sides of a micro-batch: N of them ranks, the others M grades in all."""

    answers: Tensor  # (N, K) long, places among the sides, best first; 0 where `ranks` is 0
    ranks: Tensor  # (N, K) long from 1, not falling; 0 is padding
    first_only: Tensor  # (N,) bool, of the ranking only the first choice counts
    rank_weights: Tensor  # (N,) float32
    graded: Tensor  # (M,) long, the side that a grade is of
    attributes: Tensor  # (M,) long
    codes: Tensor  # (M,) float32
    prompts: Tensor  # (M,) long, which observation
    grade_weights: Tensor  # (M,) float32

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "ObservationLabels":
        """The same with `change` applied to its tensors."""
        return ObservationLabels(*(change(getattr(self, one.name)) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class ObservationBatch:
    """One forward/backward: the sides of G observations, observation after observation, and their judgements."""

    rows: Rows
    labels: ObservationLabels
    indices: tuple[int, ...]  # position of each of the G observations in the list it came from
    idle: bool = False  # computed to keep step with other processes, counts for nothing
    weight: float = 1.0

    def to(self, device: torch.device) -> "ObservationBatch":
        """The same on `device`; from page-locked memory without waiting."""
        labels = self.labels.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(self, rows=self.rows.to(device), labels=labels)

    def pin_memory(self) -> "ObservationBatch":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return replace(self, rows=self.rows.pin_memory(), labels=self.labels.map_tensors(Tensor.pin_memory))


def observation_tokens(observation: TokenizedObservation, packing: Packing) -> int:
    """Tokens that an observation takes in a packed row."""
    return group_tokens([side.ids for side in observation.sides], packing)


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens of the K sides of an observation, padded to the longest."""
    return len(lengths) * max(lengths)


def label(observations: Sequence[TokenizedObservation]) -> ObservationLabels:
    """Put the judgements of G observations into tensors; their sides count on from one to the next."""
    ranked: list[tuple[list[int], list[int], TokenizedObservation]] = []
    grades: list[tuple[int, int, float, int, float]] = []
    start = 0
    for number, one in enumerate(observations):
        if one.ranks is not None:
            order = sorted(range(len(one.ranks)), key=one.ranks.__getitem__)
            ranked.append(([start + place for place in order], [one.ranks[place] for place in order], one))
        grades += [(start + grade.answer, grade.attribute, grade.code, number, one.weight) for grade in one.grades]
        start += len(one.sides)
    most = max((len(ranks) for _, ranks, _ in ranked), default=1)
    answers = torch.zeros((len(ranked), most), dtype=torch.long)
    ranks = torch.zeros((len(ranked), most), dtype=torch.long)
    for row, (places, given, _) in enumerate(ranked):
        answers[row, : len(places)] = torch.tensor(places)
        ranks[row, : len(given)] = torch.tensor(given)
    columns = list(zip(*grades, strict=True)) or [()] * 5
    return ObservationLabels(
        answers=answers,
        ranks=ranks,
        first_only=torch.tensor([one.top_only for _, _, one in ranked], dtype=torch.bool),
        rank_weights=torch.tensor([one.weight for _, _, one in ranked], dtype=torch.float32),
        graded=torch.tensor(columns[0], dtype=torch.long),
        attributes=torch.tensor(columns[1], dtype=torch.long),
        codes=torch.tensor(columns[2], dtype=torch.float32),
        prompts=torch.tensor(columns[3], dtype=torch.long),
        grade_weights=torch.tensor(columns[4], dtype=torch.float32),
    )


def collate_observations(
    observations: Sequence[TokenizedObservation], indices: Sequence[int], *, pad_id: int, packing: Packing | None = None
) -> ObservationBatch:
    """One micro-batch of the observations at `indices`: packed as the model wants it, else right-padded."""
    taken = [observations[index] for index in indices]
    sides = [side.ids for one in taken for side in one.sides]
    if packing is None:
        rows: Rows = pad_rows(sides, pad_id=pad_id)
    else:
        places = iter(range(len(sides)))
        rows = pack_sides(sides, [[next(places) for _ in one.sides] for one in taken], packing)
    return ObservationBatch(rows, label(taken), tuple(indices))


def observation_micro_batches(
    observations: Sequence[TokenizedObservation],
    *,
    token_budget: int,
    pad_id: int,
    packing: Packing | None = None,
    rank: int = 0,
    world: int = 1,
) -> list[ObservationBatch]:
    """The micro-batches of one step that process `rank` of `world` computes; see `rmcore.models.batching`.

    Raises:
        ConfigError: one observation alone exceeds the budget.
    """
    if packing is None:
        lengths = [[len(side.ids) for side in one.sides] for one in observations]
        costs = list(map(padded_tokens, lengths))
        shares = _padded_shares(lengths, token_budget, world)
    else:
        costs = [observation_tokens(one, packing) for one in observations]
        shares = even_shares(costs, token_budget, num_ranks=world, aim=row_tokens(token_budget, packing))
    collate = partial(collate_observations, observations, pad_id=pad_id, packing=packing)
    return with_idle_ones(shares, rank, costs, collate)


def _padded_shares(lengths: Sequence[Sequence[int]], token_budget: int, world: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, filled longest first; by length, observations go round the ranks and back."""
    check_budget(token_budget, max(map(padded_tokens, lengths), default=0), "observation")
    order = sorted(range(len(lengths)), key=lambda index: max(lengths[index]), reverse=True)
    turns = [*range(world), *reversed(range(world))]
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    filled = [(0, 0)] * world  # of each rank's last micro-batch: its sides, and the longest of them
    for at, index in enumerate(order):
        rank = turns[at % len(turns)]
        sides, longest = filled[rank]
        if not shares[rank] or (sides + len(lengths[index])) * max(longest, *lengths[index]) > token_budget:
            shares[rank].append([])
            sides, longest = 0, 0
        shares[rank][-1].append(index)
        filled[rank] = sides + len(lengths[index]), max(longest, *lengths[index])
    return shares
