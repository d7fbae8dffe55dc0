"""What accuracy costs: every arm by accuracy and time, and by accuracy and calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rmcore.plots.arm_intervals import mean_value, seed_values
from rmcore.plots.arms import Look, looks, short, shown
from rmcore.plots.labels import place_labels
from rmcore.plots.quantities import axis_label, level, tick_text
from rmcore.plots.style import dress, headline, new_figure, note, save
from rmcore.report.experiment_schema import ArmResult, CellResult, MetricInfo

_SIDES = {True: "right", False: "left", None: ""}
_FURTHER = Look("#b9c0c7", "o")


def tradeoff(
    arms: Sequence[ArmResult],
    cells: Sequence[CellResult],
    infos: Mapping[str, MetricInfo],
    out: Path,
    *,
    accuracy: str,
    others: Sequence[str],
) -> Path:
    """Write `tradeoff_figure` to `out` (PNG); returns `out`."""
    return save(tradeoff_figure(arms, cells, infos, accuracy=accuracy, others=others), out)


def tradeoff_figure(
    arms: Sequence[ArmResult],
    cells: Sequence[CellResult],
    infos: Mapping[str, MetricInfo],
    *,
    accuracy: str,
    others: Sequence[str],
) -> Figure:
    """Accuracy against each of `others` (a cost, a calibration error): every seed faint, every arm's mean labelled.

    The panels share the accuracy axis, so an arm keeps its height. Above nine arms only the control and the most
    accurate are labelled.

    Args:
        arms: their means are the large markers.
        cells: the small ones.
        infos: what the metrics are.
        accuracy: metric of the vertical axis, of which more is better.
        others: metrics of the horizontal axes, at least one.
    """
    figure = new_figure(1.0 + 5.0 * len(others), 4.7)
    figure.set_layout_engine("constrained", wspace=0.05)
    axes = figure.subplots(1, len(others), sharey=True, squeeze=False).ravel()
    better = infos[accuracy]["higher_is_better"]
    look, named = looks(arms, accuracy, better), shown(arms, accuracy, better)
    for ax, other in zip(axes, others, strict=True):
        _panel(ax, arms, cells, (other, accuracy), infos, {name: look[name] for name in named})
    axes[0].set_ylabel(axis_label(infos[accuracy]["label"], infos[accuracy]["unit"]))
    headline(figure, _title(arms, accuracy, others[0], infos))
    figure.draw_without_rendering()  # labels are placed in pixels, which exist only after the layout
    for ax, other in zip(axes, others, strict=True):
        _name_means(ax, arms, cells, (other, accuracy), {name: look[name] for name in named})
    return figure


def _panel(
    ax: Axes,
    arms: Sequence[ArmResult],
    cells: Sequence[CellResult],
    names: tuple[str, str],
    infos: Mapping[str, MetricInfo],
    look: Mapping[str, Look],
) -> None:
    """Seeds and means of two metrics, (horizontal, vertical); arms without a look are grey."""
    across, up = (infos[name] for name in names)
    side = _SIDES[across["higher_is_better"]]
    grey = f"; grey: {len(arms) - len(look)} further arms" if len(arms) > len(look) else ""
    title = f"small: each seed; large: mean of an arm{grey}\nbetter: {f'{side} and ' if side else ''}up"
    dress(ax, title=title, x=axis_label(across["label"], across["unit"]), y="")
    empty = True
    for arm in arms:
        seeds, mean = seed_values(cells, arm["name"], names), _mean(arm, names)
        colour, marker = look.get(arm["name"], _FURTHER)
        ax.plot(seeds[:, 0], seeds[:, 1], marker, color=colour, alpha=0.3, markersize=5, markeredgewidth=0)
        order = 4 if arm["name"] in look else 3
        if mean is not None:
            ax.plot(*mean, marker, color=colour, markersize=9, markeredgecolor="white", zorder=order, label=arm["name"])
        empty = empty and mean is None and len(seeds) == 0
    if empty:
        note(ax, f"no cell has both {across['label']} and {up['label']}")
        return
    ax.margins(0.13)
    for axis, info in ((ax.xaxis, across), (ax.yaxis, up)):
        axis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=2, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(tick_text(info["unit"])))


def _name_means(
    ax: Axes,
    arms: Sequence[ArmResult],
    cells: Sequence[CellResult],
    names: tuple[str, str],
    look: Mapping[str, Look],
) -> None:
    means = {arm["name"]: _mean(arm, names) for arm in arms}
    known = {name: point for name, point in means.items() if point is not None and name in look}
    others = [point for name, point in means.items() if point is not None and name not in look]
    seeds = [seed_values(cells, arm["name"], names) for arm in arms]
    faint = np.concatenate([*seeds, np.array(others, dtype=np.float64).reshape(-1, 2)])
    inks = [look[name].ink for name in known]
    place_labels(ax, list(known.values()), [short(name) for name in known], inks, faint)


def _mean(arm: ArmResult, names: tuple[str, str]) -> tuple[float, float] | None:
    """The arm's means of two metrics; None where one is missing."""
    across, up = (mean_value(arm, name) for name in names)
    return None if across is None or up is None else (across, up)


def _title(arms: Sequence[ArmResult], accuracy: str, other: str, infos: Mapping[str, MetricInfo]) -> str:
    """The most accurate arm and the control, with both metrics."""
    points = {arm["name"]: _mean(arm, (other, accuracy)) for arm in arms}
    known = {name: point for name, point in points.items() if point is not None}
    if not known:
        return f"{infos[accuracy]['label']} against {infos[other]['label']}".capitalize()

    def told(name: str) -> str:
        across, up = known[name]
        beside = f"{infos[other]['label']} {level(across, infos[other]['unit'])}"
        return f"{short(name)} ({level(up, infos[accuracy]['unit'])}, {beside})"

    best = max(known, key=lambda name: known[name][1])
    control = next((arm["name"] for arm in arms if arm["is_control"] and arm["name"] in known), best)
    return f"Most accurate: {told(best)}" + ("" if control == best else f"; control {told(control)}")
