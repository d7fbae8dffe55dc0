"""What the numbers of an evaluation mean, in two sentences: first how often it is right, then how far to trust it."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers

Metrics = Mapping[str, Mapping[str, Any]]


def in_words(metrics: Metrics) -> list[str]:
    """A sentence about accuracy, beside guessing and length, and one about the probabilities.

    Nothing is called better that is not so at the end of its 95 % interval.
    """
    return [_accuracy(metrics), _calibration(metrics)]


def _accuracy(metrics: Metrics) -> str:
    found = metrics["pairwise_accuracy"]
    if found["value"] is None:
        return f"How often it prefers the right side is unknown: {found.get('reason') or 'not measured'}."
    longer = numbers.finite(metrics.get("longer_wins_accuracy", {}).get("value"))
    bounds = numbers.interval(found, "share")
    said = f"It prefers the right side in {numbers.percent(found['value'])} of {numbers.count(found['num'])} pairs"
    said += f" (95 %: {bounds}); guessing is right in 50 %" if bounds else "; guessing is right in 50 %"
    said += "" if longer is None else f", always taking the longer side in {numbers.percent(longer)}"
    return f"{said}: {_against(metrics['accuracy_over_baseline'])}."


def _against(over: Mapping[str, Any]) -> str:
    """What the paired interval of accuracy over the better of chance and length shows."""
    low, high = numbers.finite(over["ci_low"]), numbers.finite(over["ci_high"])
    if low is None or high is None:
        return "without an interval nothing is shown by that"
    if low > 0:
        return "shown to be better than both"
    return f"{'shown to be worse' if high < 0 else 'not shown to be better'} than the better of the two"


def _calibration(metrics: Metrics) -> str:
    found = metrics["ece_debiased"]
    if found["value"] is None:
        return f"How far its probabilities can be trusted is unknown: {found.get('reason') or 'not measured'}."
    nothing = numbers.nothing_found("ece_debiased", found)
    if nothing is not None:
        end = numbers.finite(found["ci_high"])
        most = "" if end is None else f"; it may be up to {100 * end:.1f} points"
        return f"No error of its probabilities was found{most} (ECE, debiased)."
    shown = numbers.floored_item("ece_debiased", found)
    low, high = shown["ci_low"], shown["ci_high"]
    bounds = "" if low is None or high is None else f", 95 %: {100 * low:.1f} to {100 * high:.1f}"
    points = 100 * float(shown["value"] or 0)
    return f"Its probabilities are off by {points:.1f} points on average (ECE, debiased{bounds})."
