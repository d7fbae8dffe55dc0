"""Held-out accuracy in context: what guessing, a shortcut and a perfect model would reach on the same pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.arms import short

_LOOK = {
    "model": (style.BLUE, "o", 8),
    "reference": (style.MUTED, "D", 6),
    "subset": (style.BLUE, "o", 5),
    "ood": (style.ORANGE, "s", 6),
}
_HEADINGS = {"subset": "this model, by subset", "ood": "this model, out of distribution"}
_ROW = 0.3  # inches
_LONGEST = 40  # characters of a name


def accuracy_in_context_figure(items: Sequence[Mapping[str, Any]]) -> Figure:
    """Dot plot of accuracies: model and yardsticks in order of size, then subsets, then out-of-distribution.

    Args:
        items: at least one, see rmcore.reporting.schema.ContextItem; values are shares, bounds may be None. Items
            without a value are named with a dash. The first item of kind "model" gives the title.
    """
    rows = _rows(items)
    height = max(2.4, 1.3 + _ROW * len(rows))
    figure = style.new_figure(8.0, height)
    ax = figure.subplots()
    for position, (_, item) in enumerate(rows):
        if item is not None:
            _draw(ax, position, item)
    style.headline(figure, _title(items))
    style.dress(ax, title="lines: 95 % intervals; diamonds and dotted lines: yardsticks", x="pairwise accuracy", y="")
    bold = [place for place, (_, item) in enumerate(rows) if item is None or item["kind"] == "model"]
    style.name_rows(ax, [label for label, _ in rows], bold)
    low, high = _limits(items)
    ax.set_xlim(low, high)
    style.percent_ticks(ax.xaxis)
    for item in items:
        value = numbers.finite(item["value"])
        if item["kind"] == "reference" and value is not None:
            ax.axvline(value, color=style.MUTED, linewidth=0.9, linestyle=":", zorder=0)
    return figure


def _rows(items: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """(label, item) from top to bottom; headings have no item."""

    def size(item: Mapping[str, Any]) -> float:
        value = numbers.finite(item["value"])
        return -np.inf if value is None else value

    top = [item for item in items if item["kind"] in ("model", "reference")]
    rows: list[tuple[str, Mapping[str, Any] | None]] = [
        (_label(item), item) for item in sorted(top, key=size, reverse=True)
    ]
    for kind, heading in _HEADINGS.items():
        group = sorted((item for item in items if item["kind"] == kind), key=size, reverse=True)
        if group:
            rows.append((heading, None))
            rows += [(_label(item), item) for item in group]
    return rows


def _label(item: Mapping[str, Any]) -> str:
    return short(" ".join(str(item["name"]).split()), _LONGEST)


def _draw(ax: Any, position: int, item: Mapping[str, Any]) -> None:
    colour, marker, size = _LOOK[item["kind"]]
    value = numbers.finite(item["value"])
    bounds = numbers.interval(item, "share")
    text = numbers.percent(value) + (f"  ({bounds})" if bounds else "")
    weight = "bold" if item["kind"] == "model" else "normal"
    look = {"va": "center", "ha": "left", "fontsize": style.SMALL, "color": style.INK, "fontweight": weight}
    ax.text(1.02, position, text, transform=ax.get_yaxis_transform(), **look)
    if value is None:
        return
    style.draw_interval(ax, position, item, colour)
    hollow = "white" if item["kind"] == "reference" else colour
    ax.plot([value], [position], marker, color=colour, markersize=size, markerfacecolor=hollow, markeredgewidth=1.5)


def _limits(items: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Axis from a little below the smallest to a little above the largest number, at least ten points wide."""
    values = [numbers.finite(item.get(key)) for item in items for key in ("value", "ci_low", "ci_high")]
    known = [value for value in values if value is not None] or [0.5]
    low, high = min(known), max(known)
    pad = max(0.02, 0.06 * (high - low), (0.1 - (high - low)) / 2)
    return max(low - pad, min(low, 0) - 0.02), min(high + pad, max(high, 1) + 0.02)


def _title(items: Sequence[Mapping[str, Any]]) -> str:
    model = next(
        (item for item in items if item["kind"] == "model" and numbers.finite(item["value"]) is not None), None
    )
    if model is None:
        return "Accuracies on the held-out pairs"
    value = float(model["value"])
    beaten = [item for item in items if item["kind"] == "reference" and numbers.finite(item["value"]) is not None]
    below = sorted((item for item in beaten if item["value"] < value), key=lambda item: item["value"])
    above = sorted((item for item in beaten if item["value"] >= value), key=lambda item: item["value"])
    text = f"Held-out accuracy {numbers.percent(value)}"
    if below:
        text += f": {100 * (value - below[-1]['value']):.1f} points above “{_label(below[-1])}”"
    if above:
        text += f"{',' if below else ':'} {100 * (above[0]['value'] - value):.1f} below “{_label(above[0])}”"
    return text
