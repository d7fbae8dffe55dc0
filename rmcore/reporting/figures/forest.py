"""Every claim of an experiment: what was measured, with its interval, against the threshold that was fixed before."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rmcore.reporting.experiment_schema import HypothesisResult, MetricInfo
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.claims import (
    SEED_INTERVAL,
    VERDICTS,
    borders,
    claim_estimate,
    claimed,
    claimed_span,
    is_of_two_seeds,
    subject,
    tally,
)

_WIDTH = 10.0  # inches
_ROW = 1.3  # inches
_CLAIM = 108  # characters of a line of a claim
_NEUTRAL = {"difference": 0.0, "ratio": 1.0}
"""Where arm and versus are equal."""


def forest_plot_figure(hypotheses: Sequence[HypothesisResult], metrics: Mapping[str, MetricInfo]) -> Figure:
    """One panel a hypothesis, each on its own scale: value and interval, threshold, claimed side shaded, verdict.

    Args:
        hypotheses: at least one; one without interval is drawn as a hollow point, one without value as a sentence.
        metrics: what the hypotheses' metrics are; a metric that is not listed keeps its name.
    """
    claims = [textwrap.wrap(f"{item['name']}: {item['claim']}", _CLAIM) for item in hypotheses]
    heights = [_ROW + 0.19 * (len(lines) - 1) for lines in claims]
    figure = style.new_figure(_WIDTH, 1.0 + sum(heights))
    axes = figure.subplots(len(hypotheses), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    for ax, item, lines in zip(axes, hypotheses, claims, strict=True):
        _panel(ax, item, metrics.get(item["metric"]), lines)
    figure.set_layout_engine("constrained", h_pad=0.08)
    style.headline(figure, tally(hypotheses))
    style.shared_legend(figure, 4, side="left", handles=_key())
    return figure


def _panel(ax: Axes, item: HypothesisResult, info: MetricInfo | None, claim: Sequence[str]) -> None:
    unit, label = (info["unit"], info["label"]) if info else ("", item["metric"])
    comparison = item["comparison"]
    words, colour, marker = VERDICTS[item["verdict"]]
    style.dress(ax, title="", x=style.axis_label(f"{label}, {subject(item)}", unit, comparison), y="")
    ax.set_title("\n".join(claim), loc="left", fontsize=style.LABEL, color=style.INK, pad=6)
    ax.set_ylim(-1, 1)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    # A difference of errors may be negative; an error may not.
    drawn = numbers.floored_item(item["metric"] if comparison == "level" else "", item)
    if is_of_two_seeds(item):
        drawn |= {"ci_low": None, "ci_high": None}
    low, high = _limits(item, drawn)
    ax.set_xlim(low, high)
    ax.xaxis.label.set_fontsize(style.SMALL)
    style.round_ticks(ax.xaxis, 8, 3)
    style.unit_ticks(ax.xaxis, unit, comparison)
    ax.axvspan(*claimed_span(item, low, high), color=style.GREEN, alpha=0.13, linewidth=0)
    for border in borders(item):
        ax.axvline(border, color=style.INK, linewidth=1.4, label="threshold")
    if comparison in _NEUTRAL and low < _NEUTRAL[comparison] < high:
        ax.axvline(_NEUTRAL[comparison], color=style.MUTED, linewidth=1.1, linestyle=":")
    _mark(ax, drawn, colour, marker)
    value, bounds = claim_estimate(item, unit)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    ax.annotate(words, (1, 1), (12, 5), color=colour, fontsize=style.LABEL + 1, fontweight="bold", va="bottom", **place)
    lines = f"measured {value}\n({bounds or 'no interval'})\nclaimed {claimed(item, unit)}"
    ax.annotate(lines, (1, 1), (12, 1), color=style.INK, fontsize=style.SMALL, va="top", **place)


def _mark(ax: Axes, drawn: Mapping[str, float | None], colour: str, marker: str) -> None:
    value, low, high = (drawn[key] for key in ("value", "ci_low", "ci_high"))
    if value is None:
        ax.text(
            0.5, 0.5, "no value: see the reason in the text", transform=ax.transAxes, ha="center", color=style.MUTED
        )
        return
    face = "white"
    if low is not None and high is not None:
        face = colour
        ax.plot([low, high], [0, 0], color=colour, linewidth=3, solid_capstyle="butt", alpha=0.75, label="interval")
    ax.plot([value], [0], marker, color=colour, markersize=9, markerfacecolor=face, markeredgewidth=1.6, label="value")


def _limits(item: HypothesisResult, drawn: Mapping[str, float | None]) -> tuple[float, float]:
    """An axis that holds value, interval, threshold and, unless far away, the point of no difference."""
    inside = [value for value in (*drawn.values(), *map(numbers.finite, borders(item))) if value is not None]
    low, high = min(inside), max(inside)
    neutral = _NEUTRAL.get(item["comparison"])
    if neutral is not None:
        reach = 1.5 * (high - low) or abs(high - neutral)
        if low - reach <= neutral <= high + reach:
            low, high = min(low, neutral), max(high, neutral)
    pad = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return low - pad, high + pad


def _key() -> list[Any]:
    return [
        style.key_line(f"measured, {SEED_INTERVAL}", marker="o", linewidth=3, alpha=0.75),
        style.key_line("threshold, fixed before", linewidth=1.4),
        Patch(color=style.GREEN, alpha=0.2, label="side that the claim names"),
        style.key_line("no difference", color=style.MUTED, linewidth=1.1, linestyle=":"),
    ]
