"""Training curves of several runs in one picture."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.arms import COLOURS, short
from rmcore.reporting.figures.training import History, running_mean, series, smoothing_window

_MARKERS = ("o", "s", "^", "v", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", ":")
_TOLD = 3  # runs in the headline
_LONGEST = 34  # characters of a name below the panels


def runs_figure(histories: Mapping[str, History]) -> Figure:
    """Loss and accuracy on held-out pairs over optimizer steps, one colour, line and marker a run.

    Left the training loss (of 60 points and more as a running mean) and the validation loss, right the validation
    accuracy. A run that logged neither is in the legend alone.

    Args:
        histories: rows of metrics.jsonl by name of the run, no more than there are COLOURS.
    """
    figure = style.new_figure(11.0, 4.9)
    left, right = figure.subplots(1, 2)
    smooth = max((len(series(history, "train/loss")[0]) for history in histories.values()), default=0)
    window = smoothing_window(smooth)  # one for all: lines that are smoothed differently do not compare
    some_loss = [_loss(left, place, history, window) for place, history in enumerate(histories.values())]
    some_accuracy = [_accuracy(right, place, history) for place, history in enumerate(histories.values())]
    averaged = f" (mean of {window} points)" if window > 1 else ""
    style.dress(left, title=f"lines: training{averaged} · marks: validation", x="optimizer step", y="loss (nats)")
    style.dress(right, title="validation pairs; dotted: guessing", x="optimizer step", y="pairwise accuracy")
    if any(some_accuracy):
        right.axhline(0.5, color=style.MUTED, linestyle=":", linewidth=1.2)
        style.percent_ticks(right.yaxis)
    for ax, found, what in ((left, some_loss, "loss"), (right, some_accuracy, "accuracy")):
        if any(found):
            style.whole_ticks(ax.xaxis)
        else:
            style.note(ax, f"no {what} was logged in these runs")
    handles = [
        style.key_line(short(name, _LONGEST), marker=_MARKERS[place], **_line(place))
        for place, name in enumerate(histories)
    ]
    style.shared_legend(figure, min(3, len(handles)), handles=handles)
    style.headline(figure, _headline(histories))
    return figure


def _line(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place], "linestyle": _LINES[place % len(_LINES)], "linewidth": 1.5}


def _loss(ax: Axes, place: int, history: History, window: int) -> bool:
    steps, values = series(history, "train/loss")
    if len(steps):
        ax.plot(steps, running_mean(values, window), **_line(place))
    return bool(_marks(ax, place, *series(history, "eval/loss")) or len(steps))


def _accuracy(ax: Axes, place: int, history: History) -> bool:
    steps, values = series(history, "eval/pairwise_accuracy")
    if len(steps):
        ax.plot(steps, values, **_line(place))
    return _marks(ax, place, steps, values)


def _marks(ax: Axes, place: int, steps: FloatArray, values: FloatArray) -> bool:
    ax.plot(steps, values, _MARKERS[place], color=COLOURS[place], markersize=5, zorder=3)
    return len(steps) > 0


def _headline(histories: Mapping[str, History]) -> str:
    """How far the runs came on validation pairs, the best first."""
    best = {name: series(history, "eval/pairwise_accuracy")[1] for name, history in histories.items()}
    reached = {name: float(values.max()) for name, values in best.items() if len(values)}
    if not reached:
        return f"{len(histories)} runs, none of which was evaluated while it trained"
    order = sorted(reached, key=lambda name: -reached[name])
    told = ", ".join(f"{short(name, _LONGEST)} {numbers.percent(reached[name])}" for name in order[:_TOLD])
    more = f" and {len(order) - _TOLD} lower" if len(order) > _TOLD else ""
    return f"Highest validation accuracy: {told}{more}"
