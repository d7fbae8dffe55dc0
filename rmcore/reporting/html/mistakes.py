"""The block of the pairs that a reward model ranks against their label."""

from collections.abc import Mapping, Sequence
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.html.page import shorten

SIDES = {"chosen": "labelled better (chosen)", "rejected": "model prefers (rejected)"}


def mistakes_block(mistakes: Sequence[Mapping[str, Any]], tables_of_pairs: Mapping[str, Sequence[Table]] = {}) -> Block:
    """The pairs that the model ranks against their label, each folded.

    Args:
        mistakes: pair_id, prompt, chosen, rejected, and margin in logits.
        tables_of_pairs: more to show of a pair, by its pair_id.
    """
    parts = []
    for one in mistakes:
        prompt, *sides = (shorten(str(one[key])) for key in ("prompt", *SIDES))
        title = f"margin {numbers.decimal(one['margin'])} · pair {one['pair_id']}"
        tables = [Table(tuple(SIDES.values()), [sides], left=range(2)), *tables_of_pairs.get(one["pair_id"], ())]
        parts.append(Block(title, code=prompt, tables=tables, is_folded=True))
    about = (
        "Held-out pairs that the model ranks the wrong way round, the surest first. Look for wrong labels, and for "
        "what they have in common. Texts are from the data: they may offend."
    )
    nothing = "No held-out pair is ranked the wrong way round."
    return Block("Most confident mistakes", text=(about if parts else nothing,), parts=parts, is_folded=True)
