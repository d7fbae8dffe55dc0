"""Training curves over optimizer steps, of one run and of several."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers, style

History = Sequence[Mapping[str, Any]]
"""Rows {"step": int, "metrics": {name: number or None}} as written to metrics.jsonl."""

_SMOOTH_FROM = 60  # logged points from which the training line is smoothed
_WIDE_RANGE = 100.0  # ratio of the largest to the 10th percentile from which an axis is logarithmic
_RUN_LINES = ("-", "--", "-.", ":")
_NAMED_RUNS = 3  # in the headline
_LONGEST_NAME = 34  # characters, below the panels


def training_curves_figure(history: History, *, best_step: int | None = None) -> Figure:
    """Five panels over optimizer steps: loss, pairwise accuracy, margin, learning rate, gradient norm.

    Reads train/ and eval/ of loss, pairwise_accuracy and mean_margin, train/lr and train/grad_norm; `eval/..._ci_low`
    and `_ci_high` are shaded where they exist. Null values are gaps. From 60 logged points on, training lines are
    running means over a 25th of the run, with the raw points faint behind.

    Args:
        history: logged rows, in any order. A metric that never occurs gives a panel that says so.
        best_step: the step of the kept checkpoint; a vertical line marks it.
    """
    figure = style.new_figure(11.0, 6.4)
    axes = figure.subplots(2, 3).ravel()
    _compared(axes[0], history, "loss", "loss (nats)", best_step)
    _compared(axes[1], history, "pairwise_accuracy", "pairwise accuracy", best_step)
    _compared(axes[2], history, "mean_margin", "mean reward margin (logits)", best_step)
    _single(axes[3], history, "train/lr", "Learning rate\npeak {}", "learning rate", best_step)
    _single(axes[4], history, "train/grad_norm", "Gradient norm\nmedian {}", "norm before clipping", best_step)
    _key(axes[5], history, best_step)
    style.headline(figure, _headline(history, best_step))
    return figure


def series(history: History, name: str) -> tuple[FloatArray, FloatArray]:
    """Steps and finite values of one metric, ordered by step; the last row of a step counts."""
    by_step: dict[int, float] = {}
    for row in history:
        value = numbers.finite(row["metrics"].get(name))
        if value is not None:
            by_step[int(row["step"])] = value
    steps = sorted(by_step)
    return np.array(steps, dtype=np.float64), np.array([by_step[step] for step in steps], dtype=np.float64)


def smoothing_window(num_points: int) -> int:
    """Points of the running mean of a line of `num_points`: a 25th of the run, 1 (none) below 60 points."""
    return 1 if num_points < _SMOOTH_FROM else max(3, num_points // 25) | 1


def running_mean(values: FloatArray, window: int) -> FloatArray:
    """Mean of the `window` points around each point, (points,) as given."""
    if len(values) == 0:
        return values
    kernel = np.ones(min(window, (len(values) - 1) | 1))
    ends = np.convolve(np.ones(len(values)), kernel, mode="same")  # fewer points under the window at either end
    return np.convolve(values, kernel, mode="same") / ends


def _compared(ax: Axes, history: History, metric: str, label: str, best_step: int | None) -> None:
    """Training and validation values of one metric."""
    last, drawn = [], []
    show = numbers.percent if metric == "pairwise_accuracy" else numbers.decimal
    for part, word in (("train", "train"), ("eval", "validation")):
        steps, values = series(history, f"{part}/{metric}")
        if len(steps) == 0:
            continue
        drawn.append(values)
        last.append(f"{word} {show(values[-1])}")
        if part == "train":
            _train_line(ax, steps, values)
        else:
            _shade(ax, history, f"eval/{metric}")
            size = 4 if len(steps) < 60 else 0
            ax.plot(steps, values, "o-", color=style.ORANGE, markersize=size, linewidth=1.6, zorder=3)
    name = metric.replace("_", " ").replace("pairwise ", "").replace("mean ", "").capitalize()
    title = f"{name} at the end\n{' · '.join(last)}" if last else f"{name}\nnot logged"
    style.dress(ax, title=title, x="optimizer step", y=label)
    if not drawn:
        style.note(ax, f"{metric} was not logged in this run")
        return
    if metric == "pairwise_accuracy":
        ax.axhline(0.5, color=style.MUTED, linestyle=":", linewidth=1.2)
        style.percent_ticks(ax.yaxis)
    elif metric == "mean_margin":
        ax.axhline(0.0, color=style.MUTED, linestyle=":", linewidth=1.2)
    _scale(ax, np.concatenate(drawn), symmetric=metric == "mean_margin")
    if metric == "loss":
        ax.axhline(math.log(2), color=style.MUTED, linestyle=":", linewidth=1.2)
        # From guessing downwards: a fall of a thousandth that fills its panel looks like learning.
        ax.set_ylim(top=max(ax.get_ylim()[1], 1.05 * math.log(2)))
        if ax.get_yscale() == "linear":
            ax.set_ylim(bottom=0.0)
    _finish(ax, best_step)


def _single(ax: Axes, history: History, name: str, title: str, label: str, best_step: int | None) -> None:
    """One training quantity."""
    steps, values = series(history, name)
    if len(steps) == 0:
        style.dress(ax, title=title.split("\n", maxsplit=1)[0] + "\nnot logged", x="optimizer step", y=label)
        style.note(ax, f"{name} was not logged in this run")
        return
    if name == "train/lr":
        summary = numbers.decimal(values.max())
        ax.plot(steps, values, "-" if len(steps) > 1 else "o", color=style.BLUE, linewidth=1.6)
    else:
        summary = numbers.decimal(float(np.median(values)))
        _train_line(ax, steps, values)
    style.dress(ax, title=title.format(summary), x="optimizer step", y=label)
    if name == "train/lr":
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
        ax.yaxis.get_offset_text().set_fontsize(style.SMALL)
    else:
        _scale(ax, values, symmetric=False)
    _finish(ax, best_step)


def _train_line(ax: Axes, steps: FloatArray, values: FloatArray) -> None:
    """The training values; long series as a running mean with the raw line faint behind it."""
    if len(values) < _SMOOTH_FROM:
        ax.plot(steps, values, "-" if len(values) > 1 else "o", color=style.BLUE, linewidth=1.6)
        return
    ax.plot(steps, values, color=style.BLUE, alpha=0.25, linewidth=0.9)
    ax.plot(steps, running_mean(values, smoothing_window(len(values))), color=style.BLUE, linewidth=1.8)


def _shade(ax: Axes, history: History, name: str) -> None:
    low_steps, low = series(history, f"{name}_ci_low")
    high_steps, high = series(history, f"{name}_ci_high")
    steps, at_low, at_high = np.intersect1d(low_steps, high_steps, return_indices=True)
    ax.fill_between(steps, low[at_low], high[at_high], color=style.ORANGE, alpha=0.2, linewidth=0)


def _scale(ax: Axes, values: FloatArray, *, symmetric: bool) -> None:
    """A logarithmic axis where one value would flatten all others."""
    size = np.abs(values[values != 0])
    if len(size) == 0 or size.max() <= _WIDE_RANGE * np.percentile(size, 10):
        return
    if not symmetric and (values > 0).all():
        ax.set_yscale("log")
    elif size.max() > _WIDE_RANGE:  # margins start near 0, so their ratio alone says nothing
        ax.set_yscale("symlog", linthresh=1.0)
        ticks = SymmetricalLogLocator(base=10, linthresh=1.0)
        ticks.set_params(numticks=7)
        ax.yaxis.set_major_locator(ticks)


def _finish(ax: Axes, best_step: int | None) -> None:
    if best_step is not None:
        ax.axvline(best_step, color=style.GREEN, linestyle="--", linewidth=1.4)
    style.whole_ticks(ax.xaxis)


def _key(ax: Axes, history: History, best_step: int | None) -> None:
    """The last panel: what the lines are."""
    ax.set_axis_off()
    smooth = len(series(history, "train/loss")[0]) >= _SMOOTH_FROM
    lines = [style.key_line(f"training pairs{' (running mean)' if smooth else ''}", color=style.BLUE, linewidth=1.8)]
    if smooth:
        lines.append(style.key_line("training pairs (as logged)", color=style.BLUE, alpha=0.3, linewidth=1))
    if any(name.startswith("eval/") for row in history for name in row["metrics"]):
        lines.append(style.key_line("validation pairs (held out)", color=style.ORANGE, marker="o", markersize=4))
    if best_step is not None:
        label = f"kept checkpoint, step {numbers.count(best_step)}"
        lines.append(style.key_line(label, color=style.GREEN, linestyle="--"))
    lines.append(style.key_line("guessing (loss log 2, 50 %, margin 0)", color=style.MUTED, linestyle=":"))
    ax.legend(
        handles=lines, loc="upper left", fontsize=style.SMALL + 1, frameon=False, labelcolor=style.INK, labelspacing=0.9
    )
    # Smoothing and the penalty are part of the training loss only, so the two loss lines are not quite comparable.
    text = "Training loss includes label smoothing\nand the reward penalty; validation loss does not."
    ax.text(0.04, 0.02, text, transform=ax.transAxes, fontsize=style.SMALL, color=style.MUTED, va="bottom")


def _headline(history: History, best_step: int | None) -> str:
    steps = max((int(row["step"]) for row in history), default=0)
    over = f"{numbers.count(steps)} optimizer step{'s' if steps != 1 else ''}"
    eval_steps, accuracy = series(history, "eval/pairwise_accuracy")
    if best_step is not None and best_step in eval_steps:
        reached = numbers.percent(accuracy[list(eval_steps).index(best_step)])
        return f"Kept checkpoint: step {numbers.count(best_step)} of {over}, validation accuracy {reached}"
    if len(accuracy):
        return f"Validation accuracy {numbers.percent(accuracy[0])} → {numbers.percent(accuracy[-1])} over {over}"
    loss = series(history, "train/loss")[1]
    if len(loss):
        return f"Training loss {numbers.decimal(loss[0])} → {numbers.decimal(loss[-1])} over {over}, without validation"
    return "Nothing was logged during training"


def runs_figure(histories: Mapping[str, History]) -> Figure:
    """Loss and accuracy on held-out pairs over optimizer steps, one colour, line and marker a run.

    Left the training loss (of 60 points and more as a running mean) and the validation loss, right the validation
    accuracy. A run that logged neither is in the legend alone.

    Args:
        histories: rows of metrics.jsonl by name of the run, no more than there are SERIES_COLOURS.
    """
    figure = style.new_figure(11.0, 4.9)
    left, right = figure.subplots(1, 2)
    most = max((len(series(history, "train/loss")[0]) for history in histories.values()), default=0)
    window = smoothing_window(most)  # one for all: lines that are smoothed differently do not compare
    handles, drawn = [], {"loss": 0, "accuracy": 0}
    for place, (name, history) in enumerate(histories.items()):
        colour, marker = style.SERIES_COLOURS[place], style.SERIES_MARKERS[place]
        line: dict[str, Any] = {"color": colour, "linestyle": _RUN_LINES[place % len(_RUN_LINES)], "linewidth": 1.5}
        handles.append(style.key_line(style.short(name, _LONGEST_NAME), marker=marker, **line))
        steps, trained = series(history, "train/loss")
        validated, accuracy = series(history, "eval/loss"), series(history, "eval/pairwise_accuracy")
        left.plot(steps, running_mean(trained, window), **line)
        right.plot(*accuracy, **line)
        for ax, points in ((left, validated), (right, accuracy)):
            ax.plot(*points, marker, color=colour, markersize=5, zorder=3)
        drawn["loss"] += len(steps) + len(validated[0])
        drawn["accuracy"] += len(accuracy[0])
    averaged = f" (mean of {window} points)" if window > 1 else ""
    style.dress(left, title=f"lines: training{averaged} · marks: validation", x="optimizer step", y="loss (nats)")
    style.dress(right, title="validation pairs; dotted: guessing", x="optimizer step", y="pairwise accuracy")
    if drawn["accuracy"]:
        right.axhline(0.5, color=style.MUTED, linestyle=":", linewidth=1.2)
        style.percent_ticks(right.yaxis)
    for ax, (what, num_points) in zip((left, right), drawn.items(), strict=True):
        if num_points:
            style.whole_ticks(ax.xaxis)
        else:
            style.note(ax, f"no {what} was logged in these runs")
    style.shared_legend(figure, min(3, len(handles)), handles=handles)
    style.headline(figure, _runs_headline(histories))
    return figure


def _runs_headline(histories: Mapping[str, History]) -> str:
    """How far the runs came on validation pairs, the best first."""
    accuracies = {name: series(history, "eval/pairwise_accuracy")[1] for name, history in histories.items()}
    reached = {name: float(values.max()) for name, values in accuracies.items() if len(values)}
    if not reached:
        return f"{len(histories)} runs, none of which was evaluated while it trained"
    best, lower = sorted(reached, key=lambda name: -reached[name])[:_NAMED_RUNS], len(reached) - _NAMED_RUNS
    named = ", ".join(f"{style.short(name, _LONGEST_NAME)} {numbers.percent(reached[name])}" for name in best)
    return f"Highest validation accuracy: {named}{f' and {lower} lower' if lower > 0 else ''}"
