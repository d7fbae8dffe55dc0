"""Learning curves by arm: the mean over seeds as a line, every seed thin behind it, names below."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.core.metric_spec import MetricSpec
from rmcore.core.metrics import CURVES
from rmcore.reporting.experiment_schema import ArmResult, CurveData
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.arms import ArmStyle, looks, name_arms, shown
from rmcore.reporting.figures.training import running_mean, smoothing_window

_ROBUST = (1.0, 99.0)  # percentiles of all points that a vertical axis shows ...
_ROOM = 0.25  # ... with this share of their distance on either side: one diverged seed flattens no other


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
    look, named = looks(arms, *main), shown(arms, *main)
    ends = [_panel(ax, metric, own, look, named) for ax, (metric, own) in zip(axes, curves.items(), strict=True)]
    first = next(iter(curves))
    style.headline(figure, _title(first, ends[0], {arm["name"] for arm in arms if arm["is_control"]}))
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


def _panel(
    ax: Axes, metric: str, curves: Sequence[CurveData], look: Mapping[str, ArmStyle], named: Sequence[str]
) -> dict[str, float]:
    """Draw one metric; returns the last values of the named arms' means."""
    spec = CURVES.get(metric, MetricSpec(metric, metric, ""))
    ends = {}
    window = smoothing_window(max(len(curve["steps"]) for curve in curves))  # one for all, or arms would not compare
    for name in look:
        own = [_series(curve, window) for curve in curves if curve["arm"] == name and len(curve["steps"])]
        colour, order = (look[name].colour, 3.0) if name in named else (style.MUTED, 1.5)
        for seed in own:
            ax.plot(*seed, color=colour, linewidth=0.8, alpha=0.35, zorder=order - 1)
        steps, values = mean_curve(own)
        if len(steps) == 0 or name not in named:
            continue
        ax.plot(steps, values, color=colour, linewidth=1.9, zorder=order)
        ax.plot(steps[-1:], values[-1:], look[name].marker, color=colour, markersize=6, zorder=order + 1, label=name)
        ends[name] = float(values[-1])
    suffix = "" if len(ends) == len(look) else f"\ngrey: {len(look) - len(ends)} further arms"
    title = f"thick: mean over seeds, up to where the first seed stopped; thin: each seed{suffix}"
    style.dress(ax, title=title, x="optimizer step", y=style.axis_label(spec.label, spec.unit))
    _finish(ax, spec.unit)
    return ends


def _finish(ax: Axes, unit: str) -> None:
    style.whole_ticks(ax.xaxis)
    style.unit_ticks(ax.yaxis, unit)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.lines])
    low, high = np.percentile(drawn, _ROBUST)
    bottom, top = ax.get_ylim()
    ax.set_ylim(max(bottom, low - _ROOM * (high - low)), min(top, high + _ROOM * (high - low)))


def _series(curve: CurveData, window: int) -> tuple[FloatArray, FloatArray]:
    """Steps and smoothed values."""
    values = np.asarray(curve["values"], dtype=np.float64)
    return np.asarray(curve["steps"], dtype=np.float64), running_mean(values, window)


def _title(metric: str, values: Mapping[str, float], controls: set[str]) -> str:
    spec = CURVES.get(metric, MetricSpec(metric, metric, ""))
    label, unit = style.capital(spec.label), spec.unit
    if not values:
        return f"{label}: nothing was logged"
    low, high = min(values.values()), max(values.values())
    text = f"{label} at the end, means over seeds: {numbers.text(low, unit)} to {numbers.text(high, unit)}"
    control = next((name for name in values if name in controls), None)
    return text if control is None else f"{text}, control {numbers.text(values[control], unit)}"
