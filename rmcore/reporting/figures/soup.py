"""An average of weights: loss, barrier and accuracy on the ways from it to its members."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.reporting.figures.numbers import bound
from rmcore.reporting.figures.style import (
    INK,
    MUTED,
    PALETTE,
    dress,
    headline,
    new_figure,
    percent_ticks,
    shared_legend,
)

_SHIFT = 0.012
"""Distance along the way between the points of two members, so that no interval hides another one."""


def soup_figure(paths: Mapping[str, Any], tolerance: float, checks: Sequence[Mapping[str, Any]]) -> Figure:
    """Three panels over the same ways: the loss, its height above the members' own, the pairwise accuracy.

    Args:
        paths: unit, distances (G,), and members, each with name and loss, height and accuracy: (G,) of {value, ci_low,
            ci_high}.
        tolerance: height that is still no barrier, nats a pair.
        checks: each with passed and name, for the headline.
    """
    figure = new_figure(12.0, 4.6)
    loss, height, accuracy = figure.subplots(1, 3)
    _ways(loss, paths, "loss", "loss (nats a pair)", "the loss itself")
    _ways(height, paths, "height", "height over the members (nats a pair)", "a barrier stands above the line")
    height.axhline(tolerance, color=INK, linestyle="--", linewidth=1.1, label=f"allowed: {tolerance:g} nats a pair")
    height.axhline(0, color=MUTED, linestyle=":", linewidth=1)
    _ways(accuracy, paths, "accuracy", "pairwise accuracy (ties half)", "how often the right side is preferred")
    percent_ticks(accuracy.yaxis)
    handles, labels = height.get_legend_handles_labels()
    shared_legend(figure, min(len(labels), 4), handles=handles, labels=labels)
    headline(figure, _finding(checks))
    return figure


def _finding(checks: Sequence[Mapping[str, Any]]) -> str:
    failed = [str(check["name"]) for check in checks if check["passed"] is False]
    open_ones = [str(check["name"]) for check in checks if check["passed"] is None]
    if failed:
        return f"The average is refused by {', '.join(failed)}; bars are 95 % intervals over prompts"
    unknown = f", with {', '.join(open_ones)} not measured" if open_ones else ""
    return f"The average is no worse than its best member{unknown}; bars are 95 % intervals over prompts"


def _ways(ax: Axes, paths: Mapping[str, Any], what: str, label: str, title: str) -> None:
    distances = np.array(paths["distances"], dtype=np.float64)
    for number, member in enumerate(paths["members"]):
        values = np.array([np.nan if one["value"] is None else one["value"] for one in member[what]], dtype=np.float64)
        ends = np.array([[bound(one, end) for end in ("ci_low", "ci_high")] for one in member[what]])
        ax.errorbar(
            distances + _SHIFT * (number - (len(paths["members"]) - 1) / 2),
            values,
            yerr=np.abs(ends - values[:, None]).T,
            color=PALETTE[number % len(PALETTE)],
            marker="o",
            markersize=4,
            linewidth=1.3,
            capsize=2,
            elinewidth=0.9,
            label=str(member["name"]),
        )
    dress(ax, title=title, x="way from the average (0) to the member (1)", y=label)
