"""The section of the report on held-out judgements that are not pairs, or not only: ties, rankings, grades."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table

NATS = ("nats", "nats gained")
TITLE = "Judgements: what of them the model foresees"
DEFINITION = (
    "Nats are minus the log-probability that the model gives to what was judged, fewer are better; gained are those "
    "over one to whom all answers are alike, who knows how often answers tie and each grade is given. Intervals are "
    "95 % over prompts. No verdict follows from them."
)
NAMES = {"pair": "pairs", "tie": "ties", "ranking": "rankings", "grades": "prompts with graded answers"}
"""Kinds of judgements, several of them."""


def judgements_block(record: Mapping[str, Any]) -> Block:
    """Held-out judgements as the model foresees them, by kind, and each attribute's part in the reward.

    Args:
        record: record of `rmcore.stages.evaluate.MeasuredJudgements`.
    """
    metrics = record["metrics"]
    kinds = [name.removeprefix("nats[").removesuffix("]") for name in metrics if name.startswith("nats[")]
    attributes = [name for name in kinds if name not in record["kinds"]]
    choices = Table(("kind", "judgements", *NATS), [_nats(metrics, name) for name in kinds if name in record["kinds"]])
    grades = Table(("attribute", "grades", *NATS), [_nats(metrics, name) for name in attributes])
    adds = Table(
        ("attribute", "weight in the reward", "pairwise accuracy by it alone", "change without it"),
        [(name, *_part(record["parts"][name])) for name in attributes if name in record["parts"]],
    )
    titled = {"Grades": grades, "What each attribute adds to the reward": adds}
    return Block(
        TITLE,
        text=(_held_out(record), DEFINITION),
        tables=(choices,) if choices.rows else (),
        parts=[Block(title, tables=(table,)) for title, table in titled.items() if table.rows],
    )


def _held_out(record: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{numbers.count(count)} {NAMES.get(kind, kind)}" for kind, count in record["kinds"].items())
    left_out, off_scale = record["num_left_out"], record["num_off_scale"]
    more = [f"; {numbers.count(left_out)} more cannot be read as training read them"] if left_out else []
    more += [f"; {numbers.count(off_scale)} grades that training does not have are left out"] if off_scale else []
    return f"Held out: {kinds}{''.join(more)}."


def _nats(metrics: Mapping[str, Any], name: str) -> tuple[str, ...]:
    gained = metrics[f"nats_gained[{name}]"]
    nats = numbers.with_interval(metrics[f"nats[{name}]"])
    return name, numbers.count(gained["num"]), nats, numbers.with_interval(gained)


def _part(part: Mapping[str, Any]) -> tuple[str, ...]:
    without = numbers.with_interval(part["left_out"], "points") if part["weight"] else numbers.MISSING
    return numbers.decimal(part["weight"]), numbers.with_interval(part["alone"], "share"), without
