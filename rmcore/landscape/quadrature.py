"""Lanczos quadrature: v^T f(H) v for a random unit vector v, from a few products with H.

For v drawn uniformly from the sphere, v^T f(H) v is on average (1/N) sum_i f(lambda_i), whatever f. The Lanczos matrix
T of v gives that form without f(H): with eigenvalues theta_j of T and the first entries s_j of its eigenvectors it is
sum_j s_j^2 f(theta_j), exact for polynomials up to degree 2 num_steps - 1 (Golub and Meurant 2010, Matrices, Moments
and Quadrature, chapter 6).

Rounding of the products is no reason to leave out nodes near 0, although they stand for nearly all eigenvalues: along
a random vector the errors of N entries cancel. The residuals of Ritz vectors, far larger, say nothing of it. Float32
against float64 products of a model of 1.3 M parameters, same start vector: 0.2 % of the sum of |lambda| at most.

The start vectors are Gaussian, not Rademacher: signs can have no part at all in an eigenvector that has few entries.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rmcore.landscape.eigensolvers import Floats, Product, lanczos


class Rule(NamedTuple):
    """v^T f(H) v as sum_j weights_j f(nodes_j), with weights of sum 1."""

    nodes: Floats
    weights: Floats

    def __call__(self, function: Callable[[Floats], Floats]) -> float:
        """The sum."""
        return float(self.weights @ function(self.nodes))


class Quadrature(NamedTuple):
    """The quadrature rules of one start vector.

    gauss: the rule of the Lanczos matrix itself, for smooth f.
    averaged: rule for |lambda|, see `_averaged_rule`.
    coarser: the same from m / 2 ... m - 1 of the m steps, for the error of `averaged`.
    """

    gauss: Rule
    averaged: Rule
    coarser: list[Rule]


def random_quadrature(
    product: Product, size: int, num_steps: int, generator: torch.Generator, dtype: torch.dtype
) -> Quadrature:
    """The rules of one Gaussian start vector.

    The basis is gone on return, so that a caller with many start vectors holds one at a time.

    Args:
        product: v -> H v, (N,) -> (N,).
        size: N.
        num_steps: products to spend; fewer are spent when they give the exact form.
        generator: draws the start vector, on its device.
        dtype: of the start vector.

    Raises:
        CurvatureError: the operator is not symmetric.
    """
    start = torch.randn(size, generator=generator, device=generator.device, dtype=dtype)
    factorization = lanczos(product, start, num_steps)
    diagonal, off_diagonal = factorization.diagonal, factorization.off_diagonal
    gauss = _gauss_rule(diagonal, off_diagonal)
    if factorization.last_beta == 0.0 or len(diagonal) == size:  # exact for every f
        return Quadrature(gauss, gauss, [gauss] * (num_steps - num_steps // 2))
    *coarser, averaged = (
        _averaged_rule(diagonal[:steps], off_diagonal[: steps - 1], gauss)
        for steps in range(num_steps // 2, num_steps + 1)
    )
    return Quadrature(gauss, averaged, coarser)


def _gauss_rule(diagonal: Floats, off_diagonal: Floats) -> Rule:
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return Rule(nodes, vectors[0] ** 2)


def _averaged_rule(diagonal: Floats, off_diagonal: Floats, inside: Rule) -> Rule:
    """Mean of the Gauss rule of m - 1 steps and the anti-Gauss rule of m, whose error is about the opposite.

    Laurie 1996, Anti-Gaussian quadrature formulas, doi:10.1090/S0025-5718-96-00713-2. |lambda| has a kink at 0, where
    nearly all eigenvalues of a reward model are: a Gauss rule gives too much or too little by whether it has a node
    there, and the mean cancels most of that.

    The anti-Gauss rule can have a node outside the spectrum. It goes to the end of `inside`, so that a positive
    semidefinite matrix has no negative mass.
    """
    if len(diagonal) < 2:
        return _gauss_rule(diagonal, off_diagonal)
    gauss = _gauss_rule(diagonal[:-1], off_diagonal[:-1])
    anti = _gauss_rule(diagonal, np.append(off_diagonal[:-1], math.sqrt(2) * off_diagonal[-1]))
    nodes = np.clip(np.concatenate([gauss.nodes, anti.nodes]), inside.nodes.min(), inside.nodes.max())
    return Rule(nodes, np.concatenate([gauss.weights, anti.weights]) / 2)
