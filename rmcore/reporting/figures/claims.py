"""How a hypothesis and its verdict are worded and marked, in figures, the report and Markdown alike."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmcore.reporting.figures import numbers


class VerdictLook(NamedTuple):
    """Words, colour and marker of a verdict: never the colour alone."""

    words: str
    colour: str
    marker: str


VERDICTS = {
    "supported": VerdictLook("✓ supported", "#0a6b3d", "o"),
    "refuted": VerdictLook("✗ refuted", "#a13500", "X"),
    "inconclusive": VerdictLook("? inconclusive", "#59636e", "s"),
}
SEED_INTERVAL = "95 % interval, if trainings collapse as often as here"
"""Name of an interval over seeds: of S seeds of which none did, up to 3 / S of all trainings may collapse."""
TWO_SEEDS = "two seeds are too few for an interval"
_SIGNS = {"difference": " − ", "ratio": " / "}


def subject(hypothesis: Mapping[str, Any]) -> str:
    """Which arms are measured: `A3 − A1`, `lora / full`, `A5`."""
    sign = _SIGNS.get(hypothesis["comparison"])
    arm, versus = hypothesis["arm"], hypothesis["versus"]
    return arm if sign is None or versus is None else f"{arm}{sign}{versus}"


def claimed(hypothesis: Mapping[str, Any], unit: str) -> str:
    """The side of the threshold: `above +1.0 points`, or the two ends: `within −1.0 points and +1.0 points`."""
    if hypothesis["direction"] == "within":
        low, high = (numbers.text(border, unit, hypothesis["comparison"]) for border in borders(hypothesis))
        return f"within {low} and {high}"
    threshold = numbers.text(hypothesis["threshold"], unit, hypothesis["comparison"])
    return f"{hypothesis['direction']} {threshold}"


def borders(hypothesis: Mapping[str, Any]) -> list[float]:
    """Where what is claimed ends: the threshold, or both ends of a claim that two arms are as good as equal."""
    threshold = float(hypothesis["threshold"])
    if hypothesis["direction"] != "within":
        return [threshold]
    return [1 / threshold, threshold] if hypothesis["comparison"] == "ratio" else [-threshold, threshold]


def claimed_span(hypothesis: Mapping[str, Any], low: float, high: float) -> tuple[float, float]:
    """The part of an axis from `low` to `high` that a claim names."""
    first, *others = borders(hypothesis)
    return (first, others[0]) if others else (first, high) if hypothesis["direction"] == "above" else (low, first)


def claim_estimate(item: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Value and interval of a hypothesis; of two seeds that decide nothing `TWO_SEEDS` in place of the interval.

    With one degree of freedom a 95 % interval is 25 standard errors wide: it was from -100.8 to +135.5 points.
    """
    value, bounds = numbers.estimate(item["metric"], item, unit, item["comparison"])
    return value, TWO_SEEDS if bounds and is_of_two_seeds(item) else bounds


def measured(item: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Value and interval of a hypothesis with the condition that the interval holds under; empty without interval."""
    value, bounds = claim_estimate(item, unit)
    has_ends = bounds not in ("", TWO_SEEDS)
    return value, " ".join(filter(None, (bounds, item["condition"] if has_ends else None)))


def verdict_words(item: Mapping[str, Any]) -> str:
    """Verdict of a hypothesis with the condition that its sentence names: `supported if no training collapses`."""
    return " ".join(filter(None, (item["verdict"], item["condition"])))


def is_of_two_seeds(item: Mapping[str, Any]) -> bool:
    """Whether a hypothesis rests on two seeds alone, and they do not decide it."""
    return bool(item["num_seeds"] == 2 and item["verdict"] == "inconclusive")


def claim_reason(item: Mapping[str, Any]) -> str:
    """The sentence that gives the reason of a verdict, which names no interval that is not shown."""
    return f"{TWO_SEEDS.capitalize()}." if is_of_two_seeds(item) and item["ci_low"] is not None else str(item["reason"])


def mean_estimate(name: str, metric: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Value and interval of an arm's mean over `num` seeds; of two seeds `TWO_SEEDS` in place of the interval."""
    value, bounds = numbers.estimate(name, metric, unit)
    return value, TWO_SEEDS if bounds and metric["num"] == 2 else bounds


def tally(hypotheses: Sequence[Mapping[str, Any]]) -> str:
    """All verdicts counted: `4 claims: 1 supported, 1 refuted, 2 inconclusive`."""
    if not hypotheses:
        return "No claim was registered"
    counts = {verdict: sum(item["verdict"] == verdict for item in hypotheses) for verdict in VERDICTS}
    parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(hypotheses)} {'claim' if len(hypotheses) == 1 else 'claims'}: {parts}"
