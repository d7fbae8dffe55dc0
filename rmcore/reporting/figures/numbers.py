"""Numbers as people read them: one set of rules for figures, the HTML report and the Markdown summary."""

import math
from collections.abc import Mapping
from typing import Any

from rmcore.core import progress
from rmcore.core.metrics import floored, is_at_floor

MISSING = "–"
"""Stands for a number that does not exist."""
_SPACE = "\u00a0"  # a number and its unit stay on one line


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
    return MISSING if number is None else f"{_unsigned_zero(f'{100 * number:.1f}')}{_SPACE}%"


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


def text(value: float | None, unit: str = "") -> str:
    """`value` in its unit: `share` for fractions, in percent, `points` for differences of such, with their sign, in
    percentage points, `count` for whole numbers; others are appended.
    """
    if unit == "points" and (number := finite(value)) is not None:
        return f"{_points(number)}{_SPACE}points"
    if unit == "share":
        return percent(value)
    if unit == "count":
        return count(value)
    return f"{decimal(value)}{_SPACE}{unit}" if unit and finite(value) is not None else decimal(value)


def _points(number: float) -> str:
    return _unsigned_zero(f"{100 * number:+.1f}")


def interval(item: Mapping[str, Any], unit: str = "") -> str:
    """`low to high` of the item's ci_low and ci_high, or of a gain's ends if no prompt is a disaster; else empty."""
    low, high = finite(item.get("ci_low")), finite(item.get("ci_high"))
    if item.get("low_if_no_disaster") is not None:
        plain = {end: item[f"{end.removeprefix('ci_')}_if_no_disaster"] for end in ("ci_low", "ci_high")}
        return f"{interval(plain, unit)} if no prompt is a disaster"
    if low is None or high is None:
        return ""
    if unit == "share":
        return f"{percent(low)[:-2]} to {percent(high)}"
    if unit == "points":
        return f"{_points(low)} to {text(high, unit)}"
    return f"{text(low)} to {text(high)}"


def floored_item(name: str, item: Mapping[str, Any]) -> dict[str, float | None]:
    """value, ci_low and ci_high of an item, none below the floor of its metric `name`; None where not finite."""
    return {key: floored(name, finite(item.get(key))) for key in ("value", "ci_low", "ci_high")}


def nothing_found(name: str, item: Mapping[str, Any]) -> tuple[str, str] | None:
    """("0.00", "upper end 0.041") where the item's value is at the floor of its metric or below, else None.

    The second one is empty where there is no interval.
    """
    shown = floored_item(name, item)
    if not is_at_floor(name, shown["value"]):
        return None
    high = shown["ci_high"]
    return f"{shown['value']:.2f}", "" if high is None else f"upper end {decimal(high)}"


def estimate(name: str, item: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """The item's value and its interval, which may be empty, as people read what is known of a metric."""
    shown = floored_item(name, item)
    return nothing_found(name, item) or (text(shown["value"], unit), interval({**item, **shown}, unit))


def with_interval(item: Mapping[str, Any], unit: str = "") -> str:
    """The item's value and, where it has one, its interval in brackets: 71.2 % (69.0 to 73.4 %)."""
    bounds = interval(item, unit)
    return f"{text(item['value'], unit)} ({bounds})" if bounds else text(item["value"], unit)


def bound(item: Mapping[str, Any], end: str) -> float:
    """One end of an interval, or of a gain if no prompt is a disaster, to draw: NaN, which draws nothing, if none."""
    found = item[end]
    if found is None:
        found = item.get(f"{end.removeprefix('ci_')}_if_no_disaster")
    return float("nan") if found is None else float(found)


def duration(seconds: float | None) -> str:
    """Seconds as 3.2 s, 4 min 05 s or 2 h 10 min."""
    number = finite(seconds)
    return MISSING if number is None else progress.duration(number)


def _unsigned_zero(number: str) -> str:
    return "0.0" if number == "-0.0" else number.replace("-", "−")
