"""Margins of the held-out pairs as a histogram: where the model is right, wrong, and how sure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import BLUE, INK, MUTED, ORANGE, SMALL, dress, headline, new_figure

_MOST_BINS = 60
_TOP = 0.76  # highest bar as a share of the axis; the shares are written above
_OUTLIER_SPANS = 4.0  # margins farther out than this many central spans are counted in the title, not drawn


def margin_histogram_figure(rewards: pd.DataFrame, *, negative_rate: Mapping[str, Any] | None = None) -> Figure:
    """Histogram of margin = reward_chosen - reward_rejected (logits), one bin edge exactly at zero.

    Args:
        rewards: P > 0 rows with reward_chosen and reward_rejected.
        negative_rate: the metric negative_margin_rate {value, ci_low, ci_high}; its interval is written below the
            share of negative margins. None: the share is written alone.
    """
    margins = (rewards["reward_chosen"] - rewards["reward_rejected"]).to_numpy(dtype=np.float64)
    shown = _central(margins)
    edges = _edges(shown)
    figure = new_figure(8.0, 4.4)
    ax = figure.subplots()
    counts, _ = np.histogram(shown, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    colours = np.where(middles < 0, ORANGE, BLUE).tolist()
    ax.bar(middles, counts, width=np.diff(edges), color=colours, edgecolor="white", linewidth=0.5)
    ties = int((margins == 0).sum())
    ax.bar(middles[middles > 0][0], ties, width=edges[1] - edges[0], color=MUTED, edgecolor="white", linewidth=0.5)
    ax.axvline(0.0, ymax=_TOP, color=INK, linewidth=1.2)
    median = float(np.median(margins))
    if edges[0] <= median <= edges[-1]:
        ax.axvline(median, ymax=_TOP + 0.03, color=INK, linewidth=1.3, linestyle="--")
    headline(figure, _title(margins, median))
    dress(ax, title=_reading(margins, shown), x="reward margin (logits)", y="pairs")
    ax.set_ylim(0, max(1, int(counts.max())) / _TOP)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _annotate(ax, margins, negative_rate)
    return figure


def _title(margins: FloatArray, median: float) -> str:
    right = float((margins > 0).mean())
    pairs = f"{numbers.count(len(margins))} held-out pair{'s' if len(margins) != 1 else ''}"
    return f"Ranked as labelled: {numbers.percent(right)} of {pairs}; median margin {numbers.decimal(median)}"


def _reading(margins: FloatArray, shown: FloatArray) -> str:
    """How to read the figure, and what is outside of its axis."""
    text = "solid line: zero · dashed line: median"
    outside = len(margins) - len(shown)
    if outside:
        extremes = f"{numbers.decimal(margins.min())} to {numbers.decimal(margins.max())}"
        text += f" · {numbers.count(outside)} more beyond the axis (all margins: {extremes})"
    return text


def _annotate(ax: Axes, margins: FloatArray, negative_rate: Mapping[str, Any] | None) -> None:
    """Shares on either side of zero, above the bars."""
    bounds = numbers.interval(negative_rate, "share") if negative_rate else ""
    negative = f"ranked wrongly\n{numbers.percent((margins < 0).mean())} negative"
    negative += f"\n95 %: {bounds}" if bounds else ""
    positive = f"ranked as labelled\n{numbers.percent((margins > 0).mean())} positive"
    ties = int((margins == 0).sum())
    positive += f"\n{numbers.count(ties)} exactly 0 (ties)" if ties else ""
    style: dict[str, Any] = {"transform": ax.transAxes, "va": "top", "fontsize": SMALL + 0.5}
    ax.text(0.015, 0.98, negative, ha="left", color=ORANGE, **style)
    ax.text(0.985, 0.98, positive, ha="right", color=BLUE, **style)


def _central(margins: FloatArray) -> FloatArray:
    """The margins without far outliers, which would squeeze all others into one bar."""
    low, high = np.percentile(margins, [2.5, 97.5])
    span = high - low
    if span == 0:
        return margins
    inside = (margins >= low - _OUTLIER_SPANS * span) & (margins <= high + _OUTLIER_SPANS * span)
    return margins[inside]


def _edges(margins: FloatArray) -> FloatArray:
    """Bin edges that are multiples of one width, so that zero is an edge; all margins lie strictly inside the ends."""
    low, high = min(0.0, float(margins.min())), max(0.0, float(margins.max()))
    bins = min(_MOST_BINS, max(8, int(2 * np.sqrt(len(margins)))))
    width = (high - low) / bins if high > low else 0.1
    first, last = np.floor(low / width) - 1, np.floor(high / width) + 2
    return np.asarray(np.arange(first, last + 0.5) * width, dtype=np.float64)
