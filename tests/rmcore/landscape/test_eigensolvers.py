"""Eigensolvers on matrices whose spectrum is known."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmcore.core.errors import CurvatureError
from rmcore.landscape.eigensolvers import dot, hutchinson, lanczos, lanczos_eigenvalues, norm, power_iteration


def with_spectrum(spectrum: list[float], seed: int = 0) -> Tensor:
    """A symmetric matrix in a random basis."""
    generator = torch.Generator().manual_seed(seed)
    size = len(spectrum)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T


def start_vector(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


spectra = st.lists(st.floats(-100, 100, allow_nan=False), min_size=6, max_size=24)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(spectrum=spectra, steps=st.integers(2, 24), seed=st.integers(0, 99))
def test_every_ritz_value_has_an_eigenvalue_within_its_residual_which_is_the_true_one(spectrum, steps, seed):
    matrix = with_spectrum(spectrum, seed)
    factorization = lanczos(matrix.matmul, start_vector(len(spectrum), seed), steps)
    found = lanczos_eigenvalues(factorization, matrix.matmul)
    scale = max(1.0, float(matrix.abs().max()))
    truth = np.linalg.eigvalsh(matrix.numpy())
    distances = np.abs(found.values[:, None] - truth).min(axis=1)
    assert bool(np.all(distances <= found.residuals + 1e-10 * scale))
    values, vectors = factorization.ritz()
    ritz_vectors = factorization.basis.T @ torch.from_numpy(vectors)
    true_residuals = (matrix @ ritz_vectors - ritz_vectors * torch.from_numpy(values)).norm(dim=0).numpy()
    assert np.allclose(found.residuals, true_residuals, rtol=1e-6, atol=1e-8 * scale)


def test_enough_steps_give_the_whole_spectrum_and_a_basis_without_copies():
    spectrum = [
        1e8,
        1e4,
        *np.linspace(-50, 60, 30).tolist(),
        -1e8,
    ]  # outliers that make ghosts without reorthogonalising
    matrix = with_spectrum(spectrum)
    factorization = lanczos(matrix.matmul, start_vector(len(spectrum)), 200)
    gram = factorization.basis @ factorization.basis.T
    assert torch.allclose(gram, torch.eye(len(spectrum), dtype=torch.float64), atol=1e-12)
    found = lanczos_eigenvalues(factorization, matrix.matmul)
    assert np.allclose(found.values, sorted(spectrum, reverse=True), rtol=0, atol=1e-6)
    assert torch.allclose(matrix @ found.top, 1e8 * found.top, atol=1e-4)


def test_lanczos_stops_at_an_invariant_subspace():
    calls = []
    matrix = with_spectrum([5.0, -3.0, 1.0] + [0.0] * 37)

    def product(vector: Tensor) -> Tensor:
        calls.append(1)
        return matrix @ vector

    factorization = lanczos(product, start_vector(40), 30)
    assert len(calls) == 4  # three non-zero eigenvalues and the null space
    found = lanczos_eigenvalues(factorization, product)
    assert np.allclose(found.values, [5, 1, 0, -3], atol=1e-12)


def test_an_operator_that_is_not_symmetric_is_refused():
    matrix = with_spectrum(np.linspace(-1, 5, 20).tolist())
    matrix[3, 11] += 2.0
    with pytest.raises(CurvatureError, match="not symmetric"):
        lanczos(matrix.matmul, start_vector(20), 20)


def test_power_iteration_finds_the_largest_in_magnitude_with_their_signs():
    matrix = with_spectrum([9.0, -7.0, 4.0, -2.0] + [0.1] * 30)
    found = power_iteration(
        matrix.matmul, 34, top_k=3, max_iterations=500, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    assert np.allclose(found.values, [9, 4, -7], rtol=1e-3)
    assert torch.allclose(matrix @ found.top, 9 * found.top, atol=0.05)
    assert bool(np.all(found.residuals <= 0.01 * np.abs(found.values)))


@pytest.mark.slow
def test_trace_is_unbiased_and_its_standard_error_covers():
    matrix = with_spectrum(np.linspace(-20, 40, 30).tolist())
    truth = float(matrix.trace())
    runs = [
        hutchinson(
            lambda vectors: vectors @ matrix,
            30,
            num_probes=16,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        for seed in range(300)
    ]
    estimates, errors = np.array(runs).T
    off_diagonal = matrix - torch.diag(matrix.diag())
    expected_error = float(off_diagonal.norm()) * np.sqrt(2 / 16)
    assert abs(estimates.mean() - truth) < 4 * expected_error / np.sqrt(300)
    assert np.sqrt((errors**2).mean()) == pytest.approx(expected_error, rel=0.1)
    coverage = (np.abs(estimates - truth) <= 2.13 * errors).mean()  # t interval, 15 degrees of freedom
    assert 0.91 <= coverage <= 0.985


@pytest.mark.slow
def test_norm_and_products_of_long_vectors_are_exact_to_float32():
    """torch's own norm gets the fourth digit wrong."""
    vector = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    truth = float(vector.double().norm())
    assert norm(vector) == pytest.approx(truth, rel=1e-9)
    assert dot(vector, vector) == pytest.approx(truth**2, rel=1e-6)
