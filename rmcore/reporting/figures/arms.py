"""The arms of an experiment: their colours and markers, the same everywhere, and figures of their means and seeds."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.metrics import floored
from rmcore.reporting.experiment_schema import ArmResult, CellResult, MetricInfo
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.claims import SEED_INTERVAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 9
"""Arms that colours and markers tell apart; where there are more, figures with labels show this many."""
CONTROL_COLOUR = "#4a4f55"
_MOST_METRICS = 6
_COLUMNS = 3
_ROW_HEIGHT = 0.36  # inches an arm
_TITLE_WIDTH = 42  # characters of a line over a panel
_WIDEST = 1.0  # intervals are shown this many times the range of all points beyond the points
_BETTER = {True: "higher is better →", False: "← lower is better", None: "neither side is better"}


class ArmStyle(NamedTuple):
    """Colour and marker of an arm; the control is a grey diamond."""

    colour: str
    marker: str


def arm_styles(arms: Sequence[Mapping[str, Any]], metric: str, better: bool | None) -> dict[str, ArmStyle]:
    """The look of each arm by name; labelled ones are told apart, further ones repeat colours with other markers.

    Arguments as of `labelled_arms`.
    """
    labelled = labelled_arms(arms, metric, better)
    others = [arm["name"] for arm in arms if not arm["is_control"]]
    styles = {arm["name"]: ArmStyle(CONTROL_COLOUR, "D") for arm in arms}
    for position, name in enumerate(sorted(others, key=lambda name: name not in labelled)):  # stable: declared order
        turn, place = divmod(position, len(style.SERIES_COLOURS))
        marker = style.SERIES_MARKERS[(place + 3 * turn) % len(style.SERIES_MARKERS)]
        styles[name] = ArmStyle(style.SERIES_COLOURS[place], marker)
    return styles


def labelled_arms(arms: Sequence[Mapping[str, Any]], metric: str, better: bool | None) -> list[str]:
    """Names of the arms that a figure labels, in declared order: the control and the best means of `metric`.

    Args:
        arms: {name, is_control, metrics} each.
        metric: by which the best are chosen where there are more than MOST.
        better: whether higher is better; None counts as higher.
    """

    def rank(arm: Mapping[str, Any]) -> tuple[bool, float]:
        value = numbers.finite(arm["metrics"].get(metric, {}).get("value"))
        return not arm["is_control"], np.inf if value is None else value * (1 if better is False else -1)

    kept = {arm["name"] for arm in sorted(arms, key=rank)[:MOST]}
    return [arm["name"] for arm in arms if arm["name"] in kept]


def name_arms(figure: "Figure", styles: Mapping[str, ArmStyle]) -> None:
    """Name the arms in a legend below all panels."""
    handles = [
        style.key_line(style.short(name), color=look.colour, marker=look.marker) for name, look in styles.items()
    ]
    style.shared_legend(figure, min(5, len(handles)), side="left", handles=handles)


def declared_colours(arms: Sequence[str], control: str) -> dict[str, str]:
    """The colour of each arm by name before anything is measured: what `arm_styles` gives unless there are many."""
    others = (name for name in arms if name != control)
    return {control: CONTROL_COLOUR} | dict(zip(others, cycle(style.SERIES_COLOURS), strict=False))


def main_metrics(metrics: Sequence[str], hypotheses: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics shown side by side, in declared order: the first, those of hypotheses, then others up to six."""
    claimed = {hypothesis["metric"] for hypothesis in hypotheses}
    chosen = [name for position, name in enumerate(metrics) if position == 0 or name in claimed]
    others = [name for name in metrics if name not in chosen]
    chosen += others[: max(0, _MOST_METRICS - len(chosen))]
    return [name for name in metrics if name in chosen]


def seed_values(cells: Sequence[CellResult], arm: str, metric: str) -> FloatArray:
    """(cells,) values of the arm's cells that have the metric, none below its floor."""
    values = [floored(metric, numbers.finite(cell["metrics"].get(metric))) for cell in cells if cell["arm"] == arm]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def mean_value(arm: ArmResult, metric: str) -> float | None:
    """The arm's mean of a metric, not below its floor; None where there is none."""
    return floored(metric, numbers.finite(arm["metrics"][metric]["value"])) if metric in arm["metrics"] else None


def arm_intervals_figure(
    arms: Sequence[ArmResult], cells: Sequence[CellResult], metrics: Sequence[str], infos: Mapping[str, MetricInfo]
) -> "Figure":
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
    figure = style.new_figure(2.0 + 3.1 * columns, 0.9 + rows * (1.25 + _ROW_HEIGHT * len(arms)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    styles = arm_styles(arms, metrics[0], infos[metrics[0]]["higher_is_better"])
    control = [row for row, arm in enumerate(arms) if arm["is_control"]]
    for position, metric in enumerate(metrics):
        ax, info = axes[position], infos[metric]
        title = f"{textwrap.fill(info['label'], _TITLE_WIDTH)}\n{_BETTER[info['higher_is_better']]}"
        style.dress(ax, title=title, x=style.axis_label("mean over seeds", info["unit"]), y="")
        style.name_rows(ax, ["" if position % columns else style.short(arm["name"]) for arm in arms], control)
        style.round_ticks(ax.xaxis, 5, 2)
        style.unit_ticks(ax.xaxis, info["unit"])
        ax.set_xlim(_interval_limits(arms, cells, metric))
        for row, arm in enumerate(arms):
            _draw_arm(ax, row, arm, cells, metric, styles[arm["name"]])
    for ax in axes[len(metrics) :]:
        ax.set_axis_off()
    style.headline(figure, _interval_title(arms, metrics[0], infos[metrics[0]]))
    point: dict[str, Any] = {"marker": "o", "linestyle": ""}
    key = [
        style.key_line(f"mean over seeds, {SEED_INTERVAL}", marker="o", linewidth=2.5, alpha=0.75),
        style.key_line("each seed", **point, markersize=3.4, alpha=0.5),
        style.key_line("mean of the control (bold)", color=style.MUTED, linestyle=":"),
        style.key_line("the interval continues", **point | {"marker": ">"}, markersize=6),
    ]
    style.shared_legend(figure, 2 if columns == 1 else 4, side="left", handles=key)
    return figure


def _interval_limits(arms: Sequence[ArmResult], cells: Sequence[CellResult], metric: str) -> tuple[float, float]:
    """An axis for all means and seeds, and for intervals as far as they do not flatten the rest."""
    means = [numbers.floored_item(metric, arm["metrics"][metric]) for arm in arms if metric in arm["metrics"]]
    seeds = [float(value) for arm in arms for value in seed_values(cells, arm["name"], metric)]
    points = [value for value in (*(mean["value"] for mean in means), *seeds) if value is not None] or [0.0]
    ends = [mean[end] for mean in means for end in ("ci_low", "ci_high")]
    inside = [value for value in ends if value is not None] + points
    reach = _WIDEST * (max(points) - min(points)) or np.inf
    low, high = max(min(inside), min(points) - reach), min(max(inside), max(points) + reach)
    pad = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    return style.axis_low(metric, low - pad, high + pad), high + pad


def _draw_arm(ax: "Axes", row: int, arm: ArmResult, cells: Sequence[CellResult], metric: str, look: ArmStyle) -> None:
    from matplotlib.markers import CARETLEFT, CARETRIGHT

    seeds = seed_values(cells, arm["name"], metric)
    ax.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=look.colour, alpha=0.5, markersize=3.4, label="seeds")
    value = mean_value(arm, metric)
    if value is None:
        small: dict[str, Any] = {"color": style.MUTED, "fontsize": style.SMALL, "va": "center"}
        why = "not measured of every seed" if len(seeds) else "not measured"
        ax.text(0.02, row, why, transform=ax.get_yaxis_transform(), **small)
        return
    if arm["is_control"]:
        ax.axvline(value, color=style.MUTED, linewidth=1.0, linestyle=":", zorder=0)
    interval = numbers.floored_item(metric, arm["metrics"][metric])
    low, high = interval["ci_low"], interval["ci_high"]
    style.draw_interval(ax, row, interval, look.colour)
    left, right = ax.get_xlim()
    arrow: dict[str, Any] = {"color": look.colour, "markersize": 8, "clip_on": False}
    if low is not None and low < left:
        ax.plot([left], [row], marker=CARETLEFT, **arrow)
    if high is not None and high > right:
        ax.plot([right], [row], marker=CARETRIGHT, **arrow)
    ax.plot([value], [row], look.marker, color=look.colour, markersize=7, label=arm["name"])


def _interval_title(arms: Sequence[ArmResult], metric: str, info: MetricInfo) -> str:
    """The best mean of a metric and the control's."""
    means = {arm["name"]: mean_value(arm, metric) for arm in arms}
    known = {name: value for name, value in means.items() if value is not None}
    label = style.capital(info["label"])
    if not known:
        return f"{label}: no arm has a mean"
    word, choose = ("lowest", min) if info["higher_is_better"] is False else ("highest", max)
    best = choose(known, key=known.__getitem__)
    texts = {
        arm["name"]: numbers.in_sentence(metric, arm["metrics"][metric], info["unit"])
        for arm in arms
        if arm["name"] in known
    }
    text = f"{label}: {word} mean {texts[best]} ({style.short(best)}"
    control = next((arm["name"] for arm in arms if arm["is_control"] and arm["name"] in known), None)
    if control is None:
        return f"{text})"
    return f"{text}, the control)" if control == best else f"{text}), control {texts[control]}"
