"""Disagreement of an ensemble: its distribution in and out of distribution, and whether it indicates wrong rankings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures.numbers import bound, percent
from rmcore.reporting.figures.style import BLUE, INK, MUTED, ORANGE, dress, headline, legend, new_figure, note

NUM_BINS = 40


def disagreement_figure(
    inside: FloatArray,
    outside: FloatArray | None,
    threshold: float,
    detection: Mapping[str, Any] | None,
    errors: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Figure:
    """Left: disagreement of responses in and out of distribution; right: accuracy of pairs by their disagreement.

    Args:
        inside: (N,) disagreement of held-out responses, in standard deviations within prompts.
        outside: (K,) of responses out of distribution; None where there are none.
        threshold: above which a response is flagged.
        detection: AUROC of disagreement {value, ci_low, ci_high}; None where there is nothing to tell apart.
        errors: group ("in distribution", "out of distribution") -> bins from low to high disagreement, each with
            disagreement and accuracy {value, ci_low, ci_high}.
    """
    figure = new_figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    _distributions(left, inside, outside, threshold)
    _accuracies(right, errors)
    headline(figure, finding(inside, outside, threshold, detection))
    return figure


def finding(
    inside: FloatArray, outside: FloatArray | None, threshold: float, detection: Mapping[str, Any] | None
) -> str:
    """Say in one sentence what the figure shows."""
    flagged = percent(float(np.mean(inside > threshold)))
    if outside is None or detection is None:
        return f"{flagged} of new responses are flagged; nothing out of distribution was given to compare with"
    both = f"{percent(float(np.mean(outside > threshold)))} of them are flagged, and {flagged} of usual ones"
    low, high = detection["ci_low"], detection["ci_high"]
    told = f"AUROC {detection['value']:.2f}" + ("" if low is None else f", 95 % interval {low:.2f} to {high:.2f}")
    if low is not None and low > 0.5:
        return f"Members disagree more on responses out of distribution ({told}): {both}"
    if high is not None and high < 0.5:
        return f"Members disagree less on responses out of distribution ({told}): {both}"
    return f"Disagreement does not tell responses out of distribution ({told}): {both}"


def _distributions(ax: Axes, inside: FloatArray, outside: FloatArray | None, threshold: float) -> None:
    groups = [("in distribution", inside, BLUE)]
    if outside is not None:
        groups.append(("out of distribution", outside, ORANGE))
    every = np.concatenate([values for _, values, _ in groups])
    edges = np.linspace(0, max(float(np.quantile(every, 0.995)), 1.1 * threshold), NUM_BINS + 1)
    for name, values, colour in groups:
        # Shares, not counts: the groups differ in size. Values above the last edge are put into the last bin.
        shares = np.histogram(np.minimum(values, edges[-1]), edges)[0] / len(values)
        label = f"{name}: {len(values):,} responses, {percent(float(np.mean(values > threshold)))} flagged"
        ax.stairs(shares, edges, color=colour, fill=True, alpha=0.22)
        ax.stairs(shares, edges, color=colour, linewidth=1.4, label=label)
    # Up to the legend only, which is above the distributions.
    label = f"threshold {threshold:.2g}"
    ax.axvline(threshold, ymax=0.72, color=INK, linestyle="--", linewidth=1.1, label=label)
    dress(
        ax,
        title="each response; larger values are in the last bin",
        x="disagreement of members (standard deviations within prompts)",
        y="share of responses",
    )
    ax.set_ylim(0, 1.4 * ax.get_ylim()[1])
    legend(ax, loc="upper right")


def _accuracies(ax: Axes, errors: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    dress(
        ax,
        title="each pair, in bins of equally many from low to high disagreement",
        x="disagreement of members on the margin (same unit)",
        y="pairwise accuracy of the mean",
    )
    if not errors:
        note(ax, "no pairs to rank")
        return
    for (name, bins), colour, marker in zip(errors.items(), (BLUE, ORANGE), ("o", "s"), strict=False):
        known = [one for one in bins if one["accuracy"]["value"] is not None]
        at = np.array([one["disagreement"] for one in known])
        values = np.array([one["accuracy"]["value"] for one in known])
        ends = np.array([[bound(one["accuracy"], end) for end in ("ci_low", "ci_high")] for one in known])
        whiskers = np.abs(ends - values[:, None]).T
        ax.errorbar(at, values, yerr=whiskers, color=colour, marker=marker, markersize=5, linewidth=1.2, capsize=2,
                    elinewidth=0.9, label=f"{name}, 95 % intervals")  # fmt: skip
    ax.axhline(0.5, color=MUTED, linestyle=":", linewidth=1)
    low, _ = ax.get_ylim()
    ax.set_ylim(low, 1 + 0.28 * (1 - low))  # room for the legend above all points
    ax.set_yticks([tick for tick in ax.get_yticks() if low <= tick <= 1])
    legend(ax, loc="upper left")
