"""Where in the model the curvature is: traces of every tensor, extremes of every block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    SMALL,
    dress,
    headline,
    new_figure,
    note,
    shared_legend,
)

_OWN = "tensors of this\nblock alone"
_COLOURS = LinearSegmentedColormap.from_list("curvature", [ORANGE, "#ececec", BLUE])  # zero is grey, unknown is white
_DECADES = 3  # of the colour scale, to each side of zero
_WIDE_RANGE = 30.0  # ratio of the largest to the median size from which the extremes' axis is symmetric-logarithmic
_SURE = 2.0  # standard errors from zero at which a sign is believed


class Cells(NamedTuple):
    """The heatmap's data: (blocks, kinds) trace a parameter, NaN where a block has no such tensor; which are unsure."""

    blocks: list[str]
    kinds: list[str]
    values: FloatArray
    unsure: np.ndarray


def layers_figure(record: Mapping[str, Any]) -> Figure:
    """Heatmap of the signed trace a parameter, blocks by kinds of tensor, and the blocks' extremes beside it.

    The trace is divided by the number of parameters, so that a matrix and a vector can be compared: it is the mean
    curvature along one coordinate. Tensors that only one block has share the last column. A dot marks what lies within
    two standard errors of zero. Whiskers at the extremes are residuals.

    Args:
        record: LayerCurvature as a dict: blocks (name, num_parameters, trace, lambda_max, lambda_max_residual,
            lambda_min, lambda_min_residual) in the order of the model; tensors (block, kind, num_parameters, trace,
            trace_standard_error); num_pairs. Numbers may be None.
    """
    cells = heatmap_cells(record)
    rows = max(len(cells.blocks), 1)
    figure = new_figure(11.0, 2.9 + 0.27 * rows)
    heat, ends = figure.subplots(1, 2, width_ratios=[max(len(cells.kinds), 4) + 2, 6], sharey=True)
    headline(figure, _headline(record))
    pairs = f"loss of {numbers.count(record['num_pairs'])} pairs"
    dress(heat, title=f"mean curvature along one coordinate: trace / parameters; {pairs}", x="", y="")
    dress(ends, title="ends of each block's own spectrum\nwhiskers: residual (error bound)", x="eigenvalue λ", y="")
    if not cells.blocks:
        for ax in (heat, ends):
            note(ax, "no block was measured")
        return figure
    _heatmap(figure, heat, cells)
    _extremes(ends, record["blocks"])
    if ends.lines:
        shared_legend(figure, 2, side="right")
    heat.set_yticks(range(rows), short_names(cells.blocks), fontsize=SMALL, color=INK)
    heat.set_ylim(rows - 0.5, -0.5)
    return figure


def heatmap_cells(record: Mapping[str, Any]) -> Cells:
    """Trace a parameter of each block's tensors by kind; kinds of one block alone are added up in the last column."""
    blocks = [block["name"] for block in record["blocks"]]
    tensors = [tensor for tensor in record["tensors"] if tensor["block"] in blocks]
    holders = Counter(kind for _, kind in dict.fromkeys((tensor["block"], tensor["kind"]) for tensor in tensors))
    shared = [kind for kind in dict.fromkeys(tensor["kind"] for tensor in tensors) if holders[kind] > 1]
    shared = shared or list(holders)  # a model without repeated layers: every tensor has its column
    kinds = shared + ([_OWN] if set(holders) - set(shared) else [])
    trace, error = (np.full((len(blocks), len(kinds)), np.nan) for _ in range(2))
    num = np.zeros((len(blocks), len(kinds)))
    for block, row in {name: index for index, name in enumerate(blocks)}.items():
        for kind, column in {name: index for index, name in enumerate(kinds)}.items():
            held = [t for t in tensors if t["block"] == block and (t["kind"] if t["kind"] in shared else _OWN) == kind]
            known = [tensor for tensor in held if numbers.finite(tensor["trace"]) is not None]
            if known:
                trace[row, column] = sum(tensor["trace"] for tensor in known)
                # Tensors share their probes, so errors may go together; their sum is the most that it can be.
                error[row, column] = sum(tensor["trace_standard_error"] or 0.0 for tensor in known)
                num[row, column] = sum(tensor["num_parameters"] for tensor in known)
    unsure = np.abs(trace) < _SURE * error
    return Cells(blocks, kinds, np.divide(trace, num, out=np.full_like(trace, np.nan), where=num > 0), unsure)


def short_names(names: Sequence[str]) -> list[str]:
    """The last two parts of each dotted name, or the whole names where that would make two alike."""
    short = [".".join(name.split(".")[-2:]) for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _heatmap(figure: Figure, ax: Axes, cells: Cells) -> None:
    ax.grid(visible=False)
    ax.set_xticks(range(len(cells.kinds)), cells.kinds, rotation=40, ha="right", rotation_mode="anchor")
    largest = float(np.nanmax(np.abs(cells.values), initial=0.0))
    if largest == 0.0:
        note(ax, "no trace was measured, or all are zero")
        return
    top = int(np.floor(np.log10(largest)))
    norm = SymLogNorm(linthresh=10.0 ** (top - _DECADES), vmin=-largest, vmax=largest)
    shown = ax.imshow(np.ma.masked_invalid(cells.values), cmap=_COLOURS, norm=norm, aspect="auto")
    rows, columns = np.nonzero(cells.unsure)
    ax.plot(columns, rows, ".", color=INK, markersize=4)
    powers = range(top - _DECADES, top + 1)
    ticks = {sign * 10.0**power: f"${word}10^{{{power}}}$" for sign, word in ((-1, "-"), (1, "")) for power in powers}
    bar = figure.colorbar(shown, ax=ax, location="left", ticks=[0.0, *ticks], fraction=0.05, pad=0.02, shrink=0.9)
    bar.ax.set_yticklabels(["0", *ticks.values()], fontsize=SMALL, color=MUTED)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    ax.set_xlabel(
        "blue: the loss curves up · orange: down · dot: within two standard errors of zero", fontsize=SMALL, color=MUTED
    )


def _extremes(ax: Axes, blocks: Sequence[Mapping[str, Any]]) -> None:
    sizes = []
    for name, colour, label in (("lambda_max", BLUE, "λmax"), ("lambda_min", ORANGE, "λmin")):
        found = [(row, numbers.finite(block.get(name))) for row, block in enumerate(blocks)]
        known = [(row, value) for row, value in found if value is not None]
        if not known:
            continue
        rows, values = np.array([row for row, _ in known]), np.array([value for _, value in known])
        errors = np.array([numbers.finite(blocks[row].get(f"{name}_residual")) or 0.0 for row in rows])
        ax.plot(values, rows, "o", color=colour, markersize=5, label=label)
        ax.errorbar(values, rows, xerr=errors, fmt="none", ecolor=INK, capsize=2.5, linewidth=1.0)
        sizes += np.abs(values[values != 0]).tolist()
    if not sizes:
        note(ax, "no extreme was measured")
        return
    if max(sizes) > _WIDE_RANGE * float(np.median(sizes)):
        ax.set_xscale("symlog", linthresh=float(10 ** np.floor(np.log10(np.median(sizes) / 10))))
    ax.axvline(0.0, color=MUTED, linestyle=":", linewidth=1.2)


def _headline(record: Mapping[str, Any]) -> str:
    known = [block for block in record["blocks"] if numbers.finite(block.get("lambda_max")) is not None]
    if not known:
        return "Where in the model the loss is curved"
    top = max(known, key=lambda block: float(block["lambda_max"]))
    text = f"The sharpest block is {top['name']} (λmax {numbers.decimal(top['lambda_max'])})"
    bent = [block for block in record["blocks"] if (numbers.finite(block.get("trace")) or 0.0) < 0]
    verb = "has" if len(bent) == 1 else "have"
    return f"{text}; {len(bent)} of {len(record['blocks'])} blocks {verb} a negative trace" if bent else text
