"""Every figure of an experiment from its record: claims, arms (`arms.py`), and learning curves."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rmcore.core.arrays import FloatArray
from rmcore.core.metric_spec import MetricSpec
from rmcore.core.metrics import CURVES
from rmcore.reporting.experiment_schema import ArmResult, CurveData, ExperimentResults, HypothesisResult, MetricInfo
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.arms import (
    ArmStyle,
    arm_intervals_figure,
    arm_styles,
    labelled_arms,
    main_metrics,
    name_arms,
)
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
from rmcore.reporting.figures.training import running_mean, smoothing_window

_FOREST_WIDTH = 10.0  # inches
_CLAIM_HEIGHT = 1.3  # inches
_CLAIM_WIDTH = 108  # characters of a line of a claim
_NEUTRAL = {"difference": 0.0, "ratio": 1.0}
"""Where arm and versus are equal."""
_ROBUST = (1.0, 99.0)  # percentiles of all points that a vertical axis shows ...
_ROOM = 0.25  # ... with this share of their distance on either side: one diverged seed flattens no other


def draw_experiment(results: ExperimentResults, folder: Path) -> dict[str, Path]:
    """Draw what the record has data for; PNG files by name: forest_plot, arm_intervals, learning_curves.

    Args:
        results: record of the experiment.
        folder: where the files go; made if missing.
    """
    drawn = {}
    arms, cells, infos = results["arms"], results["cells"], results["metrics"]
    if results["hypotheses"]:
        drawn["forest_plot"] = forest_plot_figure(results["hypotheses"], infos)
    measured = [name for name in main_metrics(list(infos), results["hypotheses"]) if _is_measured(results, name)]
    if measured:
        drawn["arm_intervals"] = arm_intervals_figure(arms, cells, measured, infos)
    curves = {name: [curve for curve in logged if curve["steps"]] for name, logged in results["curves"].items()}
    curves = {name: logged for name, logged in curves.items() if logged}
    if curves:
        main = next(((name, info["higher_is_better"]) for name, info in infos.items()), ("", None))
        drawn["learning_curves"] = learning_curves_figure(curves, arms, main)
    return {name: style.save(figure, folder / f"{name}.png") for name, figure in drawn.items()}


def _is_measured(results: ExperimentResults, name: str) -> bool:
    return any(arm["metrics"].get(name, {"value": None})["value"] is not None for arm in results["arms"])


def forest_plot_figure(hypotheses: Sequence[HypothesisResult], metrics: Mapping[str, MetricInfo]) -> Figure:
    """One panel a hypothesis, each on its own scale: value and interval, threshold, claimed side shaded, verdict.

    Args:
        hypotheses: at least one; one without interval is drawn as a hollow point, one without value as a sentence.
        metrics: what the hypotheses' metrics are; a metric that is not listed keeps its name.
    """
    claims = [textwrap.wrap(f"{item['name']}: {item['claim']}", _CLAIM_WIDTH) for item in hypotheses]
    heights = [_CLAIM_HEIGHT + 0.19 * (len(lines) - 1) for lines in claims]
    figure = style.new_figure(_FOREST_WIDTH, 1.0 + sum(heights))
    axes = figure.subplots(len(hypotheses), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    for ax, item, lines in zip(axes, hypotheses, claims, strict=True):
        _claim_panel(ax, item, metrics.get(item["metric"]), lines)
    figure.set_layout_engine("constrained", h_pad=0.08)
    style.headline(figure, tally(hypotheses))
    style.shared_legend(figure, 4, side="left", handles=_forest_key())
    return figure


def _claim_panel(ax: Axes, item: HypothesisResult, info: MetricInfo | None, claim: Sequence[str]) -> None:
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
    low, high = _claim_limits(item, drawn)
    ax.set_xlim(low, high)
    ax.xaxis.label.set_fontsize(style.SMALL)
    style.round_ticks(ax.xaxis, 8, 3)
    style.unit_ticks(ax.xaxis, unit, comparison)
    ax.axvspan(*claimed_span(item, low, high), color=style.GREEN, alpha=0.13, linewidth=0)
    for border in borders(item):
        ax.axvline(border, color=style.INK, linewidth=1.4, label="threshold")
    if comparison in _NEUTRAL and low < _NEUTRAL[comparison] < high:
        ax.axvline(_NEUTRAL[comparison], color=style.MUTED, linewidth=1.1, linestyle=":")
    _draw_claim(ax, drawn, colour, marker)
    value, bounds = claim_estimate(item, unit)
    lines = f"measured {value}\n({bounds or 'no interval'})\nclaimed {claimed(item, unit)}"
    next_to: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    ax.annotate(
        words, (1, 1), (12, 5), color=colour, fontsize=style.LABEL + 1, fontweight="bold", va="bottom", **next_to
    )
    ax.annotate(lines, (1, 1), (12, 1), color=style.INK, fontsize=style.SMALL, va="top", **next_to)


def _draw_claim(ax: Axes, drawn: Mapping[str, float | None], colour: str, marker: str) -> None:
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


def _claim_limits(item: HypothesisResult, drawn: Mapping[str, float | None]) -> tuple[float, float]:
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


def _forest_key() -> list[Any]:
    return [
        style.key_line(f"measured, {SEED_INTERVAL}", marker="o", linewidth=3, alpha=0.75),
        style.key_line("threshold, fixed before", linewidth=1.4),
        Patch(color=style.GREEN, alpha=0.2, label="side that the claim names"),
        style.key_line("no difference", color=style.MUTED, linewidth=1.1, linestyle=":"),
    ]


def learning_curves_figure(
    curves: Mapping[str, Sequence[CurveData]], arms: Sequence[ArmResult], main: tuple[str, bool | None]
) -> Figure:
    """One panel a metric over optimizer steps, up to nine arms named below; further arms are grey.

    The mean ends where the first seed of the arm stopped: beyond, it would be over other seeds. Lines of 60 points and
    more are running means.

    Args:
        curves: by metric, each with at least one curve.
        arms: their order and control give the colours.
        main: metric by which the nine of more arms are chosen, and whether higher is better.
    """
    figure = style.new_figure(1.0 + 5.0 * len(curves), 5.0)
    axes = figure.subplots(1, len(curves), squeeze=False).ravel()
    look, named = arm_styles(arms, *main), labelled_arms(arms, *main)
    ends = [
        _curve_panel(ax, metric, logged, look, named) for ax, (metric, logged) in zip(axes, curves.items(), strict=True)
    ]
    first = next(iter(curves))
    style.headline(figure, _curves_title(first, ends[0], {arm["name"] for arm in arms if arm["is_control"]}))
    name_arms(figure, {name: look[name] for name in named})
    return figure


def mean_curve(series: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Steps and mean of (steps, values) of one arm over the steps that all of them reach, linear between points."""
    if not series:
        return np.empty(0), np.empty(0)
    start, stop = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= start) & (grid <= stop)]
    return grid, np.mean([np.interp(grid, steps, values) for steps, values in series], axis=0)


def _curve_panel(
    ax: Axes, metric: str, curves: Sequence[CurveData], look: Mapping[str, ArmStyle], named: Sequence[str]
) -> dict[str, float]:
    """Draw one metric; returns the last values of the named arms' means."""
    spec = CURVES.get(metric, MetricSpec(metric, metric, ""))
    ends = {}
    window = smoothing_window(max(len(curve["steps"]) for curve in curves))  # one for all, or arms would not compare
    for name in look:
        seeds = [_smoothed(curve, window) for curve in curves if curve["arm"] == name and len(curve["steps"])]
        colour, order = (look[name].colour, 3.0) if name in named else (style.MUTED, 1.5)
        for seed in seeds:
            ax.plot(*seed, color=colour, linewidth=0.8, alpha=0.35, zorder=order - 1)
        steps, values = mean_curve(seeds)
        if len(steps) == 0 or name not in named:
            continue
        ax.plot(steps, values, color=colour, linewidth=1.9, zorder=order)
        ax.plot(steps[-1:], values[-1:], look[name].marker, color=colour, markersize=6, zorder=order + 1, label=name)
        ends[name] = float(values[-1])
    suffix = "" if len(ends) == len(look) else f"\ngrey: {len(look) - len(ends)} further arms"
    title = f"thick: mean over seeds, up to where the first seed stopped; thin: each seed{suffix}"
    style.dress(ax, title=title, x="optimizer step", y=style.axis_label(spec.label, spec.unit))
    _scale_curves(ax, spec.unit)
    return ends


def _scale_curves(ax: Axes, unit: str) -> None:
    style.whole_ticks(ax.xaxis)
    style.unit_ticks(ax.yaxis, unit)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.lines])
    low, high = np.percentile(drawn, _ROBUST)
    bottom, top = ax.get_ylim()
    ax.set_ylim(max(bottom, low - _ROOM * (high - low)), min(top, high + _ROOM * (high - low)))


def _smoothed(curve: CurveData, window: int) -> tuple[FloatArray, FloatArray]:
    """Steps and smoothed values."""
    values = np.asarray(curve["values"], dtype=np.float64)
    return np.asarray(curve["steps"], dtype=np.float64), running_mean(values, window)


def _curves_title(metric: str, values: Mapping[str, float], controls: set[str]) -> str:
    spec = CURVES.get(metric, MetricSpec(metric, metric, ""))
    label, unit = style.capital(spec.label), spec.unit
    if not values:
        return f"{label}: nothing was logged"
    low, high = min(values.values()), max(values.values())
    text = f"{label} at the end, means over seeds: {numbers.text(low, unit)} to {numbers.text(high, unit)}"
    control = next((name for name in values if name in controls), None)
    return text if control is None else f"{text}, control {numbers.text(values[control], unit)}"
