"""Curvature along a training, at its evaluations: both ends, the trace, the size of the margins."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.training import History, series

_WIDE_RANGE = 30.0  # ratio of the largest to the median size from which an axis is symmetric-logarithmic
_UNIT = "nats per squared unit of the parameters"
_STEP = "optimizer step"
_NOWHERE = "curvature was not logged in this run: add curvature to train.callbacks"


def curvature_trajectory_figure(history: History, *, best_step: int | None = None) -> Figure:
    """Three panels over optimizer steps: λmax and λmin, trace, margin size.

    Whiskers are residuals at the eigenvalues (some true eigenvalue is inside) and one standard error at the trace.
    The margins are drawn next to them because growing margins alone lower λmax.

    Args:
        history: logged rows, in any order, with hessian/lambda_max, hessian/lambda_min, each with `_residual`,
            hessian/trace, hessian/trace_standard_error and hessian/margin_scale; others are ignored.
        best_step: the step of the kept checkpoint; a vertical line marks it.
    """
    figure = style.new_figure(11.0, 4.4)
    ends, trace, margins = figure.subplots(1, 3)
    style.headline(figure, _headline(history, best_step))
    style.dress(
        ends, title="Ends of the spectrum\nwhiskers: residual (error bound)", x=_STEP, y=f"eigenvalue λ\n({_UNIT})"
    )
    style.dress(trace, title="Sum of all eigenvalues\nwhiskers: one standard error", x=_STEP, y=f"trace\n({_UNIT})")
    style.dress(
        margins, title="Size of the margins\ngrowing margins alone lower λmax", x=_STEP, y="RMS margin (logits)"
    )
    _draw(ends, history, "hessian/lambda_max", "_residual", style.BLUE, "λmax, largest eigenvalue")
    _draw(
        ends, history, "hessian/lambda_min", "_residual", style.ORANGE, "λmin, smallest (negative: the loss bends down)"
    )
    _draw(trace, history, "hessian/trace", "_standard_error", style.PINK, "trace")
    _draw(margins, history, "hessian/margin_scale", "", style.BLUE, "margins of the measured pairs")
    for ax in (ends, trace, margins):
        _finish(ax, best_step)
    if ends.lines:
        style.shared_legend(figure, 3, handles=ends.get_legend_handles_labels()[0])
    return figure


def _draw(ax: Axes, history: History, name: str, error_suffix: str, colour: str, label: str) -> None:
    steps, values = series(history, name)
    if len(steps) == 0:
        return
    error_steps, errors = series(history, name + error_suffix) if error_suffix else (steps, np.zeros(len(steps)))
    whiskers = np.zeros(len(steps))
    _, at, at_error = np.intersect1d(steps, error_steps, return_indices=True)
    whiskers[at] = errors[at_error]
    ax.plot(steps, values, "o-", color=colour, markersize=4 if len(steps) < 60 else 0, linewidth=1.6, label=label)
    if whiskers.any():
        ax.errorbar(steps, values, yerr=whiskers, fmt="none", ecolor=colour, capsize=3, linewidth=1.0, alpha=0.7)


def _finish(ax: Axes, best_step: int | None) -> None:
    """Scale, zero line, best step; a sentence where nothing was drawn."""
    if not ax.lines:
        style.note(ax, _NOWHERE)
        return
    _scale(ax, np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.lines]))
    ax.axhline(0.0, color=style.MUTED, linestyle=":", linewidth=1.2)
    if best_step is not None:
        ax.axvline(best_step, color=style.GREEN, linestyle="--", linewidth=1.4, label="kept checkpoint")
    style.whole_ticks(ax.xaxis)


def _scale(ax: Axes, values: FloatArray) -> None:
    """A symmetric-logarithmic axis where a few large values, as at initialisation, would flatten all others."""
    size = np.abs(values[values != 0])
    if len(size) == 0 or size.max() <= _WIDE_RANGE * np.median(size):
        return
    linear = float(10 ** np.floor(np.log10(np.median(size) / 10)))
    ax.set_yscale("symlog", linthresh=linear)
    ticks = SymmetricalLogLocator(base=10, linthresh=linear)
    ticks.set_params(numticks=9)
    ax.yaxis.set_major_locator(ticks)


def _headline(history: History, best_step: int | None) -> str:
    steps, values = series(history, "hessian/lambda_max")
    if len(steps) == 0:
        return "No curvature was measured during training"
    text = f"Largest curvature λmax {numbers.decimal(values[0])}"
    if len(steps) == 1:
        return f"{text} at step {numbers.count(steps[0])}"
    text += f" → {numbers.decimal(values[-1])} from step {numbers.count(steps[0])} to {numbers.count(steps[-1])}"
    if best_step in steps[1:-1]:
        text += f"; {numbers.decimal(values[list(steps).index(best_step)])} at the kept step {numbers.count(best_step)}"
    return text
