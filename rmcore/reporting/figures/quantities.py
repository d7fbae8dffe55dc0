"""Levels, differences and ratios of a metric as people read them, in figures, pages and Markdown alike.

Units are those of rmcore.core.metrics: a share is shown in percent, a difference of shares in points.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rmcore.core.metrics import floored
from rmcore.reporting.figures import numbers

SEED_INTERVAL = "95 % interval, if trainings collapse as often as here"
"""Name of an interval over seeds: of S seeds of which none did, up to 3 / S of all trainings may collapse."""

TWO_SEEDS = "two seeds are too few for an interval"
_SPACE = "\u00a0"  # a number and its unit stay on one line
FRACTIONS = ("share", "points")
"""Units of numbers from -1 to 1, which people read as percentages or percentage points."""
_ONE_UNIT = re.compile(r"(?P<number>[^\s]+)\s(?P<unit>[^\s]+)")  # not 4 min 05 s
_BELOW_FLOOR = 0.13  # of an axis, so that marks at a floor are whole
_WHOLE_STEPS = 100  # from here on a mean over seeds needs no fraction of a step


def level(value: float | None, unit: str) -> str:
    """A metric's own value: 71.2 %, 4 min 05 s, 231.4 pairs/s."""
    number = numbers.finite(value)
    if unit == "seconds":
        below_zero = number is not None and number < 0  # the lower bound of an interval can be
        return f"{'−' if below_zero else ''}{numbers.duration(None if number is None else abs(number))}"
    if unit == "steps" and number is not None and (number.is_integer() or abs(number) >= _WHOLE_STEPS):
        return f"{numbers.count(number)}{_SPACE}steps".replace("-", "−")
    return numbers.text(number, unit)


def compared(value: float | None, unit: str, comparison: str, *, signed: bool = True) -> str:
    """A value of a hypothesis: a level, a difference (+2.4 points) or a ratio (1.420×); a dash where there is none.

    Args:
        value: a fraction where the unit is share.
        unit: of the metric.
        comparison: level, difference or ratio.
        signed: differences get their sign; a distance has none.
    """
    number = numbers.finite(value)
    if number is None:
        return numbers.MISSING
    if comparison == "level":
        return level(number, unit)
    if comparison == "ratio":
        return f"{numbers.decimal(number)}×"
    if unit in FRACTIONS:
        size, word = f"{abs(100 * number):.1f}", "points"
    else:
        size, word = numbers.decimal(abs(number)), "s" if unit == "seconds" else unit
    return f"{_sign(number, size) if signed else ''}{size}{_SPACE}{word}".rstrip(_SPACE)


def interval(low: float | None, high: float | None, unit: str, comparison: str = "level") -> str:
    """`low to high`, the unit once where both have the same; empty where a bound is missing."""
    if numbers.finite(low) is None or numbers.finite(high) is None:
        return ""
    first, last = compared(low, unit, comparison), compared(high, unit, comparison)
    start, end = _ONE_UNIT.fullmatch(first), _ONE_UNIT.fullmatch(last)
    same = start is not None and end is not None and start["unit"] == end["unit"]
    return f"{start['number'] if start and same else first} to {last}"


def points(difference: Mapping[str, Any]) -> str:
    """A difference of two shares with its interval in brackets, where it has one: +2.4 points (+1.0 to +3.8 points)."""
    low, high = (numbers.finite(numbers.bound(difference, end)) for end in ("ci_low", "ci_high"))
    bounds = interval(low, high, "share", "difference")
    if bounds and difference["ci_low"] is None:
        bounds += " if no prompt is a disaster"
    value = compared(difference["value"], "share", "difference")
    return f"{value} ({bounds})" if bounds else value


def estimate(name: str, item: Mapping[str, Any], unit: str, comparison: str = "level") -> tuple[str, str]:
    """Value and interval, which may be empty, of a metric or of a comparison of arms by it.

    A level keeps to the floor of its metric (`rmcore.core.metrics.floored`); a difference may be negative.
    """
    found = numbers.nothing_found(name, item) if comparison == "level" else None
    if found is not None:
        return found
    shown = numbers.floored_item(name, item) if comparison == "level" else item
    bounds = interval(shown["ci_low"], shown["ci_high"], unit, comparison)
    return compared(shown["value"], unit, comparison), bounds


def claim_estimate(item: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Value and interval of a hypothesis; of two seeds that decide nothing `TWO_SEEDS` in place of the interval.

    With one degree of freedom a 95 % interval is 25 standard errors wide: it was from -100.8 to +135.5 points.
    """
    value, bounds = estimate(item["metric"], item, unit, item["comparison"])
    return value, TWO_SEEDS if bounds and is_of_two_seeds(item) else bounds


def is_of_two_seeds(item: Mapping[str, Any]) -> bool:
    """Whether a hypothesis rests on two seeds alone, not on other arms' variance as well, and they do not decide it."""
    return bool(item["num_seeds"] == 2 and item["verdict"] == "inconclusive" and "moderated" not in item["method"])


def claim_reason(item: Mapping[str, Any]) -> str:
    """The reason of a verdict, which names no interval that is not shown."""
    return TWO_SEEDS if is_of_two_seeds(item) and item["ci_low"] is not None else str(item["reason"])


def mean_estimate(name: str, metric: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Value and interval of an arm's mean over `num` seeds; of two seeds `TWO_SEEDS` in place of the interval."""
    value, bounds = estimate(name, metric, unit)
    return value, TWO_SEEDS if bounds and metric["num"] == 2 else bounds


def told(name: str, item: Mapping[str, Any], unit: str) -> str:
    """The value of a metric in a sentence: 71.2 %; where nothing was found, 0.00 (upper end 0.041)."""
    value, bounds = estimate(name, item, unit)
    return f"{value} ({bounds})" if bounds and numbers.nothing_found(name, item) else value


def axis_low(name: str, low: float, high: float) -> float:
    """The lower end of an axis: not so far below the floor of its metric that a tick would stand there."""
    floor = floored(name, -math.inf)
    return low if floor is None or math.isinf(floor) else max(low, floor - _BELOW_FLOOR * (high - floor))


def distance(value: float | None, unit: str, comparison: str) -> str:
    """A width on the scale of `compared`, without sign: 2.1 points, 3.2 s, 0.080×."""
    if unit == "seconds" and comparison == "level":
        return numbers.duration(value)
    return compared(value, unit, "difference" if comparison == "level" else comparison, signed=False)


def capital(label: str) -> str:
    """The label at the start of a sentence; its other capitals stay."""
    return f"{label[:1].upper()}{label[1:]}"


def axis_label(label: str, unit: str, comparison: str = "level") -> str:
    """An axis title with its unit; percent signs stand at the ticks."""
    if comparison == "ratio":
        return f"{label} (ratio)"
    points = "percentage points"
    word = {"share": "%" if comparison == "level" else points, "points": points, "seconds": "s"}.get(unit, unit)
    return f"{label} ({word})" if word else label


def tick_text(unit: str, comparison: str = "level") -> Callable[[float, int], str]:
    """Formatter of the ticks of an axis that holds raw values (fractions where the unit is share)."""

    def text(value: float, _: int) -> str:
        shown = 100 * value if unit in FRACTIONS and comparison != "ratio" else value
        size = f"{abs(shown):,.10g}"
        if comparison == "difference":
            return f"{_sign(shown, size)}{size}"
        return f"{'−' if shown < 0 else ''}{size}{'×' if comparison == 'ratio' else ''}"

    return text


def _sign(number: float, size: str) -> str:
    """+ or −, none where the shown size is zero."""
    if not any(digit in size for digit in "123456789"):
        return ""
    return "−" if math.copysign(1, number) < 0 else "+"
