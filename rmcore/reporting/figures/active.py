"""Labels saved by choosing them: accuracy by number of labels, and the saving at each target."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from rmcore.reporting.figures.numbers import bound, percent
from rmcore.reporting.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PINK,
    SMALL,
    dress,
    headline,
    legend,
    new_figure,
)

LOOKS = {
    "random": (MUTED, "o"),
    "entropy": (BLUE, "s"),
    "variance": (GREEN, "^"),
    "bald": (PINK, "D"),
    "d-optimal": (ORANGE, "v"),
}
"""Colour and marker of each acquisition function."""
BANDS = 2
"""Curves with a band: more hide each other. Random and the best of the others."""


def label_efficiency_figure(found: Mapping[str, Any]) -> Figure:
    """Held-out accuracy by number of labels, a panel a noise level, a curve an acquisition function.

    The bands are 95 % intervals of the mean over seeds; how far two curves of a seed are apart varies less than that.

    Args:
        found: of `rmcore.active.analysis.analyse`.
    """
    levels = found["noise"]
    figure = new_figure(0.8 + 4.6 * len(levels), 4.6)
    axes = figure.subplots(1, len(levels), squeeze=False, sharey=True).ravel()
    for ax, level in zip(axes, levels, strict=True):
        _curves(ax, level)
        dress(ax, title=_noise(level["noise"]), x="labels, validation pairs counted", y="")
    axes[0].set_ylabel("held-out pairwise accuracy", fontsize=10.0, color=INK)
    legend(axes[0], loc="lower right")
    headline(figure, found["headline"])
    return figure


def _curves(ax: Axes, level: Mapping[str, Any]) -> None:
    counts = level["num_labels"]
    best = max((name for name in level["curves"] if name != "random"), key=lambda name: _area(level, name), default="")
    for name, rows in level["curves"].items():
        colour, marker = LOOKS[name]
        if name in ("random", best):
            low, high = ([bound(row, end) for row in rows] for end in ("ci_low", "ci_high"))
            ax.fill_between(counts, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(
            counts, [row["value"] for row in rows],
            color=colour, marker=marker, markersize=4, linewidth=2.2 if name == "random" else 1.5, label=name,
        )  # fmt: skip
    ax.axhline(level["end"], color=MUTED, linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    shown = counts[:: max(1, len(counts) // 5)]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{count:,}" for count in shown])
    ax.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _area(level: Mapping[str, Any], name: str) -> float:
    """Mean accuracy over the logarithm of the number of labels."""
    values = np.array([row["value"] for row in level["curves"][name]])
    return float(np.trapezoid(values, np.log(level["num_labels"])))


def label_savings_figure(found: Mapping[str, Any]) -> Figure:
    """Share of labels saved against random choice, a panel a noise level, by target and acquisition function.

    A saving that does not exist because some seed never reaches the target is written, not drawn. The dotted line is
    the claimed saving; intervals that reach beyond -150 % are cut there.

    Args:
        found: of `rmcore.active.analysis.analyse`.
    """
    levels = found["noise"]
    figure = new_figure(1.6 + 4.2 * len(levels), 5.2)
    axes = figure.subplots(1, len(levels), squeeze=False, sharex=True, sharey=True).ravel()
    claimed = max((claim["threshold"] for claim in found["claims"]), default=0.0)
    for ax, level in zip(axes, levels, strict=True):
        _savings(ax, level["savings"], claimed)
        dress(ax, title=_noise(level["noise"]), x="labels saved against random choice", y="")
    rows = [row for level in levels for savings in level["savings"].values() for row in savings]
    shares = sorted({row["share"] for row in rows})
    lows = [bound(row, "ci_low") for row in rows if row["ci_low"] is not None]
    axes[0].set_xlim(max(-1.5, min([*lows, -0.2]) - 0.05), 1.0)
    axes[0].set_ylim(len(shares) - 0.5, -0.5)
    axes[0].set_yticks(range(len(shares)), [f"{share:.0%} of the way" for share in shares])
    for edge in range(1, len(shares)):
        for ax in axes:
            ax.axhline(edge - 0.5, color=GRID, linewidth=0.7)
    for ax in axes:
        ax.grid(visible=False, axis="y")
    if len(levels) and any(row["value"] is not None for row in rows):
        legend(axes[0], loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
    headline(figure, found["headline"])
    return figure


def _savings(ax: Axes, savings: Mapping[str, Sequence[Mapping[str, Any]]], claimed: float) -> None:
    for place, (name, rows) in enumerate(savings.items()):
        colour, marker = LOOKS[name]
        offset = (place - (len(savings) - 1) / 2) * 0.17
        known = [(at + offset, row) for at, row in enumerate(rows) if row["value"] is not None]
        for height, row in known:
            ax.plot(
                [bound(row, "ci_low"), bound(row, "ci_high")], [height] * 2,
                color=colour, linewidth=2, solid_capstyle="butt",
            )  # fmt: skip
        ax.plot(
            [row["value"] for _, row in known], [height for height, _ in known],
            color=colour, marker=marker, markersize=6, linestyle="none", label=name,
        )  # fmt: skip
        for at, row in enumerate(rows):
            if row["value"] is None:
                ax.annotate(
                    f"{name}: not reached in {max(row['num_censored_active'], row['num_censored_random'])} of "
                    f"{row['num_seeds']} seeds",
                    (0.99, at + offset), xycoords=("axes fraction", "data"), fontsize=SMALL - 2, color=colour,
                    va="center", ha="right",
                )  # fmt: skip
    ax.axvline(0, color=MUTED, linewidth=1.0)
    if claimed:
        ax.axvline(claimed, color=MUTED, linewidth=1.0, linestyle=":")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _noise(noise: float) -> str:
    return "labels as they are" if noise == 0 else f"{percent(noise).replace('.0', '')} of the labels turned around"
