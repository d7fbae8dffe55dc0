"""What optimising a policy would do: disagreement along best-of-n, and readiness against the true gain."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures.numbers import bound, decimal
from rmcore.reporting.figures.overoptimization import NAMES
from rmcore.reporting.figures.style import BLUE, MUTED, ORANGE, PALETTE, dress, headline, legend, new_figure

CAREFUL = {
    "reward_model": "reward model alone",
    "mean": "mean of the members",
    "worst_case": "least of the members",
    "uncertainty_weighted": "mean − 0.5 variance",
}
SCORES = {
    "v1": METRICS["readiness_v1"].label,
    "flatness": "flatness (−λmax)",
    "pairwise_accuracy": "accuracy on labelled pairs",
    "on_policy_accuracy": METRICS["on_policy_accuracy"].label,
    "win_rate_16": METRICS["win_rate_16"].label,
    "measured_gain": "gain on 50 judged prompts",
    "v2": "readiness v2",
}


def disagreement_by_gain_figure(along: Sequence[Mapping[str, Any]], careful: Mapping[str, Any]) -> Figure:
    """Left: disagreement of the members on what best-of-n picks; right: gold gain of careful rewards at the largest n.

    Args:
        along: n, value, ci_low, ci_high of the disagreement, in standard deviations within prompts.
        careful: {"n", "gains": {name: value with interval}, "differences"}.
    """
    figure = new_figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
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
    names = list(careful["gains"])
    _intervals(right, [CAREFUL[name] for name in names], [careful["gains"][name] for name in names])
    dress(right, title=f"best of {careful['n']} by", x="gold gain (sd within prompts)", y="")
    change = values[-1] - values[0]
    word = "rises" if change > 0 else "falls"
    headline(
        figure,
        f"Disagreement {word} from {decimal(values[0])} for a usual sample to {decimal(values[-1])} for the best of "
        f"{counts[-1]}",
    )
    return figure


def readiness_against_gain_figure(found: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> Figure:
    """Two scores against the realised gain, one point a reward model, and every score's rank correlation with it.

    Args:
        found: of `rmcore.policy.readiness.validation.analyse`, as a record.
        models: one row a reward model with v1, on_policy_accuracy, defect and the gains.
    """
    figure = new_figure(15.0, 5.4)
    first, second, third = figure.subplots(1, 3)
    gain = f"{found['optimizer']}_gain"
    _scatter(first, models, "v1", gain, found["min_gain"])
    _scatter(second, models, "on_policy_accuracy", gain, found["min_gain"])
    second.set_ylabel("")
    legend(second, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
    by_score = {name: found["correlations"][name][found["optimizer"]] for name in SCORES}
    _intervals(third, [SCORES[name] for name in by_score], list(by_score.values()))
    third.axvline(0, color=MUTED, linewidth=0.8)
    dress(third, title="rank correlation with the gain", x="Spearman's ρ, 95 % over backbones", y="")
    headline(figure, found["verdict"])
    return figure


def _scatter(ax: Axes, models: Sequence[Mapping[str, Any]], score: str, gain: str, least: float) -> None:
    for index, defect in enumerate(sorted({str(row["defect"]) for row in models})):
        chosen = [row for row in models if row["defect"] == defect]
        ax.scatter(
            [row[score] for row in chosen], [row[gain] for row in chosen],
            s=26, color=PALETTE[index % len(PALETTE)], alpha=0.8, label=defect.replace("_", " "), linewidths=0,
        )  # fmt: skip
    ax.axhline(least, color=MUTED, linewidth=0.8, linestyle=":")
    method = NAMES[gain.removesuffix("_gain")]
    dress(ax, title=f"{SCORES[score]} and what {method} gained", x=SCORES[score], y="gold gain (sd within prompts)")


def _intervals(ax: Axes, names: Sequence[str], values: Sequence[Mapping[str, Any]]) -> None:
    """A dot and its interval a row, the first one on top."""
    for place, value in enumerate(values):
        low, high = bound(value, "ci_low"), bound(value, "ci_high")
        ax.plot([low, high], [place, place], color=BLUE, linewidth=2, solid_capstyle="butt")
        ax.plot([value["value"]], [place], marker="o", markersize=6, color=ORANGE)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
