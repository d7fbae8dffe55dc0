"""How all eigenvalues of the loss Hessian are spread, not just the extreme ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import (
    BLUE,
    INK,
    ORANGE,
    SMALL,
    dress,
    finite,
    headline,
    new_figure,
    note,
    shared_legend,
)

_PART_OF_ONE = 0.1  # the lowest height that is drawn, in peaks of a single eigenvalue


def density_figure(record: Mapping[str, Any]) -> Figure:
    """Spectral density on a logarithmic axis, with a band of one standard error over the probes to each side.

    The axis starts at a tenth of the height that one single eigenvalue has, 1 / (N sqrt(2 pi) width) of a density
    with area 1: whatever lies below stands for no eigenvalue.

    Args:
        record: SpectralDensity as a dict: grid, density and standard_error (same length; all None with a reason where
            the Hessian is zero), width of the Gaussian kernel, lambda_low, lambda_high, negative_mass with its
            standard error (each may be None), num_vectors, num_steps, num_parameters, reasons.

    Raises:
        DataError: grid, density and standard_error differ in length, are empty or not finite.
    """
    figure = new_figure(9.0, 4.6)
    ax = figure.subplots()
    headline(figure, _headline(record))
    dress(ax, title=_basis(record), x="eigenvalue λ", y="share of all eigenvalues\nper unit of λ")
    if record["grid"] is None:
        note(ax, record["reasons"].get("grid", "the density is undefined"))
        return figure
    grid, height, errors = (
        finite(record[name], f"values of {name} in the density") for name in ("grid", "density", "standard_error")
    )
    if len(grid) == 0 or not len(grid) == len(height) == len(errors):
        raise DataError(
            f"the density has {len(height)} heights and {len(errors)} errors for {len(grid)} eigenvalues: it cannot be "
            "drawn. Pass the record of spectral_density as it is."
        )
    _curve(ax, grid, height, errors, _floor(record))
    _ends(ax, record)
    shared_legend(figure, 4)
    return figure


def _floor(record: Mapping[str, Any]) -> float:
    return _PART_OF_ONE / (float(record["num_parameters"]) * np.sqrt(2 * np.pi) * float(record["width"]))


def _curve(ax: Axes, grid: FloatArray, height: FloatArray, errors: FloatArray, floor: float) -> None:
    below = floor / 10  # stands for whatever has no logarithm
    left, right = min(float(grid[0]), 0.0), max(float(grid[-1]), 0.0)
    ax.set_yscale("log")
    ax.axvspan(left, 0.0, color=ORANGE, alpha=0.09, linewidth=0, label="λ < 0: the loss bends down")
    ax.plot(grid, np.maximum(height, below), color=BLUE, linewidth=1.7, label="mean over probes")
    low, high = (np.maximum(height + sign * errors, below) for sign in (-1, 1))
    ax.fill_between(grid, low, high, color=BLUE, alpha=0.25, linewidth=0, label="± one standard error")
    ax.axvline(0.0, color=INK, linewidth=1.0)
    ax.set_xlim(left, right)
    ax.set_ylim(floor, max(float(high.max()), 10 * floor) * 8)


def _ends(ax: Axes, record: Mapping[str, Any]) -> None:
    """Marks at the smallest and the largest eigenvalue seen, their text on the inner side."""
    left, right = ax.get_xlim()
    for name, key in (("λmin", "lambda_low"), ("λmax", "lambda_high")):
        value = numbers.finite(record.get(key))
        if value is None:
            continue
        ax.axvline(value, color=INK, linestyle="--", linewidth=1.1)
        side = "right" if value > (left + right) / 2 else "left"
        text = f" {name} {numbers.decimal(value)} "
        paper = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.0}
        style: dict[str, Any] = {"ha": side, "va": "top", "fontsize": SMALL, "color": INK, "bbox": paper}
        ax.text(value, 0.975, text, transform=ax.get_xaxis_transform(), **style)


def _headline(record: Mapping[str, Any]) -> str:
    share = numbers.finite(record.get("negative_mass"))
    if share is None:
        return "How the eigenvalues of the loss are spread"
    error = numbers.finite(record.get("negative_mass_standard_error"))
    bound = "" if error is None else f" (± {numbers.percent(error)}, one standard error)"
    return f"{numbers.percent(share)} of the curvature is negative{bound}"


def _basis(record: Mapping[str, Any]) -> str:
    probes, steps, size = (numbers.count(record[name]) for name in ("num_vectors", "num_steps", "num_parameters"))
    text = f"stochastic Lanczos quadrature, {probes} probes of {steps} steps over {size} parameters"
    width = numbers.finite(record["width"])
    return text if width is None else f"{text}, smoothed over a width of {numbers.decimal(width)}"
