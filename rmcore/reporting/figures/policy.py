"""Expected effects of optimising a policy: disagreement along best-of-n."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.reporting.figures.numbers import bound, decimal
from rmcore.reporting.figures.style import (
    BLUE,
    dress,
    headline,
    new_figure,
)

if TYPE_CHECKING:  # a report needs the words and numbers of this module, and draws nothing
    from matplotlib.figure import Figure


def disagreement_by_gain_figure(along: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw how members disagree on what best-of-n picks.

    Args:
        along: n, value, ci_low, ci_high of the disagreement, in standard deviations within prompts.
    """
    figure = new_figure(7.0, 4.2)
    left = figure.subplots()
    counts = [row["n"] for row in along]
    values = np.array([row["value"] for row in along])
    left.fill_between(
        counts, [bound(row, "ci_low") for row in along], [bound(row, "ci_high") for row in along],
        color=BLUE, alpha=0.18, linewidth=0,
    )  # fmt: skip
    left.plot(counts, values, marker="o", markersize=5, color=BLUE)
    left.set_xscale("log", base=2)
    left.set_xticks(counts, [str(n) for n in counts])
    left.set_ylim(bottom=0)
    dress(left, title="what best-of-n picks", x="n", y="disagreement (sd within prompts)")
    change = values[-1] - values[0]
    word = "rises" if change > 0 else "falls"
    headline(
        figure,
        f"Disagreement {word} from {decimal(values[0])} for a usual sample to {decimal(values[-1])} for the best of "
        f"{counts[-1]}",
    )
    return figure
