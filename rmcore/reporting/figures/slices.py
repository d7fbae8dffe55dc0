"""The loss along lines and over a plane through the weights: how far slope and curvature at the model hold."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    LABEL,
    MUTED,
    ORANGE,
    SMALL,
    dress,
    headline,
    new_figure,
    note,
    percent_ticks,
    shared_legend,
)

_COLUMNS = 3
_PANEL_WIDTH, _PANEL_HEIGHT = 3.9, 4.2  # inches, of one line with its accuracy
_PANEL_CHARS = 46  # over or under a panel
_WIDE_RANGE = 30.0  # ratio of losses from which their axis or colours are logarithmic
_BEYOND = 0.5  # share of the measured range by which a prediction may leave it and still be shown
_CLOSE = 0.05  # share of the loss that a close prediction may miss
_LEVELS = 12
_LOSS = "loss (nats a pair)"


def slices_figure(record: Mapping[str, Any]) -> Figure:
    """One panel a line: the measured loss with its quadratic prediction, and the pairwise accuracy below.

    Args:
        record: `lines`, a list of LossSlice as dicts: name, unit, distances (G,) ascending, loss (G,) and accuracy
            (G,) with None where undefined, quadratic (G,) or None, slope, curvature, loss_at_model, num_not_finite.
            `sam`, a SamSharpness as a dict, may be absent.
    """
    lines = record.get("lines") or []
    columns, rows = min(len(lines), _COLUMNS) or 1, math.ceil(len(lines) / _COLUMNS) or 1
    figure = new_figure(max(_PANEL_WIDTH * columns, 6.0), _PANEL_HEIGHT * rows + 0.8)
    headline(figure, _headline(lines, record.get("sam")))
    if not lines:
        note(figure.subplots(), "the loss was not measured along any line")
        return figure
    grid = figure.subplots(2 * rows, columns, squeeze=False, gridspec_kw={"height_ratios": [2.4, 1.0] * rows})
    places = [(grid[2 * row, column], grid[2 * row + 1, column]) for row in range(rows) for column in range(columns)]
    span = _accuracy_span(lines)
    for (loss_ax, accuracy_ax), line in zip(places, lines, strict=False):
        _draw_loss(loss_ax, line)
        _draw_accuracy(accuracy_ax, line, span)
    for ax in [ax for place in places[len(lines) :] for ax in place]:
        ax.remove()
    found = {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    shared_legend(figure, 2, handles=list(found.values()), labels=list(found))
    return figure


def _draw_loss(ax: Axes, line: Mapping[str, Any]) -> None:
    distances, loss = _floats(line["distances"]), _floats(line["loss"])
    dress(ax, title=_panel_title(line), x="", y=_LOSS)
    ax.tick_params(labelbottom=False)
    _span(ax, distances)
    if not np.isfinite(loss).any():
        note(ax, "the loss is finite at no point of this line")
        return
    ax.axvline(0.0, color=MUTED, linestyle=":", linewidth=1.2)
    ax.plot(distances, loss, "o-", color=BLUE, markersize=3, linewidth=1.6, label="measured loss")
    if line.get("quadratic"):
        label = "predicted from slope and curvature at the model"
        ax.plot(distances, _floats(line["quadratic"]), "--", color=ORANGE, linewidth=1.6, label=label)
    ax.plot(0.0, line["loss_at_model"], "D", color=INK, markersize=5, label="this model")
    _scale_loss(ax, np.append(loss[np.isfinite(loss)], line["loss_at_model"]), line.get("quadratic"))


def _span(ax: Axes, distances: FloatArray) -> None:
    """All distances, also those without a finite loss; the same ticks for both panels of a line."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    if len(distances) > 1:
        ax.set_xlim(distances.min(), distances.max())


def _scale_loss(ax: Axes, loss: FloatArray, quadratic: Sequence[float] | None) -> None:
    """Limits from the measured losses; a prediction that leaves them far behind is cut off."""
    low, high = float(loss.min()), float(loss.max())
    if low > 0 and high / low > _WIDE_RANGE:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(low / 1.3, high * 1.3)
        return
    room = _BEYOND * (high - low)
    predicted = _floats(quadratic or [low])
    low, high = min(low, max(low - room, predicted.min())), max(high, min(high + room, predicted.max()))
    air = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    ax.set_ylim(low - air, high + air)


def _draw_accuracy(ax: Axes, line: Mapping[str, Any], span: tuple[float, float]) -> None:
    distances, accuracy = _floats(line["distances"]), _floats(line["accuracy"])
    dress(ax, title="", x="\n".join(textwrap.wrap(line["unit"], _PANEL_CHARS)), y="accuracy")
    _span(ax, distances)
    if not np.isfinite(accuracy).any():
        note(ax, "no pair is ranked at any point")
        return
    ax.axvline(0.0, color=MUTED, linestyle=":", linewidth=1.2)
    ax.plot(distances, accuracy, "o-", color=GREEN, markersize=3, linewidth=1.6, label="pairwise accuracy")
    ax.set_ylim(*span)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3))
    percent_ticks(ax.yaxis)


def _accuracy_span(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """One axis for all panels, so that they can be compared."""
    known = np.concatenate([_floats(line["accuracy"]) for line in lines])
    known = known[np.isfinite(known)]
    if len(known) == 0:
        return 0.0, 1.0
    air = max(0.1 * (known.max() - known.min()), 0.02)
    return float(known.min() - air), float(known.max() + air)


def _panel_title(line: Mapping[str, Any]) -> str:
    parts = textwrap.wrap(line["name"], _PANEL_CHARS)
    if line.get("quadratic"):
        parts.append(f"slope {numbers.decimal(line['slope'])}, curvature {numbers.decimal(line['curvature'])}")
        parts.append(f"predict the loss to {100 * _CLOSE:.0f} % up to a distance of {numbers.decimal(_reach(line))}")
    if line["num_not_finite"]:
        parts.append(f"not finite, left out: {line['num_not_finite']} of {len(line['distances'])} points")
    return "\n".join(parts)


def _reach(line: Mapping[str, Any]) -> float:
    """Largest measured distance up to which the prediction is close to the loss on both sides."""
    distances, loss = np.abs(_floats(line["distances"])), _floats(line["loss"])
    off = distances[~(np.abs(_floats(line["quadratic"]) - loss) <= _CLOSE * np.abs(loss))]
    return float(distances[distances < off.min(initial=np.inf)].max(initial=0.0))


def _headline(lines: Sequence[Mapping[str, Any]], sam: Mapping[str, Any] | None) -> str:
    if not lines:
        return "No slice of the loss was measured"
    center = lines[0]["loss_at_model"]
    known = [(value, line["name"]) for line in lines for value in line["loss"] if numbers.finite(value) is not None]
    lowest, name = min(known, default=(center, ""))
    text = f"Loss {numbers.decimal(center)} nats a pair at this model; "
    if lowest < center and numbers.decimal(lowest) != numbers.decimal(center):
        text += f"lowest on these lines {numbers.decimal(lowest)} ({name})"
    else:
        text += "no measured point is lower"
    if sam and sam.get("sharpness") is not None:
        text += f". A step of {sam['radius']:g} straight uphill adds {numbers.decimal(sam['sharpness'])} (SAM)"
    return text


def surface_figure(record: Mapping[str, Any]) -> Figure:
    """Contours of the loss over a plane through the weights, the model in the middle.

    Args:
        record: LossSurface as a dict: name_x, name_y, unit, xs (Gx,) and ys (Gy,) ascending, loss (Gy, Gx) with
            None where it is not finite, cosine, loss_at_model, num_pairs, num_not_finite.
    """
    xs, ys = _floats(record["xs"]), _floats(record["ys"])
    loss = np.ma.masked_invalid(np.array([_floats(row) for row in record["loss"]]))
    figure = new_figure(7.4, 6.6)
    ax = figure.subplots()
    headline(figure, _surface_headline(record, loss, xs, ys))
    basis = f"{numbers.count(record['num_pairs'])} pairs, {len(xs)} × {len(ys)} points"
    basis += f"\nthe second direction was made orthogonal to the first (cosine was {_cosine(record)})"
    dress(ax, title=basis, x=f"{record['name_x']}\n{record['unit']}", y=f"{record['name_y']}\n{record['unit']}")
    if min(loss.shape) < 2 or loss.count() == 0:
        note(ax, "contours need a finite loss at two points or more along each direction")
        return figure
    _draw_contours(figure, ax, xs, ys, loss)
    if loss.min() < record["loss_at_model"] < loss.max():
        ax.contour(xs, ys, loss, levels=[record["loss_at_model"]], colors=INK, linestyles="--", linewidths=1.2)
        ax.plot([], [], "--", color=INK, linewidth=1.2, label="as high as at this model")
    ax.plot(0.0, 0.0, "D", color="white", markeredgecolor=INK, markersize=8, label="this model")
    row, column = np.unravel_index(int(loss.argmin()), loss.shape)
    style: dict[str, Any] = {"markeredgecolor": INK, "markersize": 8, "label": "lowest measured point"}
    ax.plot(xs[column], ys[row], "v", color=ORANGE, clip_on=False, **style)
    handles, _ = ax.get_legend_handles_labels()
    if record["num_not_finite"]:
        handles.append(Patch(facecolor=GRID, label="loss not finite"))
    shared_legend(figure, 3, handles=handles)
    return figure


def _cosine(record: Mapping[str, Any]) -> str:
    return numbers.decimal(round(record["cosine"], 3))


def _draw_contours(figure: Figure, ax: Axes, xs: FloatArray, ys: FloatArray, loss: Any) -> None:
    ax.grid(visible=False)
    ax.set_facecolor(GRID)
    low, high = float(loss.min()), float(loss.max())
    wide = low > 0 and high / low > _WIDE_RANGE
    high = high if high > low else low + max(abs(low), 1.0) * 1e-3
    levels = np.geomspace(low, high, _LEVELS + 1) if wide else np.linspace(low, high, _LEVELS + 1)
    filled = ax.contourf(xs, ys, loss, levels=levels, cmap="cividis_r", norm="log" if wide else "linear")
    ax.contour(xs, ys, loss, levels=levels, colors="white", linewidths=0.5)
    bar = figure.colorbar(filled, ax=ax, shrink=0.9)
    bar.set_ticks(levels[::2].tolist(), labels=[numbers.decimal(level) for level in levels[::2]])
    bar.ax.minorticks_off()
    bar.set_label(_LOSS, fontsize=LABEL, color=INK)
    bar.ax.tick_params(labelsize=SMALL, colors=MUTED)


def _surface_headline(record: Mapping[str, Any], loss: Any, xs: FloatArray, ys: FloatArray) -> str:
    center = record["loss_at_model"]
    if loss.count() == 0:
        return f"Loss {numbers.decimal(center)} nats a pair at this model, finite nowhere in this plane"
    text = (
        f"Loss {numbers.decimal(center)} nats a pair at this model, up to {numbers.decimal(loss.max())} on this plane"
    )
    lowest = float(loss.min())
    if lowest >= center or numbers.decimal(lowest) == numbers.decimal(center):
        return f"{text}; no measured point is lower"
    row, column = np.unravel_index(int(loss.argmin()), loss.shape)
    place = f"({numbers.decimal(xs[column])}, {numbers.decimal(ys[row])})"
    lower = numbers.count(int((loss < center).sum()))
    return f"{text}; {lower} of {loss.size} points are lower, down to {numbers.decimal(lowest)} at {place}"


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
