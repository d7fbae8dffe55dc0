"""The arms of an experiment side by side: each metric's mean over seeds, its interval, every seed."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETLEFT, CARETRIGHT

from rmcore.core.arrays import FloatArray
from rmcore.core.metrics import floored
from rmcore.reporting.experiment_schema import ArmResult, CellResult, MetricInfo
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.arms import ArmStyle, looks, short
from rmcore.reporting.figures.claims import SEED_INTERVAL

_COLUMNS = 3
_ROW = 0.36  # inches an arm
_TITLE = 42  # characters of a line over a panel
_WIDEST = 1.0  # intervals are shown this many times the range of all points beyond the points
_BETTER = {True: "higher is better →", False: "← lower is better", None: "neither side is better"}


def arm_intervals_figure(
    arms: Sequence[ArmResult], cells: Sequence[CellResult], metrics: Sequence[str], infos: Mapping[str, MetricInfo]
) -> Figure:
    """One panel a metric, one row an arm: mean over seeds, its interval, each seed as a small point below.

    An interval far wider than all points (two seeds) is cut and ends in an arrow.

    Args:
        arms: rows from top to bottom.
        cells: whose metrics are the small points.
        metrics: panels, at least one; names of `infos`. The first one gives the title.
        infos: what the metrics are.
    """
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = style.new_figure(2.0 + 3.1 * columns, 0.9 + rows * (1.25 + _ROW * len(arms)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    look = looks(arms, metrics[0], infos[metrics[0]]["higher_is_better"])
    for position, metric in enumerate(metrics):
        ax = axes[position]
        _panel(ax, arms, infos[metric], names=position % columns == 0)
        ax.set_xlim(_limits(arms, cells, metric))
        for row, arm in enumerate(arms):
            _row(ax, row, arm, cells, metric, look[arm["name"]])
    for ax in axes[len(metrics) :]:
        ax.set_axis_off()
    style.headline(figure, _title(arms, metrics[0], infos[metrics[0]]))
    style.shared_legend(figure, 2 if columns == 1 else 4, side="left", handles=_key())
    return figure


def seed_values(cells: Sequence[CellResult], arm: str, metrics: Sequence[str]) -> FloatArray:
    """(cells, metrics) of the arm's cells that have all of the metrics, none below its floor."""
    own = [cell["metrics"] for cell in cells if cell["arm"] == arm]
    rows = [[floored(name, numbers.finite(values.get(name))) for name in metrics] for values in own]
    return np.array([row for row in rows if None not in row], dtype=np.float64).reshape(-1, len(metrics))


def mean_value(arm: ArmResult, metric: str) -> float | None:
    """The arm's mean of a metric, not below its floor; None where there is none."""
    return floored(metric, numbers.finite(arm["metrics"][metric]["value"])) if metric in arm["metrics"] else None


def _panel(ax: Axes, arms: Sequence[ArmResult], info: MetricInfo, *, names: bool) -> None:
    title = f"{textwrap.fill(info['label'], _TITLE)}\n{_BETTER[info['higher_is_better']]}"
    style.dress(ax, title=title, x=style.axis_label("mean over seeds", info["unit"]), y="")
    bold = [place for place, arm in enumerate(arms) if arm["is_control"]]
    style.name_rows(ax, [short(arm["name"]) if names else "" for arm in arms], bold)
    style.round_ticks(ax.xaxis, 5, 2)
    style.unit_ticks(ax.xaxis, info["unit"])


def _limits(arms: Sequence[ArmResult], cells: Sequence[CellResult], metric: str) -> tuple[float, float]:
    """An axis for all means and seeds, and for intervals as far as they do not flatten the rest."""
    found = [numbers.floored_item(metric, arm["metrics"][metric]) for arm in arms if metric in arm["metrics"]]
    bounds = [one[key] for one in found for key in ("ci_low", "ci_high")]
    means = [mean_value(arm, metric) for arm in arms]
    seeds = [float(value) for arm in arms for value in seed_values(cells, arm["name"], (metric,))[:, 0]]
    points = [value for value in (*means, *seeds) if value is not None] or [0.0]
    inside = [value for value in bounds if value is not None] + points
    reach = _WIDEST * (max(points) - min(points)) or np.inf
    low, high = max(min(inside), min(points) - reach), min(max(inside), max(points) + reach)
    pad = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    return style.axis_low(metric, low - pad, high + pad), high + pad


def _row(ax: Axes, row: int, arm: ArmResult, cells: Sequence[CellResult], metric: str, look: ArmStyle) -> None:
    seeds = seed_values(cells, arm["name"], (metric,))[:, 0]
    ax.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=look.colour, alpha=0.5, markersize=3.4, label="seeds")
    value = mean_value(arm, metric)
    if value is None:
        small: dict[str, Any] = {"color": style.MUTED, "fontsize": style.SMALL, "va": "center"}
        why = "not measured of every seed" if np.isfinite(seeds).any() else "not measured"
        ax.text(0.02, row, why, transform=ax.get_yaxis_transform(), **small)
        return
    if arm["is_control"]:
        ax.axvline(value, color=style.MUTED, linewidth=1.0, linestyle=":", zorder=0)
    shown = numbers.floored_item(metric, arm["metrics"][metric])
    low, high = shown["ci_low"], shown["ci_high"]
    if low is not None and high is not None:
        _interval(ax, row, low, high, look)
    ax.plot([value], [row], look.marker, color=look.colour, markersize=7, label=arm["name"])


def _interval(ax: Axes, row: int, low: float, high: float, look: ArmStyle) -> None:
    """A line from low to high; where it leaves the axes, an arrow at their edge."""
    style.draw_interval(ax, row, {"ci_low": low, "ci_high": high}, look.colour)
    left, right = ax.get_xlim()
    marks: dict[str, Any] = {"color": look.colour, "markersize": 8, "clip_on": False}
    if low < left:
        ax.plot([left], [row], marker=CARETLEFT, **marks)
    if high > right:
        ax.plot([right], [row], marker=CARETRIGHT, **marks)


def _title(arms: Sequence[ArmResult], metric: str, info: MetricInfo) -> str:
    """The best mean of a metric and the control's."""
    means = {arm["name"]: mean_value(arm, metric) for arm in arms}
    known = {name: value for name, value in means.items() if value is not None}
    label = style.capital(info["label"])
    if not known:
        return f"{label}: no arm has a mean"
    if info["higher_is_better"] is False:
        word, best = "lowest", min(known, key=known.__getitem__)
    else:
        word, best = "highest", max(known, key=known.__getitem__)
    shown = {
        arm["name"]: numbers.told(metric, arm["metrics"][metric], info["unit"]) for arm in arms if arm["name"] in known
    }
    text = f"{label}: {word} mean {shown[best]} ({short(best)}"
    control = next((arm["name"] for arm in arms if arm["is_control"] and arm["name"] in known), None)
    if control is None:
        return f"{text})"
    return f"{text}, the control)" if control == best else f"{text}), control {shown[control]}"


def _key() -> list[Any]:
    point: dict[str, Any] = {"marker": "o", "linestyle": ""}
    return [
        style.key_line(f"mean over seeds, {SEED_INTERVAL}", marker="o", linewidth=2.5, alpha=0.75),
        style.key_line("each seed", **point, markersize=3.4, alpha=0.5),
        style.key_line("mean of the control (bold)", color=style.MUTED, linestyle=":"),
        style.key_line("the interval continues", **point | {"marker": ">"}, markersize=6),
    ]
