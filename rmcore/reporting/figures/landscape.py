"""Extreme eigenvalues of the loss Hessian, with their signs and residuals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import BLUE, INK, ORANGE, dress, headline, new_figure, note, shared_legend

_WIDE_RANGE = 300.0  # ratio of magnitudes from which the axis is symmetric-logarithmic


def eigenvalues_figure(spectrum: Mapping[str, Any]) -> Figure:
    """Stem plot of the computed eigenvalues, largest first; whiskers are residual norms ||Hv - λv||.

    A residual bounds the distance to the nearest true eigenvalue of the symmetric H (Parlett 1998, The Symmetric
    Eigenvalue Problem, theorem 4.5.1), so whiskers are error bounds, not intervals of a sample.

    Args:
        spectrum: HessianSpectrum as a dict: eigenvalues, residuals (same length, entries or the list may be None),
            trace_estimate, trace_standard_error, num_pairs, method, reasons (name -> why it is undefined).
    """
    values = np.array(spectrum["eigenvalues"], dtype=np.float64)
    errors = np.array(spectrum.get("residuals") or [None] * len(values), dtype=np.float64)
    order = np.argsort(-values, kind="stable")
    values, errors = values[order], errors[order]
    figure = new_figure(8.0, 4.4)
    ax = figure.subplots()
    headline(figure, _title(values))
    dress(ax, title=_basis(spectrum), x=_x_label(spectrum), y="eigenvalue λ (curvature of the loss)")
    if len(values) == 0:
        note(ax, "; ".join(spectrum["reasons"].values()) or "no eigenvalue was computed")
        return figure
    _stems(ax, values, errors)
    shared_legend(figure, 3)
    return figure


def _stems(ax: Any, values: FloatArray, errors: FloatArray) -> None:
    rank = np.arange(1, len(values) + 1)
    magnitude = np.abs(values)[values != 0]
    wide = len(magnitude) > 0 and magnitude.max() / magnitude.min() > _WIDE_RANGE
    if wide:
        ax.set_yscale("symlog", linthresh=max(float(magnitude.min()), float(magnitude.max()) * 1e-6))
    for colour, label, mask in (
        (BLUE, "positive: the loss curves up", values >= 0),
        (ORANGE, "negative: the loss curves down", values < 0),
    ):
        if mask.any():
            ax.vlines(rank[mask], 0, values[mask], color=colour, linewidth=2)
            ax.plot(rank[mask], values[mask], "o", color=colour, markersize=6, label=label)
    known = np.isfinite(errors)
    if known.any():
        bars = {"color": INK, "fmt": "none", "capsize": 4, "linewidth": 1.1, "label": "residual (error bound)"}
        ax.errorbar(rank[known], values[known], yerr=errors[known], **bars)
    ax.axhline(0.0, color=INK, linewidth=1.0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    ax.set_xlim(0.4, len(values) + 0.6)


def _title(values: FloatArray) -> str:
    if len(values) == 0:
        return "No curvature was measured"
    largest = f"Largest eigenvalue {numbers.decimal(values[0])}"
    if values[-1] >= 0:
        return f"{largest}; no negative one among {len(values)} computed"
    negative = int((values < 0).sum())
    verb, which = ("is", "that one") if negative == 1 else ("are", "those")
    return (
        f"{largest}, smallest {numbers.decimal(values[-1])}: {negative} of {len(values)} computed {verb} negative, "
        f"so the loss bends down along {which}"
    )


def _x_label(spectrum: Mapping[str, Any]) -> str:
    dense = spectrum.get("method") == "full"
    return "rank of the eigenvalue, largest first" if dense else "rank among the computed extremes, largest first"


def _basis(spectrum: Mapping[str, Any]) -> str:
    trace, error = numbers.finite(spectrum.get("trace_estimate")), numbers.finite(spectrum.get("trace_standard_error"))
    text = f"method {spectrum['method']}, loss of {numbers.count(spectrum['num_pairs'])} pairs"
    if trace is None:
        return text
    return f"{text} · trace {numbers.decimal(trace)}" + (
        f" ± {numbers.decimal(error)} (standard error)" if error else ""
    )
