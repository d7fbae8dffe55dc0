"""Token-budget micro-batches that never cut a pair.

The pairs of one optimizer step are sorted by length and cut into micro-batches, each padded to its own longest side.
Two forces oppose: more, smaller micro-batches compute less padding; each one costs a fixed overhead. `pack_pairs`
finds the cheapest cut exactly: on sorted lengths an optimal grouping is contiguous, so it is a shortest path.

Because losses are sums and the division happens once a step, the cut does not change the gradient.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rmcore.data.rendering import TokenizedPair
from rmcore.errors import ConfigError

MICRO_BATCH_OVERHEAD_TOKENS = 128
"""Fixed cost of one more forward/backward, in the time of computing that many tokens.

Measured with benchmarks/micro_batch_overhead.py on 2 CPU cores (table in benchmarks/RESULTS.md): the optimum is flat
from 64 to 128 for a 1.3 M and a 22 M model alike.
"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward/backward: P whole pairs as R = 2P rows, the P chosen rows first, then their rejected rows."""

    input_ids: Tensor  # (R, L) long, right-padded
    attention_mask: Tensor  # (R, L) long, 1 on real tokens
    target_margins: Tensor  # (P,) float32, annotated strength of each preference, NaN where there is none
    indices: tuple[int, ...]  # position of each of the P pairs in the list it came from
    idle: bool = False  # computed to keep step with other processes, counts for nothing

    @property
    def num_pairs(self) -> int:
        """Pairs that count in this micro-batch: P, none if it is idle."""
        return 0 if self.idle else len(self.indices)

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            attention_mask=self.attention_mask.pin_memory(),
            target_margins=self.target_margins.pin_memory(),
        )

    def model_inputs(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors a Hugging Face model takes, on `device`."""
        return {
            "input_ids": self.input_ids.to(device, non_blocking=True),
            "attention_mask": self.attention_mask.to(device, non_blocking=True),
        }


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
    groups, end = [], len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return groups


def collate(pairs: Sequence[TokenizedPair], indices: Sequence[int], *, pad_id: int) -> MicroBatch:
    """Stack the pairs at `indices` into one right-padded micro-batch."""
    chosen = [pairs[index].chosen.ids for index in indices]
    rejected = [pairs[index].rejected.ids for index in indices]
    input_ids, attention_mask = pad_rows(chosen + rejected, pad_id=pad_id)
    margins = [pairs[index].target_margin for index in indices]
    target_margins = torch.tensor([math.nan if margin is None else margin for margin in margins], dtype=torch.float32)
    return MicroBatch(input_ids, attention_mask, target_margins, tuple(indices))


def pad_rows(rows: Sequence[Sequence[int]], *, pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-pad token rows to the longest. Returns ids and mask, both (R, L) long; the mask alone says what is real."""
    longest = max(len(row) for row in rows)
    input_ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros((len(rows), longest), dtype=np.int64)
    for position, row in enumerate(rows):
        input_ids[position, : len(row)] = row
        attention_mask[position, : len(row)] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(attention_mask)


def micro_batches(pairs: Sequence[TokenizedPair], *, token_budget: int, pad_id: int) -> Iterator[MicroBatch]:
    """Yield all `pairs` as micro-batches, longest first."""
    for group in pack_pairs([pair.num_tokens for pair in pairs], token_budget):
        yield collate(pairs, group, pad_id=pad_id)


def rank_micro_batches(
    pairs: Sequence[TokenizedPair], *, token_budget: int, pad_id: int, rank: int = 0, world: int = 1
) -> list[MicroBatch]:
    """The micro-batches of one step that process `rank` of `world` computes: whole pairs, equally many micro-batches.

    Every process works this out for itself from the same list. The pairs, by length, go round the processes and back,
    so that each gets about as many tokens. Where one has fewer micro-batches than another it computes idle ones of the
    shortest pair, because sharded weights are gathered by all processes together.
    """
    if world == 1:
        return list(micro_batches(pairs, token_budget=token_budget, pad_id=pad_id))
    lengths = [pair.num_tokens for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda index: lengths[index], reverse=True)
    turns = [*range(world), *reversed(range(world))]
    shares = [[index for at, index in enumerate(order) if turns[at % len(turns)] == one] for one in range(world)]
    packed = [pack_pairs([lengths[index] for index in share], token_budget) for share in shares]
    own = [collate(pairs, [shares[rank][position] for position in group], pad_id=pad_id) for group in packed[rank]]
    missing = max(len(groups) for groups in packed) - len(own)
    return own + missing * [replace(collate(pairs, order[-1:], pad_id=pad_id), idle=True)]


def step_order(num_pairs: int, pairs_per_step: int, num_steps: int, *, seed: int) -> Iterator[list[int]]:
    """Yield the pairs of each optimizer step: epoch after epoch, each a fresh permutation.

    A pure function of its arguments, so a resumed run replays it and skips what was done. The last step of an epoch
    may be smaller; no pair is repeated or lost within an epoch.
    """
    done, epoch = 0, 0
    while done < num_steps:
        order = np.random.default_rng((seed, epoch)).permutation(num_pairs)
        for start in range(0, num_pairs, pairs_per_step):
            if done == num_steps:
                return
            yield order[start : start + pairs_per_step].tolist()
            done += 1
        epoch += 1
