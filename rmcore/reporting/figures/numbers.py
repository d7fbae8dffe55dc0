"""Numbers as people read them: one set of rules for figures, pages, Markdown and the terminal."""

import math
import re
from collections.abc import Mapping
from typing import Any

from rmcore.core import progress
from rmcore.core.metrics import floored, is_at_floor

MISSING = "–"
"""Stands for a number that does not exist."""
_SPACE = "\u00a0"  # a number and its unit stay on one line
FRACTIONS = ("share", "points")
"""Units of numbers from -1 to 1, which people read as percentages or percentage points."""
_ONE_UNIT = re.compile(r"(?P<number>[^\s]+)\s(?P<unit>[^\s]+)")  # not 4 min 05 s
_WHOLE_STEPS = 100  # from here on a mean over seeds needs no fraction of a step


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is None, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def count(value: float | None) -> str:
    """A whole number with thousands separators: 12,345."""
    number = finite(value)
    return MISSING if number is None else f"{number:,.0f}"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal: 71.2 %."""
    number = finite(value)
    return MISSING if number is None else f"{100 * number:z.1f}{_SPACE}%".replace("-", "−")


def decimal(value: float | None) -> str:
    """About four significant digits, never more than three decimals; scientific beyond 100,000 or below 0.001."""
    number = finite(value)
    if number is None:
        return MISSING
    size = abs(number)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{number:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{number:,.{decimals}f}".replace("-", "−")


def text(value: float | None, unit: str = "", comparison: str = "level", *, signed: bool = True) -> str:
    """A level (71.2 %, 4 min 05 s, 231.4 pairs/s), a difference (+2.4 points) or a ratio (1.420×); a dash for none.

    Args:
        value: in units of rmcore.core.metrics: a `share` is a fraction, shown in percent, and `points` are a difference
            of two shares, shown in percentage points with its sign.
        unit: of the metric; one without a rule of its own is appended.
        comparison: level, difference or ratio.
        signed: differences get their sign; a distance has none.
    """
    number = finite(value)
    if number is None:
        return MISSING
    if comparison == "ratio":
        return f"{decimal(number)}×"
    if comparison == "difference" or unit == "points":
        return _difference(number, unit, signed=signed)
    return _level(number, unit)


def _difference(number: float, unit: str, *, signed: bool) -> str:
    if unit in FRACTIONS:
        size, word = f"{abs(100 * number):.1f}", "points"
    else:
        size, word = decimal(abs(number)), "s" if unit == "seconds" else unit
    return f"{sign(number, size) if signed else ''}{size}{_SPACE}{word}".rstrip(_SPACE)


def _level(number: float, unit: str) -> str:
    if unit == "share":
        return percent(number)
    if unit == "count":
        return count(number).replace("-", "−")
    if unit == "steps" and (number.is_integer() or abs(number) >= _WHOLE_STEPS):
        return f"{count(number)}{_SPACE}steps".replace("-", "−")
    if unit == "seconds":  # below zero may be the lower end of an interval
        return f"{'−' if number < 0 else ''}{duration(abs(number))}"
    return f"{decimal(number)}{_SPACE}{unit}".rstrip(_SPACE)


def interval(item: Mapping[str, Any], unit: str = "", comparison: str = "level") -> str:
    """`low to high` of the item's ci_low and ci_high, the unit once where both have the same; empty where one is None.

    Of a gain that has ends only if no prompt is a disaster, those ends, and so it is said.
    """
    low, high = item.get("ci_low"), item.get("ci_high")
    if item.get("low_if_no_disaster") is not None:
        ends = {"ci_low": item["low_if_no_disaster"], "ci_high": item["high_if_no_disaster"]}
        return f"{interval(ends, unit, comparison)} if no prompt is a disaster"
    if finite(low) is None or finite(high) is None:
        return ""
    first, last = text(low, unit, comparison), text(high, unit, comparison)
    start, end = _ONE_UNIT.fullmatch(first), _ONE_UNIT.fullmatch(last)
    same = start is not None and end is not None and start["unit"] == end["unit"]
    return f"{start['number'] if start and same else first} to {last}"


def distance(value: float | None, unit: str, comparison: str) -> str:
    """A width on the scale of `text`, without sign: 2.1 points, 3.2 s, 0.080×."""
    if unit == "seconds" and comparison == "level":
        return duration(value)
    return text(value, unit, "difference" if comparison == "level" else comparison, signed=False)


def floored_item(name: str, item: Mapping[str, Any]) -> dict[str, float | None]:
    """value, ci_low and ci_high of an item, none below the floor of its metric `name`; None where not finite."""
    return {key: floored(name, finite(item.get(key))) for key in ("value", "ci_low", "ci_high")}


def nothing_found(name: str, item: Mapping[str, Any]) -> tuple[str, str] | None:
    """("0.00", "upper end 0.041") where the item's value is at the floor of its metric or below, else None.

    The second one is empty where there is no interval.
    """
    kept = floored_item(name, item)
    if not is_at_floor(name, kept["value"]):
        return None
    high = kept["ci_high"]
    return f"{kept['value']:.2f}", "" if high is None else f"upper end {decimal(high)}"


def estimate(name: str, item: Mapping[str, Any], unit: str, comparison: str = "level") -> tuple[str, str]:
    """Value and interval, which may be empty, of a metric or of a comparison by it, as people read them.

    A level keeps to the floor of its metric (`rmcore.core.metrics.floored`); a difference may be negative.
    """
    if comparison != "level":
        return text(item["value"], unit, comparison), interval(item, unit, comparison)
    kept = floored_item(name, item)
    return nothing_found(name, item) or (text(kept["value"], unit), interval({**item, **kept}, unit))


def in_sentence(name: str, item: Mapping[str, Any], unit: str) -> str:
    """The value of a metric in a sentence: 71.2 %; where nothing was found, 0.00 (upper end 0.041)."""
    value, bounds = estimate(name, item, unit)
    return f"{value} ({bounds})" if bounds and nothing_found(name, item) else value


def with_interval(item: Mapping[str, Any], unit: str = "") -> str:
    """The item's value and, where it has one, its interval in brackets: 71.2 % (69.0 to 73.4 %)."""
    bounds = interval(item, unit)
    return f"{text(item['value'], unit)} ({bounds})" if bounds else text(item["value"], unit)


def bound(item: Mapping[str, Any], end: str) -> float:
    """One end of an interval, or of a gain if no prompt is a disaster, to draw: NaN, which draws nothing, if none."""
    value = item[end]
    if value is None:
        value = item.get(f"{end.removeprefix('ci_')}_if_no_disaster")
    return float("nan") if value is None else float(value)


def duration(seconds: float | None) -> str:
    """Seconds as 3.2 s, 4 min 05 s or 2 h 10 min."""
    number = finite(seconds)
    return MISSING if number is None else progress.duration(number)


def sign(number: float, size: str) -> str:
    """+ or −; none where the shown size is zero."""
    if not any(digit in size for digit in "123456789"):
        return ""
    return "−" if math.copysign(1, number) < 0 else "+"
