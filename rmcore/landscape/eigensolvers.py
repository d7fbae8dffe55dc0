"""Eigenvalues and trace of a symmetric operator that is known only by its products with vectors.

Nothing here knows of models or losses: `Product` maps a flat (N,) vector to a flat (N,) vector. Every eigenvalue comes
with its residual r = ||H v - theta v||, because for a symmetric H some true eigenvalue lies within r of theta (Parlett,
The Symmetric Eigenvalue Problem, theorem 4.5.1): the residual is the error bar.

torch adds up a long float32 vector in float32 on a CPU: measured with torch 2.13, the norm of 22.7 M entries comes out
0.13 % too small, and an eigenvalue from such vectors 0.2 %. So the long sums here run in float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmcore.core.errors import CurvatureError
from rmcore.core.progress import Report

Product = Callable[[Tensor], Tensor]
Floats = NDArray[np.float64]

RELATIVE_TOLERANCE = 0.01
"""An eigenvalue counts as converged when its residual is at most this share of its size (or of the largest one): it is
then certain to 1 %, finer than the trace estimate next to it."""
SYMMETRY_TOLERANCE = 0.01
"""H q_j has no part along q_i, i < j - 1, when H is symmetric. Rounding leaves 1e-6 of the largest in float32."""
PROBES_AT_ONCE = 4
"""Vectors in one call for products: three quarters of what can be saved, at eight vectors of memory."""
BREAKDOWN = 10.0
"""Lanczos stops when the next vector is below this many roundings of the largest eigenvalue: only noise is left."""
PIECE_COLUMNS = 2**13
"""Columns of one product in the rows' own precision; products of pieces are added up in float64. A float32 product over
2**18 columns is wrong by 1e-5 on a CPU, over 2**13 by 5e-7 at most, in the same time."""


@dataclass(frozen=True)
class EigenvalueSet:
    """Eigenvalue estimates, largest first.

    values: (K,) signed.
    residuals: (K,) ||H v - theta v||.
    multiplicities: (K,) how many of the N eigenvalues each stands for, where the method estimates that; else None.
    top: (N,) unit eigenvector of the first value.
    """

    values: Floats
    residuals: Floats
    top: Tensor
    multiplicities: Floats | None = None

    @classmethod
    def largest_first(cls, values: list[float], residuals: list[float], vectors: Sequence[Tensor]) -> "EigenvalueSet":
        """A set without multiplicities, from lists in any order."""
        order = np.argsort(values)[::-1]
        return cls(np.array(values)[order], np.array(residuals)[order], vectors[order[0]])


@dataclass(frozen=True)
class LanczosFactorization:
    """H Q = Q T + beta_m q_{m+1} e_m^T with orthonormal Q and tridiagonal T.

    diagonal: (m,) alpha; off_diagonal: (m - 1,) beta_1 ... beta_{m-1}; last_beta: beta_m, 0 when Q spans an invariant
    subspace; basis: (m, N), Q transposed.
    """

    diagonal: Floats
    off_diagonal: Floats
    last_beta: float
    basis: Tensor

    def ritz(self) -> tuple[Floats, Floats]:
        """Eigenvalues (m,) of T, largest first, and its eigenvectors as columns (m, m)."""
        values, vectors = np.linalg.eigh(
            np.diag(self.diagonal) + np.diag(self.off_diagonal, 1) + np.diag(self.off_diagonal, -1)
        )
        return values[::-1].copy(), vectors[:, ::-1].copy()


def lanczos(product: Product, start: Tensor, num_steps: int) -> LanczosFactorization:
    """Lanczos with full reorthogonalisation (two passes of Gram-Schmidt against the whole basis).

    Without it, floating point makes copies of converged eigenvalues (Golub and Van Loan, Matrix Computations, 10.3).
    The basis takes num_steps x N numbers: 20 steps on 22 M float32 parameters are 1.8 GB.

    Args:
        product: v -> H v.
        start: (N,), any vector with a part in every eigenspace; a Gaussian one has that.
        num_steps: products to spend; fewer are spent when an invariant subspace is found first.

    Raises:
        CurvatureError: the operator is not symmetric, which costs nothing to see here.
    """
    num_steps = min(num_steps, start.numel())
    basis = start.new_zeros((num_steps, start.numel()))
    basis[0] = start / norm(start)
    diagonal: list[float] = []
    betas: list[float] = []
    rounding = torch.finfo(start.dtype).eps
    scale = 0.0
    for step in range(num_steps):
        vector = product(basis[step])
        scale = max(scale, norm(vector))
        diagonal.append(dot(basis[step], vector))
        done = basis[: step + 1]
        asymmetry = norm(inner_products(done[: max(step - 1, 0)], vector[None]))
        if asymmetry > SYMMETRY_TOLERANCE * scale:
            raise CurvatureError(
                f"product {step + 1} shows an operator that is not symmetric ({asymmetry / scale:.1%} of its size): "
                "part of the model has no true second derivative, or the weights changed meanwhile. Use eager "
                "attention and no custom autograd function, and do not train during the analysis."
            )
        for _ in range(2):
            vector = vector - done.T @ inner_products(done, vector[None])[:, 0].to(done.dtype)
        beta = norm(vector)
        invariant = beta <= BREAKDOWN * rounding * scale
        betas.append(0.0 if invariant else beta)
        if invariant or step + 1 == num_steps:
            break
        basis[step + 1] = vector / beta
    m = len(diagonal)
    return LanczosFactorization(np.array(diagonal), np.array(betas[: m - 1]), betas[-1], basis[:m])


def lanczos_eigenvalues(factorization: LanczosFactorization, product: Product) -> EigenvalueSet:
    """Ritz values with residuals |beta_m s_m|, and the number of eigenvalues that each stands for.

    The residual formula holds in exact arithmetic. How far the real products are from that is model dependent (Hugging
    Face models round to float32 inside even in float64), so it is measured: one more product gives the true residual of
    the Ritz vector of largest magnitude, and what it has beyond the formula is the floor of all residuals.

    Multiplicities: the squared first entries of the eigenvectors of T are quadrature weights, from which stochastic
    Lanczos quadrature (Ubaru, Chen and Saad 2017, doi:10.1137/16M1104974) estimates sums over the whole spectrum. From
    one start vector an outlier's weight is a wild guess, so converged Ritz values stand for one eigenvalue each, and
    the remaining N - K share the remaining weight. A repeated eigenvalue counts once.
    """
    values, vectors = factorization.ritz()
    basis = factorization.basis
    formula = np.abs(factorization.last_beta * vectors[-1])
    ends = torch.as_tensor(vectors[:, [0, -1]].T.copy(), dtype=basis.dtype, device=basis.device) @ basis  # (2, N)
    largest = 0 if abs(values[0]) >= abs(values[-1]) else len(values) - 1
    vector = ends[0 if largest == 0 else 1]
    true_residual = norm(product(vector) - values[largest] * vector)
    rounding = max(true_residual - formula[largest], torch.finfo(basis.dtype).eps * abs(values[largest]))
    residuals = np.maximum(formula, rounding)
    weights = vectors[0] ** 2
    converged = residuals <= RELATIVE_TOLERANCE * np.abs(values)
    left = weights[~converged].sum()
    multiplicities = np.ones_like(weights)
    if left > 0:
        multiplicities[~converged] = (basis.shape[1] - converged.sum()) * weights[~converged] / left
    return EigenvalueSet(values, residuals, ends[0], multiplicities)


def power_iteration(
    product: Product, size: int, *, top_k: int, max_iterations: int, generator: torch.Generator, dtype: torch.dtype
) -> EigenvalueSet:
    """The `top_k` eigenvalues of largest magnitude, signed, one after the other.

    Vectors found are projected out (deflation) before the next search, and their errors limit it. So each search goes
    on until the residual is a tenth of what counts as converged, or for `max_iterations` products. It is slow where a
    positive and a negative eigenvalue are nearly equal in size, as at initialisation; the residual then says so.
    Lanczos is better in every respect but memory (top_k vectors instead of num_steps).
    """
    found: list[Tensor] = []
    values: list[float] = []
    residuals: list[float] = []

    def unit(vector: Tensor) -> Tensor:
        for _ in range(2):
            for known in found:
                vector = vector - dot(known, vector) * known
        return vector / max(norm(vector), torch.finfo(dtype).tiny)

    for _ in range(min(top_k, size)):
        following = unit(torch.randn(size, generator=generator, device=generator.device, dtype=dtype))
        for _ in range(max_iterations):
            vector = following
            image = product(vector)
            value = dot(vector, image)
            residual = norm(image - value * vector)
            if residual <= RELATIVE_TOLERANCE / 10 * abs(value):
                break
            following = unit(image)
        found.append(vector)
        values.append(value)
        residuals.append(residual)
    return EigenvalueSet.largest_first(values, residuals, found)


def dense_matrix(product: Product, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H as an (N, N) float64 matrix on the CPU, one product with each unit vector. Not symmetrised."""
    columns = torch.empty((size, size), dtype=torch.float64)
    unit = torch.zeros(size, dtype=dtype, device=device)
    for index in range(size):
        unit[index] = 1.0
        columns[:, index] = product(unit).double().cpu()
        unit[index] = 0.0
    return columns


def dense_eigenvalues(matrix: Tensor) -> EigenvalueSet:
    """All N eigenvalues of the symmetric part of `matrix`; residuals are against the matrix as computed.

    So the residuals hold the rounding of the products, which shows as asymmetry.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    residuals = (matrix @ vectors - vectors * values).norm(dim=0)
    return EigenvalueSet(values.flip(0).numpy(), residuals.flip(0).numpy(), vectors[:, -1], np.ones(len(values)))


def hutchinson(
    products: Product, size: int, *, num_probes: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[float, float]:
    """Estimate the trace of H as the mean of z^T H z over Rademacher vectors z, with its standard error.

    Unbiased; the variance of one probe is twice the squared Frobenius norm of H without its diagonal (Hutchinson 1990,
    doi:10.1080/03610919008812866), the smallest of all probes with independent entries.

    Args:
        products: maps (K, N) to (K, N), so that what several products share is computed once.
        size: N.
        num_probes: products to spend, at least 2. The standard error falls with the root.
        generator: of the probes, on the device of H.
        dtype: of the probes.

    Raises:
        CurvatureError: fewer than two probes, from which no error can be told.
    """
    if num_probes < 2:
        raise CurvatureError(f"trace_probes={num_probes} gives no standard error; use at least 2.")
    forms: list[float] = []
    for start in range(0, num_probes, PROBES_AT_ONCE):
        shape = (min(PROBES_AT_ONCE, num_probes - start), size)
        signs = torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype) * 2 - 1
        forms += [dot(probe, image) for probe, image in zip(signs, products(signs), strict=True)]
    return float(np.mean(forms)), float(np.std(forms, ddof=1) / math.sqrt(num_probes))


def norm(vector: Tensor) -> float:
    """Euclidean norm."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def dot(first: Tensor, second: Tensor) -> float:
    """Inner product."""
    return float(inner_products(first[None], second[None]))


def inner_products(rows: Tensor, others: Tensor) -> Tensor:
    """Rows (A, C) times others^T (C, B) as float64 (A, B), without a float64 copy of either."""
    num_pieces = rows.shape[1] // PIECE_COLUMNS
    whole = num_pieces * PIECE_COLUMNS
    pieces, other_pieces = (part[:, :whole].unflatten(1, (num_pieces, PIECE_COLUMNS)) for part in (rows, others))
    products = torch.bmm(pieces.transpose(0, 1), other_pieces.permute(1, 2, 0)).sum(0, dtype=torch.float64)
    return products + rows[:, whole:] @ others[:, whole:].T


class ProductCounter:
    """Products done, of at most `total`, each reported."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.report, self.done = total, report, 0

    def counting(self, product: Product) -> Product:
        """The same product, counted: of one vector (N,), or of K at once (K, N)."""

        def counted(vectors: Tensor) -> Tensor:
            images = product(vectors)
            self.add(1 if vectors.ndim == 1 else len(vectors))
            return images

        return counted

    def add(self, number: int) -> None:
        """So many more products are done."""
        for _ in range(number):
            self.done += 1
            self.report(self.done, self.total, "products")

    def finish(self) -> None:
        """Close the gap where fewer products sufficed."""
        if self.done < self.total:
            self.report(self.done, self.done, "products")
