"""The gain of what was judged pair by pair, with the interval that may be looked at after each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.reporting.figures.style import BLUE, GREEN, MUTED, dress, headline, legend_below, new_figure

WIDEST = 1.5
"""Units that are shown on either side: the first intervals are as wide as a judged difference can be."""


def served_figure(record: Mapping[str, Any]) -> Figure:
    """One panel: the gain of best-of-n over one sample as its pairs are judged.

    Args:
        record: `confirmation.json` of the stage confirmation.
    """
    figure = new_figure(7.6, 4.4)
    ax = figure.subplots()
    dress(
        ax, title=f"gold gain of best-of-{record['n']} over one sample, on fresh prompts",
        x="pairs judged", y=f"gain ({record['unit']})",
    )  # fmt: skip
    draw_gain(ax, record["differences"], record["path"])
    asked = f"asked for: {record['useful_gain']:.2g}"
    ax.axhline(record["useful_gain"], color=GREEN, linestyle="--", linewidth=1.1, label=asked)
    legend_below(ax)
    headline(figure, record["verdict"]["headline"])
    return figure


def draw_gain(
    ax: Axes,
    differences: Sequence[float],
    path: Sequence[tuple[float, float]] | None,
    *,
    note: str = "",
    alpha: float = 1.0,
    label: str | None = "mean",
) -> None:
    """Draw the mean of N judged differences after each, and the band that holds at every pair.

    Args:
        ax: where.
        differences: N of them, in the judge's unit.
        path: N intervals; None: no band.
        note: what the band's label says besides.
        alpha: opacity of the line.
        label: of the line.
    """
    pairs = np.arange(1, len(differences) + 1)
    means = np.cumsum(differences) / pairs
    ax.plot(pairs, means, color=BLUE, alpha=alpha, label=label)
    if path is not None:
        low, high = np.array(path).T
        ax.fill_between(pairs, low, high, color=BLUE, alpha=0.16, linewidth=0, label=f"95 %, valid at every pair{note}")
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set_ylim(-WIDEST, WIDEST)
