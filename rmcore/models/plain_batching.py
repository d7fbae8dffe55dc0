"""The micro-batches of the usual hand-written loop: what pair-aware batching is compared with.

Sides are padded, pairs are taken as they were drawn, and the step's loss is the mean over its micro-batches of the mean
over their pairs. A pair in a small micro-batch therefore counts for more than one in a large one. Nothing else differs
from `rmcore.models.batching`: a pair is never cut, and the token budget holds.
"""

from collections.abc import Sequence
from dataclasses import replace

from rmcore.data.rendering import TokenizedPair
from rmcore.models.batching import MicroBatch, check_budget, collate


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
