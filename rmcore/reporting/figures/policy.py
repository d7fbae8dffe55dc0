"""Expected effects of optimising a policy: disagreement along best-of-n, and readiness against the true gain."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures.numbers import bound, decimal
from rmcore.reporting.figures.overoptimization import NAMES
from rmcore.reporting.figures.style import (
    BLUE,
    MUTED,
    ORANGE,
    PALETTE,
    dress,
    headline,
    legend,
    new_figure,
    shared_legend,
)

if TYPE_CHECKING:  # a report needs the words and numbers of this module, and draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AGGREGATIONS = {
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
    "measured_gain": "gain on the judged prompts",
    "v2": "composed score, left-out fit",
    "accuracy_fit": "on-policy accuracy, left-out fit",
    "win_rate_fit": "win rate, left-out fit",
}


def disagreement_by_gain_figure(along: Sequence[Mapping[str, Any]], conservative: Mapping[str, Any]) -> "Figure":
    """Draw how members disagree on what best-of-n picks, and the gold gain of conservative rewards at the largest n.

    Args:
        along: n, value, ci_low, ci_high of the disagreement, in standard deviations within prompts.
        conservative: {"n", "gains": {name: value with interval}, "differences"}.
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
    names = list(conservative["gains"])
    _intervals(right, [AGGREGATIONS[name] for name in names], [conservative["gains"][name] for name in names])
    dress(right, title=f"best of {conservative['n']} by", x="gold gain (sd within prompts)", y="")
    change = values[-1] - values[0]
    word = "rises" if change > 0 else "falls"
    headline(
        figure,
        f"Disagreement {word} from {decimal(values[0])} for a usual sample to {decimal(values[-1])} for the best of "
        f"{counts[-1]}",
    )
    return figure


def readiness_against_gain_figure(found: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> "Figure":
    """Two scores against the realised gain, one point a reward model, and every score's rank correlation with it.

    Args:
        found: of `rmcore.policy.readiness.validation.analyse`, as a record.
        models: one row a reward model with on_policy_accuracy, win_rate_16, world and the gains.
    """
    figure = new_figure(15.0, 5.4)
    first, second, third = figure.subplots(1, 3)
    gain = f"{found['optimizer']}_gain"
    _scatter(first, models, "on_policy_accuracy", gain, found["min_gain"])
    _scatter(second, models, "win_rate_16", gain, found["min_gain"])
    second.set_ylabel("")
    legend(second, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
    by_score = {name: found["correlations"][name][found["optimizer"]] for name in SCORES}
    _intervals(third, [SCORES[name] for name in by_score], list(by_score.values()))
    third.axvline(0, color=MUTED, linewidth=0.8)
    dress(third, title="rank correlation with the gain", x="Spearman's ρ, 95 % over recipes", y="")
    headline(figure, found["verdict"])
    return figure


def reliability_figure(found: Mapping[str, Any], names: Mapping[str, str]) -> "Figure":
    """How often models gained against the probability that was said, with intervals; on the diagonal it is true.

    The area of a dot is the number of models that it stands for: a probability that was said of two models is not
    tested by them.

    Args:
        found: {name: {"bins": [{"predicted", "gained": value with interval}]}}.
        names: of the probabilities, as the legend has them.
    """
    figure = new_figure(6.4, 5.4)
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
    for index, (name, one) in enumerate(found.items()):
        x = np.array([point["predicted"] for point in one["bins"]])
        y = np.array([point["gained"]["value"] for point in one["bins"]], dtype=float)
        low, high = (
            np.array(
                [y[i] if point["gained"][end] is None else point["gained"][end] for i, point in enumerate(one["bins"])]
            )
            for end in ("ci_low", "ci_high")
        )
        colour, ends = PALETTE[index], np.stack([np.maximum(y - low, 0), np.maximum(high - y, 0)])
        ax.errorbar(x, y, yerr=ends, color=colour, capsize=2, linewidth=0.8, alpha=0.6)
        num = [point["gained"]["num"] for point in one["bins"]]
        ax.scatter(x, y, s=[12 + count for count in num], color=colour, label=names[name], linewidths=0, zorder=3)
    shares = "share of these models that gained it"
    dress(ax, title="a dot: models of like probability", x="probability of a worthwhile gain, as it was said", y=shares)
    shared_legend(figure, 2)
    headline(figure, "How true the probabilities are")
    return figure


def _scatter(ax: "Axes", models: Sequence[Mapping[str, Any]], score: str, gain: str, least: float) -> None:
    for index, world in enumerate(dict.fromkeys(str(row["world"]) for row in models)):
        chosen = [row for row in models if row["world"] == world]
        ax.scatter(
            [row[score] for row in chosen], [row[gain] for row in chosen],
            s=26, color=PALETTE[index % len(PALETTE)], alpha=0.8, label=f"world of {world}", linewidths=0,
        )  # fmt: skip
    ax.axhline(least, color=MUTED, linewidth=0.8, linestyle=":")
    method = NAMES[gain.removesuffix("_gain")]
    dress(ax, title=f"{SCORES[score]} and what {method} gained", x=SCORES[score], y="gold gain (sd within prompts)")


def _intervals(ax: "Axes", names: Sequence[str], values: Sequence[Mapping[str, Any]]) -> None:
    """A dot and its interval a row, the first one on top."""
    for place, value in enumerate(values):
        low, high = bound(value, "ci_low"), bound(value, "ci_high")
        ax.plot([low, high], [place, place], color=BLUE, linewidth=2, solid_capstyle="butt")
        ax.plot([value["value"]], [place], marker="o", markersize=6, color=ORANGE)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
