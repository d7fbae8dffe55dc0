"""The block of the pairs that a reward model ranks against their label, with what each sentence adds where measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.html.page import shorten

SIDES = {"chosen": "labelled better (chosen)", "rejected": "model prefers (rejected)"}


def mistakes_block(mistakes: Sequence[Mapping[str, Any]]) -> Block:
    """The pairs that the model ranks against their label, each folded.

    Args:
        mistakes: pair_id, prompt, chosen, rejected, margin in logits and, where sentences were measured, their
            `effects` (`rmcore.probes.effects.explain_mistakes`).
    """
    parts = []
    for one in mistakes:
        prompt, *sides = (shorten(str(one[key])) for key in ("prompt", *SIDES))
        title = f"margin {numbers.decimal(one['margin'])} · pair {one['pair_id']}"
        tables = [Table(tuple(SIDES.values()), [sides], left=range(2))]
        rows = [
            (side, shorten(part["text"]), "not read" if part["effect"] is None else numbers.decimal(part["effect"]))
            for side in SIDES
            for part in one.get("effects", {}).get(side, ())
        ]
        if rows:
            heading = "What the reward loses without each sentence, in logits"
            tables.append(Table(("answer", "sentence", "loses"), rows, left=range(2), title=heading))
        parts.append(Block(title, code=prompt, tables=tables, is_folded=True))
    about = (
        "Held-out pairs that the model ranks the wrong way round, the surest first. Look for wrong labels, and for "
        "what they have in common. Texts are from the data: they may offend."
    )
    nothing = "No held-out pair is ranked the wrong way round."
    return Block("Most confident mistakes", text=(about if parts else nothing,), parts=parts, is_folded=True)
