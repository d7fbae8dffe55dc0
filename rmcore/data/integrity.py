"""Which tokenized pairs are trained on: the rule for sides over the limit, and a record of every pair left out.

In evaluation nothing is left out: there a pair whose sides became equal is a tie, counted by `rendering.count_cut`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rmcore.core.errors import DataError
from rmcore.data.rendering import DroppedPair, TokenizedPair

OVER_LENGTH = "a side is longer than max_seq_len"
EQUAL_AFTER_CUT = "sides equal after the cut"
EQUAL_TOKENS = "sides equal as tokens"
REASONS = (OVER_LENGTH, EQUAL_AFTER_CUT, EQUAL_TOKENS)


def select_training_pairs(
    tokenized: Sequence[TokenizedPair], *, over_length: Literal["cut", "drop"]
) -> tuple[list[TokenizedPair], list[DroppedPair]]:
    """Split pairs into those to train on and those left out, each in their given order.

    Args:
        tokenized: pairs, already cut to the limit.
        over_length: `drop` leaves out a pair with a cut side, `cut` keeps it. Either way a pair whose sides are the
            same tokens, by the cut or by the tokenizer, is left out: its margin is 0 whatever the weights.

    Raises:
        DataError: there were pairs and none is left.
    """
    kept: list[TokenizedPair] = []
    dropped: list[DroppedPair] = []
    for pair in tokenized:
        reason = reason_left_out(pair, over_length)
        if reason is None:
            kept.append(pair)
        else:
            dropped.append(DroppedPair(pair.pair_id, reason, pair.truncation))
    if dropped and not kept:
        raise nothing_left(Counter(pair.reason for pair in dropped))
    return kept, dropped


def reason_left_out(pair: TokenizedPair, over_length: Literal["cut", "drop"]) -> str | None:
    """Why a pair is not trained on, if so; see `select_training_pairs`."""
    if over_length == "drop" and any(pair.truncation.values()):
        return OVER_LENGTH
    if pair.chosen.ids != pair.rejected.ids:
        return None
    return EQUAL_AFTER_CUT if pair.equal_after_cut else EQUAL_TOKENS


def nothing_left(reasons: Counter[str]) -> DataError:
    """Say that every pair was left out; `reasons` counts why."""
    counts = ", ".join(f"{why}: {n}" for why, n in reasons.items())
    if set(reasons) == {EQUAL_TOKENS}:
        remedy = "this model's tokenizer makes one of both sides, as one without capitals may; take another model"
    else:
        remedy = "raise max_seq_len" + (", or cut such sides with over_length=cut" if OVER_LENGTH in reasons else "")
    return DataError(f"none of the {reasons.total()} training pairs is left ({counts}): {remedy}.")
