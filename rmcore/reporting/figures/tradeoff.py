"""The price of accuracy: every arm by accuracy and time, and by accuracy and calibration."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.reporting.experiment_schema import ArmResult, CellResult, MetricInfo
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arm_intervals import mean_value, seed_values
from rmcore.reporting.figures.arms import ArmStyle, looks, name_arms, short, shown
from rmcore.reporting.figures.style import (
    axis_label,
    axis_low,
    capital,
    dress,
    headline,
    new_figure,
    note,
    round_ticks,
    unit_ticks,
)

_SIDES = {True: "right", False: "left", None: ""}
_FURTHER = ArmStyle("#b9c0c7", "o")


class _Points(NamedTuple):
    """Where arms lie by two metrics, (horizontal, vertical)."""

    seeds: dict[str, FloatArray]
    """(cells, 2) of every arm."""
    means: dict[str, tuple[float, float]]
    """Mean of both metrics, by arm, of the arms that have both."""


def tradeoff_figure(
    arms: Sequence[ArmResult],
    cells: Sequence[CellResult],
    infos: Mapping[str, MetricInfo],
    *,
    accuracy: str,
    others: Sequence[str],
) -> Figure:
    """Accuracy against each of `others` (a cost, a calibration error): every seed faint, every arm's mean large.

    The panels share the accuracy axis, so an arm keeps its height. Above nine arms only the control and the most
    accurate are named.

    Args:
        arms: their means are the large markers.
        cells: the small ones.
        infos: what the metrics are.
        accuracy: metric of the vertical axis, of which more is better.
        others: metrics of the horizontal axes, at least one.
    """
    figure = new_figure(1.0 + 5.0 * len(others), 5.0)
    figure.set_layout_engine("constrained", wspace=0.05)
    axes = figure.subplots(1, len(others), sharey=True, squeeze=False).ravel()
    better = infos[accuracy]["higher_is_better"]
    every_look = looks(arms, accuracy, better)
    look = {name: every_look[name] for name in shown(arms, accuracy, better)}
    points = [_points(arms, cells, (other, accuracy)) for other in others]
    for ax, other, own in zip(axes, others, points, strict=True):
        _panel(ax, own, infos[other], infos[accuracy], look)
        left, right = ax.get_xlim()
        ax.set_xlim(axis_low(other, left, right), right)
    axes[0].set_ylabel(axis_label(infos[accuracy]["label"], infos[accuracy]["unit"]))
    controls = [arm["name"] for arm in arms if arm["is_control"] and arm["name"] in points[0].means]
    headline(figure, _title(arms, points[0].means, controls, (others[0], accuracy), infos))
    name_arms(figure, look)
    return figure


def _points(arms: Sequence[ArmResult], cells: Sequence[CellResult], names: tuple[str, str]) -> _Points:
    seeds = {arm["name"]: seed_values(cells, arm["name"], names) for arm in arms}
    both = {arm["name"]: [mean_value(arm, name) for name in names] for arm in arms}
    means = {name: (across, up) for name, (across, up) in both.items() if across is not None and up is not None}
    return _Points(seeds, means)


def _panel(ax: Axes, points: _Points, across: MetricInfo, up: MetricInfo, look: Mapping[str, ArmStyle]) -> None:
    """Seeds and means of two metrics; arms without a look are grey."""
    side, further = _SIDES[across["higher_is_better"]], len(points.seeds) - len(look)
    grey = f"; grey: {further} further arms" if further else ""
    title = f"small: each seed; large: mean of an arm{grey}\nbetter: {f'{side} and ' if side else ''}up"
    dress(ax, title=title, x=axis_label(across["label"], across["unit"]), y="")
    for name, seeds in points.seeds.items():
        colour, marker = look.get(name, _FURTHER)
        ax.plot(seeds[:, 0], seeds[:, 1], marker, color=colour, alpha=0.3, markersize=5, markeredgewidth=0)
        if name in points.means:
            style: dict[str, Any] = {"color": colour, "markeredgecolor": "white", "zorder": 4 if name in look else 3}
            ax.plot(*points.means[name], marker, markersize=9, label=name, **style)
    if not points.means and not any(map(len, points.seeds.values())):
        note(ax, f"no cell has both {across['label']} and {up['label']}")
        return
    ax.margins(0.13)
    for axis, info in ((ax.xaxis, across), (ax.yaxis, up)):
        round_ticks(axis, 6, 2)
        unit_ticks(axis, info["unit"])


def _title(
    arms: Sequence[ArmResult],
    known: Mapping[str, tuple[float, float]],
    controls: Sequence[str],
    names: tuple[str, str],
    infos: Mapping[str, MetricInfo],
) -> str:
    """The most accurate arm and the control, with both metrics (horizontal, vertical)."""
    other, main = (infos[name] for name in names)
    metrics = {arm["name"]: arm["metrics"] for arm in arms}
    if not known:
        return f"{capital(main['label'])} against {other['label']}"

    def both(name: str) -> str:
        across, up = (numbers.told(metric, metrics[name][metric], infos[metric]["unit"]) for metric in names)
        return f"{short(name)} ({up}, {other['label']} {across})"

    best = max(known, key=lambda name: known[name][1])
    control = next(iter(controls), best)
    return f"Most accurate: {both(best)}" + ("" if control == best else f"; control {both(control)}")
