"""The whole spectrum as a density with error bars, by stochastic Lanczos quadrature.

Each random start vector gives, for any f, an estimate of the mean of f over all eigenvalues (quadrature.py; Ubaru, Chen
and Saad 2017, doi:10.1137/16M1104974). With f a Gaussian around t that is the density at t (Ghorbani, Krishnan and Xiao
2019, arXiv:1901.10159). Start vectors are independent, so their spread is the error.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import Floats, Product
from rmcore.landscape.products import ProductCounter, basis_excess
from rmcore.landscape.quadrature import Quadrature, Rule, random_quadrature

GRID_MARGIN = 6
"""Kernel widths of grid beyond the spectrum: a Gaussian has 2e-9 of its area farther out."""
POINTS_PER_WIDTH = 4
"""Grid points a kernel width: the trapezoid rule is then exact to rounding for a Gaussian."""


@dataclass(frozen=True)
class SpectralDensity:
    """How the N eigenvalues are spread. The area below the density is 1, so a single eigenvalue has the area 1 / N.

    Every field that can be undefined is None then, and `reasons` has its name with the reason. A standard error is
    that over start vectors; those of negative_mass and effective_rank hold the error of the quadrature besides. For a
    95 % interval take as many of them as the t distribution with num_vectors - 1 degrees of freedom says. They do not
    say how the numbers vary over pairs.

    Attributes:
        grid: (G,) ascending eigenvalues.
        density: (G,) share of all eigenvalues a unit of eigenvalue, smoothed by a Gaussian kernel.
        standard_error: (G,) of the density.
        width: standard deviation of the kernel: the length of the spectrum, with 0 in it, over num_steps. See
            `spectral_density`.
        lambda_low: smallest Ritz value seen: the smallest eigenvalue is no larger.
        lambda_high: largest Ritz value seen: the largest eigenvalue is no smaller.
        negative_mass: sum of |lambda| over the negative eigenvalues / sum of |lambda| over all: 0 for a convex loss
            (float32 products leave some 1e-4).
        effective_rank: (sum |lambda|)^2 / sum lambda^2, k for k equal eigenvalues (see `HessianSpectrum`).
        trace: sum of all eigenvalues.
        num_vectors: start vectors.
        num_steps: Lanczos steps asked for from each.
        num_products: products spent.
        num_parameters: N.
        reasons: name of each undefined field -> why.
    """

    grid: tuple[float, ...] | None
    density: tuple[float, ...] | None
    standard_error: tuple[float, ...] | None
    width: float | None
    lambda_low: float
    lambda_high: float
    negative_mass: float | None
    negative_mass_standard_error: float | None
    effective_rank: float | None
    effective_rank_standard_error: float | None
    trace: float
    trace_standard_error: float
    num_vectors: int
    num_steps: int
    num_products: int
    num_parameters: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record: lists, numbers, strings and null."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def spectral_density(
    product: Product,
    size: int,
    *,
    num_vectors: int,
    num_steps: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    report: Report = silent,
) -> SpectralDensity:
    """Density, negative mass, effective rank and trace of a symmetric matrix known by its products.

    The kernel is as wide as the length of the spectrum over num_steps: the finest that these steps resolve whatever the
    spectrum. Over such a length m steps integrate exactly every polynomial of degree 2m - 1, and the Chebyshev series
    of that Gaussian has only 1.5e-4 of its peak beyond (20 steps or more). The quadrature is thus within twice that of
    the exact form, and what is left is the spread over start vectors, which the error bars show. A narrower kernel
    would show single Ritz values as if they were eigenvalues, with error bars that do not cover it.

    Memory: the Lanczos basis of one start vector, num_steps x N numbers.

    Args:
        product: v -> H v, (N,) -> (N,).
        size: N.
        num_vectors: start vectors, at least 2. Errors fall with the root.
        num_steps: products from each, at least 2.
        generator: draws the start vectors one after the other, on its device.
        dtype: of the vectors, the operator's.
        report: called after each product; total is an upper bound until the last call.

    Raises:
        ConfigError: num_vectors or num_steps is too small.
        CurvatureError: the basis does not fit into memory, or the operator is not symmetric.
    """
    for name, value in (("num_vectors", num_vectors), ("num_steps", num_steps)):
        if value < 2:
            raise ConfigError(f"{name}={value} gives no density with an error; use at least 2.")
    excess = basis_excess(num_steps, size, dtype, generator.device)
    if excess is not None:
        raise CurvatureError(f"{excess} Lower num_steps, or measure fewer parameters.")
    counter = ProductCounter(min(num_steps, size) * num_vectors, report)
    counted = counter.counting(product)
    # Only the product differentiates, and no dot product may be cast to bf16 by the caller's autocast.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(generator.device.type, enabled=False):
        found = [random_quadrature(counted, size, num_steps, generator, dtype) for _ in range(num_vectors)]
    counter.finish()
    return _record(found, size=size, num_steps=num_steps, num_products=counter.done)


def _record(found: list[Quadrature], *, size: int, num_steps: int, num_products: int) -> SpectralDensity:
    reasons: dict[str, str] = {}
    low = min(float(one.gauss.nodes.min()) for one in found)
    high = max(float(one.gauss.nodes.max()) for one in found)
    grid, density, errors, width = _smoothed([one.gauss for one in found], low, high, num_steps, reasons)
    first_moments = np.array([one.gauss(lambda nodes: nodes) for one in found])
    mass, rank = _ratios(found, size, reasons)
    return SpectralDensity(
        grid=grid,
        density=density,
        standard_error=errors,
        width=width,
        lambda_low=low,
        lambda_high=high,
        negative_mass=mass[0],
        negative_mass_standard_error=mass[1],
        effective_rank=rank[0],
        effective_rank_standard_error=rank[1],
        trace=size * float(first_moments.mean()),
        trace_standard_error=size * float(first_moments.std(ddof=1)) / math.sqrt(len(found)),
        num_vectors=len(found),
        num_steps=num_steps,
        num_products=num_products,
        num_parameters=size,
        reasons=reasons,
    )


Values = tuple[float, ...]


def _smoothed(
    rules: list[Rule], low: float, high: float, num_steps: int, reasons: dict[str, str]
) -> tuple[Values, Values, Values, float] | tuple[None, None, None, None]:
    """Grid, density, its standard error and the kernel width."""
    # 0 belongs to the spectrum of a reward model: it keeps the length from vanishing where all eigenvalues are equal.
    low, high = min(low, 0.0), max(high, 0.0)
    width = (high - low) / num_steps
    if width == 0.0:
        text = "all eigenvalues are 0: their density is a single spike of no width."
        reasons |= dict.fromkeys(("grid", "density", "standard_error", "width"), text)
        return None, None, None, None
    num_points = POINTS_PER_WIDTH * (num_steps + 2 * GRID_MARGIN) + 1
    grid = np.linspace(low - GRID_MARGIN * width, high + GRID_MARGIN * width, num_points)
    curves = np.stack([gaussian_kernels(grid, rule.nodes, width) @ rule.weights for rule in rules])  # (K, G)
    errors = curves.std(axis=0, ddof=1) / math.sqrt(len(rules))
    return tuple(grid.tolist()), tuple(curves.mean(axis=0).tolist()), tuple(errors.tolist()), width


def gaussian_kernels(grid: Floats, centres: Floats, width: float) -> Floats:
    """(G, M) normal densities of standard deviation `width` around M centres, at G points."""
    return np.exp(-0.5 * ((grid[:, None] - centres) / width) ** 2) / (width * math.sqrt(2 * math.pi))


Ratio = tuple[float, float] | tuple[None, None]


def _ratios(found: list[Quadrature], size: int, reasons: dict[str, str]) -> tuple[Ratio, Ratio]:
    """Negative mass and effective rank, each with its error: over start vectors, and of the quadrature."""
    if not any(one.gauss.nodes.any() for one in found):
        text = "all eigenvalues are 0: the loss is flat in these parameters."
        names = ("negative_mass", "effective_rank")
        reasons |= {f"{name}{suffix}": text for name in names for suffix in ("", "_standard_error")}
        return (None, None), (None, None)
    fine = np.array([_size_sums(one.averaged) for one in found])  # (K, 3)
    coarse = np.array([[_size_sums(rule) for rule in one.coarser] for one in found])  # (K, C, 3)

    def mass(negative: float, magnitude: float, square: float) -> float:
        return negative / magnitude

    def rank(negative: float, magnitude: float, square: float) -> float:
        return size * magnitude**2 / square

    return _with_error(mass, fine, coarse), _with_error(rank, fine, coarse)


def _size_sums(rule: Rule) -> tuple[float, float, float]:
    """|lambda| over the negative eigenvalues, |lambda| over all, lambda^2 over all."""
    return rule(lambda nodes: np.maximum(-nodes, 0.0)), rule(np.abs), rule(np.square)


def _with_error(statistic: Callable[..., float], fine: Floats, coarse: Floats) -> tuple[float, float]:
    """A function of means over K start vectors, from (K, S) values each, and its standard error.

    Two parts, added in squares. Over start vectors: the jackknife, which keeps what the parts of a ratio have
    in common (Efron and Tibshirani 1993, An Introduction to the Bootstrap, equation 11.5). Of the quadrature: how far
    half of the steps or more, `coarse` (K, C, S), lead elsewhere at most, which is conservative where doubling the
    steps at least halves the error.
    """
    value = statistic(*fine.mean(axis=0))
    without = [statistic(*np.delete(fine, left_out, axis=0).mean(axis=0)) for left_out in range(len(fine))]
    sampling = math.sqrt((len(fine) - 1) * float(np.var(without)))
    quadrature = max(abs(value - statistic(*sums)) for sums in coarse.mean(axis=0))
    return float(value), math.hypot(sampling, quadrature)
