"""The curvature of a loss in a run's report and on the terminal: each number with its errors, and what it says not.

A reader must not take one error for the other: how well a number is known for these very pairs (a residual, a standard
error over probes) and how much it would vary with other prompts.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.landscape import METRICS
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import BLUE, INK, ORANGE, dress, headline, new_figure, note, shared_legend
from rmcore.reporting.html.blocks import Block, Shown, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPECTRUM = (
    *("lambda_max", "lambda_max_normalized", "lambda_min", "trace_estimate", "negative_mass", "effective_rank"),
    *("condition_number", "sharpness_score", "flatness_index"),
)
"""Quantities of a curvature, in reading order."""
SPECS = {spec.name: spec for spec in METRICS}
SHARPNESS = (
    "Sharpness alone says nothing about how good the model is, and decides nothing here: λmax falls merely because "
    "margins grow, as they do while a model trains. Compare models by λmax at margins of size 1 "
    "(landscape.normalized=true)."
)
ERRORS = (
    "Curvature is in nats per squared unit of the parameters. A residual bound is certain: a true eigenvalue of these "
    "pairs is within it. A standard error is not: the true value is within two of them about 95 times in 100, and less "
    "often where few probes or prompts went into it."
)
TITLE = "Curvature of the loss"
COLUMNS = ("quantity", "value", "standard error over prompts", "error of the computation, for these pairs")

_WIDE_RANGE = 300.0  # ratio of magnitudes from which the axis is symmetric-logarithmic


def curvature_block(spectrum: Mapping[str, Any], title: str = TITLE) -> Block:
    """The curvature of the loss."""
    return Block(
        title,
        text=(" ".join([*_sentences(spectrum), SHARPNESS]), ERRORS),
        figures=("eigenvalues",),
        tables=(Table(COLUMNS, rows(spectrum), left=range(len(COLUMNS))),),
    )


def _sentences(spectrum: Mapping[str, Any]) -> list[str]:
    """Say what was measured, on how many pairs, and whether it converged."""
    over = "" if spectrum["parameters"] == "all" else f" ({spectrum['parameters']} only)"
    products = numbers.count(spectrum["num_products"])
    found = [
        f"This is how the mean loss of {numbers.count(spectrum['num_pairs'])} pairs bends when the "
        f"{numbers.count(spectrum['num_parameters'])} trained parameters{over} are moved a little."
    ]
    if spectrum["method"] == "full":
        return [*found, "The whole matrix was computed, so its eigenvalues are exact up to rounding."]
    if spectrum["converged"]:
        return [*found, f"The computation converged: after {products} products the extremes are known to about 1 %."]
    return [
        *found,
        f"The computation did not converge: after {products} products an extreme is not yet known to 1 %. Read every "
        "number with its error, or measure again with more landscape.lanczos_steps.",
    ]


def rows(spectrum: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The quantities of a spectrum record, under COLUMNS: those that were measured, or that say why they were not."""
    scaled = spectrum.get("normalized", {})
    record = {**spectrum, "lambda_max_normalized": scaled.get("lambda_max")}
    reasons = {**spectrum["reasons"], "lambda_max_normalized": scaled.get("reasons", {}).get("lambda_max", "")}
    residuals = dict(zip(spectrum["eigenvalues"], spectrum["residuals"], strict=True))
    errors = {
        "lambda_max": _error(residuals.get(spectrum["lambda_max"]), "residual bound"),
        "lambda_min": _error(residuals.get(spectrum["lambda_min"]), "residual bound"),
        "lambda_max_normalized": _error(scaled.get("residual"), "residual bound"),
        "trace_estimate": _error(spectrum["trace_standard_error"], "standard error over probes"),
    }
    over_prompts = spectrum.get("over_prompts", {})
    sampled = {"lambda_max": _error(over_prompts.get("standard_error"), "")}
    if reason := over_prompts.get("reasons", {}).get("standard_error"):
        sampled["lambda_max"] = f"undefined: {reason}"
    found = []
    for name in SPECTRUM:
        spec = SPECS[name]
        if numbers.finite(record[name]) is not None:
            value = numbers.text(record[name], spec.unit)
            found.append((spec.label, value, sampled.get(name, ""), errors.get(name, "")))
        elif reasons.get(name):
            found.append((spec.label, f"undefined: {reasons[name]}", "", ""))
    return found


def _error(error: float | None, kind: str) -> str:
    return "" if numbers.finite(error) is None else f"± {numbers.decimal(error)} {kind}".strip()


def eigenvalues_figure(spectrum: Mapping[str, Any]) -> "Figure":
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
    from matplotlib.ticker import MaxNLocator  # here: a report that is written again draws nothing

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


SHOWN = Shown(
    curvature_block,
    after="length",
    name="Curvature",
    captions={
        "eigenvalues": "Curvature of the loss at the trained weights along its extreme directions; whiskers: how far "
        "each may be off. A negative end as large as the positive one: no minimum. λmax falls merely because margins "
        "grow."
    },
    words={
        "Hessian, eigenvalue": "the matrix of second derivatives of the loss, its curvature around the trained "
        "weights; an eigenvalue λ is the curvature along one direction. Large: sharp; negative: the loss bends down, "
        "so no minimum",
        "trace": "sum of all eigenvalues; a single eigenvalue can be large while the trace is near zero",
    },
)
