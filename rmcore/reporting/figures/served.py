"""The gain of what was judged pair by pair, with the interval that may be looked at after each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.reporting.figures.style import BLUE, GREEN, MUTED, dress, headline, legend_below, new_figure

SHOWN = 1.5
"""Units that are shown on either side at least; the first intervals are as wide as a judged difference can be."""
LATE = 0.3
"""Share of the pairs before which means and intervals may lie outside of the panel."""


def served_figure(record: Mapping[str, Any]) -> Figure:
    """One panel: the gain of best-of-n over one sample as its pairs are judged.

    Args:
        record: `confirmation.json` of the stage confirmation.
    """
    figure = new_figure(7.6, 4.4)
    ax = figure.subplots()
    dress(
        ax, title=f"gain of best-of-{record['n']} over one sample, on fresh prompts, judged by {record['judge']}",
        x="pairs judged", y=f"gain ({record['unit']})",
    )  # fmt: skip
    useful = record["useful_gain"]
    draw_gains(ax, [record], least=1.1 * useful)
    ax.axhline(useful, color=GREEN, linestyle="--", linewidth=1.1, label=f"useful: {useful:.2g}")
    legend_below(ax)
    headline(figure, record["verdict"]["headline"])
    return figure


def draw_gains(ax: Axes, servings: Sequence[Mapping[str, Any]], *, least: float = 0.0) -> None:
    """Draw the mean of judged differences after each, and the band of the first serving that holds at every pair.

    Args:
        ax: where.
        servings: one or more: N `differences` in the judge's unit, and the `path` of their N intervals.
        least: height that is shown in any case.
    """
    shown = [-SHOWN, SHOWN, least]
    for number, one in enumerate(servings):
        first, pairs = number == 0, np.arange(1, len(one["differences"]) + 1)
        means = np.cumsum(one["differences"]) / pairs
        ax.plot(pairs, means, color=BLUE, alpha=1.0 if first else 0.4, label="mean" if first else None)
        late = int(LATE * len(pairs))
        shown += [1.1 * means[late:].min(), 1.1 * means[late:].max()]
        if first:
            low, high = np.array(one["path"]).T
            shown += [1.1 * low[late:].min(), 1.1 * high[late:].max()]
            label = "95 %, valid at every pair" + (" (first seed)" if len(servings) > 1 else "")
            ax.fill_between(pairs, low, high, color=BLUE, alpha=0.16, linewidth=0, label=label)
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set_ylim(min(shown), max(shown))
