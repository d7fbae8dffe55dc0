"""The Hessian's spectrum beside that of the Gauss-Newton matrix: two matrices that readers take for one another."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.landscape import residuals
from rmcore.reporting.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    dress,
    finite,
    headline,
    new_figure,
    note,
    shared_legend,
)

_DECADES = 6.0  # below the largest eigenvalue: what is smaller has no part in the curvature that anybody sees


def hessian_and_gauss_newton_figure(spectrum: Mapping[str, Any], gauss_newton: Mapping[str, Any]) -> Figure:
    """Two panels with common logarithmic axes: size of the eigenvalues by rank, Hessian left, Gauss-Newton right.

    The Hessian's negative eigenvalues are drawn by their size in a colour of their own, ranked from the most negative.
    Whiskers at the Hessian are residuals (bounds of the computing error for these pairs); at the largest eigenvalue of
    the Gauss-Newton matrix the whisker is a 95 % jackknife interval over prompts. They are errors of different kinds.
    Eigenvalues more than six decades below the largest are left out.

    Args:
        spectrum: HessianSpectrum as a dict: eigenvalues, residuals (same length), lambda_max, num_pairs, method.
        gauss_newton: GaussNewtonSpectrum as a dict: eigenvalues (largest first, not negative), lambda_max,
            lambda_max_ci_low, lambda_max_ci_high (None where unknown), num_pairs, num_prompts.

    Raises:
        DataError: residuals and eigenvalues differ in length, or an eigenvalue is not finite.
    """
    hessian = finite(spectrum["eigenvalues"], "eigenvalues of the Hessian")
    errors = residuals(spectrum, len(hessian))
    curved = finite(gauss_newton["eigenvalues"], "eigenvalues of the Gauss-Newton matrix")
    figure = new_figure(10.0, 4.6)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    headline(figure, _headline(spectrum, gauss_newton))
    x = "rank, from the end of the spectrum"
    dress(left, title=_hessian_basis(spectrum), x=x, y="size of the eigenvalue |λ|")
    dress(right, title=_gauss_newton_basis(gauss_newton), x=x, y="")
    sizes = np.abs(np.concatenate([hessian, curved]))
    if not sizes.any():
        for ax in (left, right):
            note(ax, "every eigenvalue is zero: the loss is flat")
        return figure
    left.set_xscale("log")
    left.set_yscale("log")
    floor = float(sizes.max()) * 10**-_DECADES
    _hessian(left, hessian, errors, floor)
    _gauss_newton(right, curved, gauss_newton, floor)
    left.xaxis.set_major_formatter(FuncFormatter(lambda rank, _: numbers.count(rank)))
    longest = max(len(hessian), len(curved))
    left.set_xlim(0.8, max(longest, 2) * 1.25)
    shown = sizes[sizes > floor]
    left.set_ylim(float(shown.min()) / 2.5, float(shown.max()) * 3)
    shared_legend(figure, 3)
    return figure


def _hessian(ax: Axes, values: FloatArray, errors: FloatArray, floor: float) -> None:
    residual_label = "residual (error bound)"
    for colour, label, sign in ((BLUE, "Hessian, λ > 0", 1.0), (ORANGE, "Hessian, λ < 0 (drawn as |λ|)", -1.0)):
        signed = sign * values
        order = np.argsort(-signed, kind="stable")
        order = order[signed[order] > floor]
        if len(order) == 0:
            continue
        rank = np.arange(1, len(order) + 1)
        ax.plot(rank, signed[order], "o", color=colour, markersize=5, label=label)
        known = np.isfinite(errors[order])
        if known.any():
            bars: dict[str, Any] = {
                "color": INK,
                "fmt": "none",
                "capsize": 3,
                "linewidth": 1.0,
                "label": residual_label,
            }
            ax.errorbar(rank[known], signed[order][known], yerr=errors[order][known], **bars)
            residual_label = "_" + residual_label  # once in the legend


def _gauss_newton(ax: Axes, values: FloatArray, record: Mapping[str, Any], floor: float) -> None:
    values = np.sort(values)[::-1]
    values = values[values > floor]
    if len(values) == 0:
        return
    ax.plot(np.arange(1, len(values) + 1), values, "o", color=GREEN, markersize=3.5, label="Gauss–Newton (never λ < 0)")
    low, high = (numbers.finite(record.get(f"lambda_max_{end}")) for end in ("ci_low", "ci_high"))
    if low is None or high is None:
        return
    reach = np.maximum([[values[0] - low], [high - values[0]]], 0.0)
    bars: dict[str, Any] = {
        "color": MUTED,
        "fmt": "none",
        "capsize": 5,
        "linewidth": 2.0,
        "label": "95 % interval over prompts",
    }
    ax.errorbar([1], [values[0]], yerr=reach, **bars)


def _headline(spectrum: Mapping[str, Any], gauss_newton: Mapping[str, Any]) -> str:
    here, there = (numbers.decimal(numbers.finite(record.get("lambda_max"))) for record in (spectrum, gauss_newton))
    text = f"Not the same matrix: λmax {here} of the Hessian, {there} of the Gauss–Newton matrix"
    smallest = numbers.finite(spectrum.get("lambda_min"))
    if smallest is None or smallest >= 0:
        return text
    return f"{text}, which has no counterpart of λmin {numbers.decimal(smallest)}"


def _hessian_basis(spectrum: Mapping[str, Any]) -> str:
    known = "all eigenvalues" if spectrum["method"] == "full" else f"the extremes ({spectrum['method']})"
    return f"Hessian, {numbers.count(spectrum['num_pairs'])} pairs\n{known}"


def _gauss_newton_basis(record: Mapping[str, Any]) -> str:
    pairs, prompts = numbers.count(record["num_pairs"]), numbers.count(record["num_prompts"])
    return f"Gauss–Newton matrix, {pairs} pairs of {prompts} prompts\nall eigenvalues that are not zero"
