"""How a hypothesis and its verdict are worded and marked, in figures, the report and Markdown alike."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.quantities import compared


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
_SIGNS = {"difference": " − ", "ratio": " / "}


def subject(hypothesis: Mapping[str, Any]) -> str:
    """Which arms are measured: `A3 − A1`, `lora / full`, `A5`."""
    sign = _SIGNS.get(hypothesis["comparison"])
    arm, versus = hypothesis["arm"], hypothesis["versus"]
    return arm if sign is None or versus is None else f"{arm}{sign}{versus}"


def claimed(hypothesis: Mapping[str, Any], unit: str) -> str:
    """The side of the threshold: `above +1.0 points`, or the two ends: `within −1.0 points and +1.0 points`."""
    if hypothesis["direction"] == "within":
        low, high = (compared(border, unit, hypothesis["comparison"]) for border in borders(hypothesis))
        return f"within {low} and {high}"
    threshold = compared(hypothesis["threshold"], unit, hypothesis["comparison"])
    return f"{hypothesis['direction']} {threshold}"


def borders(hypothesis: Mapping[str, Any]) -> list[float]:
    """Where what is claimed ends: the threshold, or both ends of a claim that two arms are as good as equal."""
    threshold = float(hypothesis["threshold"])
    if hypothesis["direction"] != "within":
        return [threshold]
    return [1 / threshold, threshold] if hypothesis["comparison"] == "ratio" else [-threshold, threshold]


def deciding(hypothesis: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Say what would decide an inconclusive claim and what that costs, in one sentence; empty where that is not known.

    Args:
        hypothesis: a claim with its verdict.
        cells: of the experiment; those of the claim's arms say what one takes.
    """
    size = hypothesis["deciding_size"]
    if size is None:
        return ""
    start = "Were the truth what was measured"
    if size["seeds"] is None:
        prompts = hypothesis["num_prompts"]
        if size["prompts"] is None or prompts is None:
            return f"{start}, a thousand seeds would not decide it: it is too near to the threshold."
        here, needed = numbers.count(prompts), numbers.count(size["prompts"])
        return f"{start}, no number of seeds would decide it on these {here} prompts: at least {needed} are needed."
    arms = {hypothesis["arm"], hypothesis["versus"]} - {None}
    more = (size["seeds"] - hypothesis["num_seeds"]) * len(arms)
    taken = [cell["device_seconds"] for cell in cells if cell["arm"] in arms and cell["device_seconds"] is not None]
    price = f", some {numbers.duration(more * sum(taken) / len(taken))} of a device" if taken else ""
    seeds = numbers.count(size["seeds"]) + (" seeds of each arm" if len(arms) > 1 else " seeds")
    return f"{start}, {seeds} would decide it: {numbers.count(more)} cells more{price}."


def tally(hypotheses: Sequence[Mapping[str, Any]]) -> str:
    """All verdicts counted: `4 claims: 1 supported, 1 refuted, 2 inconclusive`."""
    if not hypotheses:
        return "No claim was registered"
    counts = {verdict: sum(item["verdict"] == verdict for item in hypotheses) for verdict in VERDICTS}
    parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(hypotheses)} {'claim' if len(hypotheses) == 1 else 'claims'}: {parts}"
