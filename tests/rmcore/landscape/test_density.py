"""Stochastic Lanczos quadrature against spectra that are known."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev
from scipy import stats
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.landscape.density import SpectralDensity, gaussian_kernels, spectral_density
from rmcore.landscape.operators import LossGaussNewton, LossHessian
from rmcore.landscape.quadrature import Rule, _averaged_rule, random_quadrature

SIGMAS = 4.0  # a right estimator is farther off than that in one of 16,000 tests
FLAT = np.array([*np.linspace(-1, 2, 21), 5.0, -3.0, 0.0, 0.0, 0.0])
# As of a reward model: a power law at 0 and single eigenvalues far out at both ends.
PEAKED = np.concatenate([3.0 / np.arange(1, 401) ** 1.5, -2.0 / np.arange(1, 301) ** 1.5, np.zeros(100)])


def product_of(spectrum: np.ndarray):
    """A diagonal matrix: the start vectors are Gaussian, so the basis does not matter."""
    diagonal = torch.from_numpy(np.asarray(spectrum, dtype=np.float64))
    return lambda vector: diagonal * vector


def density_of(spectrum: np.ndarray, seed: int = 0, *, num_vectors: int = 8, num_steps: int = 20) -> SpectralDensity:
    return spectral_density(
        product_of(spectrum),
        len(spectrum),
        num_vectors=num_vectors,
        num_steps=num_steps,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


def start_weights(size: int, num_vectors: int, seed: int) -> np.ndarray:
    """(K, N) squared parts of the unit start vectors along the eigenvectors of a diagonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(size, generator=generator, dtype=torch.float64).numpy() for _ in range(num_vectors)]
    return np.array([vector**2 / (vector @ vector) for vector in vectors])


def true_values(spectrum: np.ndarray) -> dict[str, float]:
    sizes = np.abs(spectrum)
    return {
        "trace": spectrum.sum(),
        "negative_mass": sizes[spectrum < 0].sum() / sizes.sum(),
        "effective_rank": sizes.sum() ** 2 / (sizes**2).sum(),
    }


@pytest.fixture(scope="module")
def exact_runs() -> list[SpectralDensity]:
    """Runs whose quadrature is exact, with as many steps as eigenvalues: what is left is the sampling."""
    return [density_of(FLAT, seed, num_steps=len(FLAT)) for seed in range(100)]


spectra = st.lists(st.floats(-100, 100, allow_nan=False, allow_subnormal=False), min_size=3, max_size=40)
property_test = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.slow
@property_test
@given(spectrum=spectra, num_steps=st.integers(2, 40), seed=st.integers(0, 99))
def test_the_area_is_one_and_moments_are_those_of_the_start_vectors(spectrum, num_steps, seed):
    """m steps integrate polynomials up to degree 2m - 1 exactly; the kernel adds its variance to the second moment."""
    values = np.array(spectrum)
    if np.abs(values).max() < 1e-3:
        values = values + 1.0
    found = density_of(values, seed, num_vectors=3, num_steps=num_steps)
    grid, density, scale = np.array(found.grid), np.array(found.density), np.abs(values).max()
    weights = start_weights(len(values), 3, seed).mean(axis=0)
    outside = 2 * stats.norm.sf(6) * 100  # beyond the grid, times the largest square there in units of the scale
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=outside)
    assert np.trapezoid(density * grid, grid) / scale == pytest.approx(weights @ values / scale, abs=outside)
    second = (weights @ values**2 + found.width**2) / scale**2
    assert np.trapezoid(density * grid**2, grid) / scale**2 == pytest.approx(second, abs=outside)
    assert found.trace == pytest.approx(len(values) * weights @ values, abs=1e-9 * len(values) * scale)
    assert found.width == pytest.approx((max(found.lambda_high, 0) - min(found.lambda_low, 0)) / num_steps)


@property_test
@given(spectrum=spectra, seed=st.integers(0, 99))
def test_as_many_steps_as_eigenvalues_are_exact_for_each_start_vector(spectrum, seed):
    values = np.array(spectrum)
    if np.abs(values).max() < 1e-3:
        values = values + 1.0
    found = density_of(values, seed, num_vectors=2, num_steps=len(values))
    weights = start_weights(len(values), 2, seed)
    curves = gaussian_kernels(np.array(found.grid), values, found.width) @ weights.T
    peak = 1 / found.width / math.sqrt(2 * math.pi)
    assert np.allclose(found.density, curves.mean(axis=1), rtol=0, atol=1e-6 * peak)
    assert np.allclose(found.standard_error, curves.std(axis=1, ddof=1) / math.sqrt(2), rtol=0, atol=1e-6 * peak)
    sizes = weights.mean(axis=0) * np.abs(values)
    assert found.negative_mass == pytest.approx(sizes[values < 0].sum() / sizes.sum(), abs=1e-6)


def chebyshev_tail(relative_width: float, degree: int) -> float:
    """Largest sum, over centres, of a Gaussian's Chebyshev coefficients from `degree` on; height 1, on [-1, 1]."""
    count = 5 * degree
    points = np.cos(np.pi * (np.arange(count) + 0.5) / count)
    heights = np.exp(-0.5 * ((points[:, None] - np.linspace(-1, 1, 41)) / relative_width) ** 2)
    series = chebyshev.chebvander(points, count - 1).T @ heights * 2 / count
    return float(np.abs(series[degree:]).sum(axis=0).max())


@pytest.mark.parametrize("num_steps", [10, 20, 40])
@pytest.mark.parametrize("shape", ["even", "peaked", "two ends"])
def test_a_kernel_of_the_chosen_width_is_integrated_for_any_spectrum(num_steps, shape):
    """A rule with positive weights is off by at most twice the error of a polynomial that it integrates exactly."""
    spectrum = {
        "even": np.linspace(-1, 1, 500),
        "peaked": np.tanh(np.linspace(-3, 3, 500) ** 3),
        "two ends": np.cos(np.linspace(0, np.pi, 500)),
    }[shape]
    found = density_of(spectrum, seed=1, num_vectors=2, num_steps=num_steps)
    truth = gaussian_kernels(np.array(found.grid), spectrum, found.width) @ start_weights(500, 2, 1).mean(axis=0)
    peak = 1 / found.width / math.sqrt(2 * math.pi)
    half_length = (spectrum.max() - spectrum.min()) / 2
    assert np.abs(np.array(found.density) - truth).max() <= 2 * peak * chebyshev_tail(
        found.width / half_length, 2 * num_steps
    )


@pytest.mark.parametrize("num_steps", [20, 40, 80])
def test_the_share_that_the_steps_leave_out_is_what_the_documentation_says(num_steps):
    assert chebyshev_tail(2 / num_steps, 2 * num_steps) <= 1.5e-4


@pytest.mark.slow
def test_error_bars_of_the_density_cover_the_truth_as_often_as_they_should(exact_runs):
    """At the middle of the bulk, where many eigenvalues add up to a normal error; and calibrated on the whole grid."""
    num_runs, grid, width = len(exact_runs), np.array(exact_runs[0].grid), exact_runs[0].width
    assert all(np.allclose(one.grid, grid, rtol=0, atol=1e-9) for one in exact_runs)  # all runs see the very ends
    truth = gaussian_kernels(grid, FLAT, width).mean(axis=1)
    density, errors = (np.array([getattr(one, name) for one in exact_runs]) for name in ("density", "standard_error"))
    seen = truth > 1e-6 * truth.max()
    z = (density.mean(axis=0) - truth)[seen] / (density.std(axis=0, ddof=1)[seen] / math.sqrt(num_runs))
    assert np.abs(z).max() <= stats.norm.isf(0.5e-4 / seen.sum())
    # A squared standard error is the expected squared distance from the truth.
    surplus = (errors**2 - (density - truth) ** 2).sum(axis=1)
    assert abs(surplus.mean()) <= SIGMAS * surplus.std(ddof=1) / math.sqrt(num_runs)
    middle = np.abs(grid - 1.0).argmin()
    inside = np.abs(density - truth)[:, middle] <= stats.t.ppf(0.975, 7) * errors[:, middle]
    assert abs(inside.mean() - 0.95) <= SIGMAS * math.sqrt(0.95 * 0.05 / num_runs)


@pytest.mark.parametrize("name", ["trace", "negative_mass", "effective_rank"])
def test_derived_quantities_and_their_errors_are_right_on_average(exact_runs, name):
    values, errors = np.array([[getattr(one, name), getattr(one, f"{name}_standard_error")] for one in exact_runs]).T
    distance = values - true_values(FLAT)[name]
    assert abs(distance.mean()) <= SIGMAS * values.std(ddof=1) / math.sqrt(len(values))
    surplus = errors**2 - distance**2
    assert abs(surplus.mean()) <= SIGMAS * surplus.std(ddof=1) / math.sqrt(len(values))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [6, 7, 12, 20, 21])
def test_error_bars_hold_what_few_steps_get_wrong(num_steps):
    """Against the exact forms of the same start vectors, where |lambda| has its kink amid most eigenvalues."""
    for seed in range(20):
        found = density_of(PEAKED, seed, num_steps=num_steps)
        weights = start_weights(len(PEAKED), 8, seed).mean(axis=0)
        sizes, squares = weights * np.abs(PEAKED), weights * PEAKED**2
        mass, rank = sizes[PEAKED < 0].sum() / sizes.sum(), len(PEAKED) * sizes.sum() ** 2 / squares.sum()
        assert abs(found.negative_mass - mass) <= found.negative_mass_standard_error
        assert abs(found.effective_rank - rank) <= found.effective_rank_standard_error


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [12, 20, 30])
def test_averaged_rules_are_closer_than_gauss_rules_at_the_kink(num_steps):
    generator = torch.Generator().manual_seed(0)
    product, size = product_of(PEAKED), len(PEAKED)
    distances = []
    for weights in start_weights(size, 20, 0):
        found = random_quadrature(product, size, num_steps, generator, torch.float64)
        distances.append([rule(np.abs) - weights @ np.abs(PEAKED) for rule in (found.averaged, found.gauss)])
    averaged, gauss = np.sqrt((np.array(distances) ** 2).mean(axis=0))
    assert averaged < gauss


@pytest.mark.parametrize("num_steps", [2, 3, 6])
def test_averaged_rules_are_exact_to_the_degree_that_laurie_gives(num_steps):
    """2 m - 1 from m steps, two more than the Gauss rule of m - 1: the errors of the two halves cancel there."""
    rng = np.random.default_rng(num_steps)
    diagonal, beside = rng.normal(size=num_steps), rng.uniform(0.5, 1.5, num_steps - 1)
    matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    rule = _averaged_rule(diagonal, beside, Rule(np.array([-99.0, 99.0]), np.array([0.5, 0.5])))
    for degree in range(2 * num_steps):
        moment = np.linalg.matrix_power(matrix, degree)[0, 0]
        assert rule(lambda nodes, power=degree: nodes**power) == pytest.approx(moment, abs=1e-9)


@pytest.mark.slow
@property_test
@given(spectrum=st.lists(st.floats(1e-3, 100), min_size=2, max_size=40), steps=st.integers(2, 40))
def test_a_positive_semidefinite_matrix_has_no_negative_mass(spectrum, steps):
    found = density_of(np.array([*spectrum, 0.0, 0.0]), num_vectors=2, num_steps=steps)
    assert found.negative_mass == pytest.approx(0, abs=1e-12)
    assert density_of(-np.array([*spectrum, 0.0]), num_vectors=2, num_steps=steps).negative_mass == pytest.approx(1)


def test_rounding_of_float32_products_is_not_taken_for_negative_mass(make_qwen, rows):
    gauss_newton = LossGaussNewton(make_qwen("sdpa"), [rows])
    found = spectral_density(
        gauss_newton.product,
        gauss_newton.num_parameters,
        num_vectors=2,
        num_steps=15,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
    )
    assert found.negative_mass < 1e-5
    assert 1 <= found.effective_rank <= 9  # nine pairs


def test_equal_eigenvalues_leave_no_doubt():
    found = density_of(np.full(7, -2.5), num_vectors=3)
    assert (found.lambda_low, found.lambda_high) == pytest.approx((-2.5, -2.5))
    assert found.trace == pytest.approx(-17.5)
    assert found.effective_rank == pytest.approx(7)
    assert found.negative_mass == 1.0
    assert max(found.trace_standard_error, found.effective_rank_standard_error) < 1e-12
    assert found.grid[int(np.argmax(found.density))] == pytest.approx(-2.5, abs=found.width / 4)


def test_a_zero_matrix_is_undefined_not_a_number():
    found = density_of(np.zeros(9))
    ratios = {"negative_mass", "effective_rank"}
    undefined = {"grid", "density", "standard_error", "width", *ratios, *(f"{name}_standard_error" for name in ratios)}
    assert set(found.reasons) == undefined
    assert {name for name, value in found.to_dict().items() if value is None} == undefined
    assert (found.trace, found.lambda_low, found.lambda_high) == (0.0, 0.0, 0.0)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


@pytest.mark.slow
def test_the_hessian_of_a_reward_model(tiny, rows, truth):
    """All derived quantities over many seeds against the dense truth; undefined ones there are none."""
    hessian = LossHessian(tiny, [rows])
    runs = [
        spectral_density(
            hessian.product,
            63,
            num_vectors=6,
            num_steps=63,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        for seed in range(8)
    ]
    values = torch.linalg.eigvalsh(truth).numpy()
    for name, true in true_values(values).items():
        estimated = np.array([getattr(one, name) for one in runs])
        error = math.sqrt(sum(getattr(one, f"{name}_standard_error") ** 2 for one in runs)) / len(runs)
        assert abs(estimated.mean() - true) <= SIGMAS * error
    found = runs[0]
    assert (found.lambda_low, found.lambda_high) == pytest.approx((values[0], values[-1]), abs=1e-10)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
    assert found.reasons == {}


def test_one_basis_at_a_time_is_in_memory():
    size, num_steps = 1000, 10
    product = product_of(np.linspace(-1, 1, size))
    bases: dict[int, StorageWeakRef] = {}
    alive = []

    def watched(vector: Tensor) -> Tensor:
        if vector.untyped_storage().nbytes() >= num_steps * size * 8:  # a row of the basis
            bases[vector.untyped_storage().data_ptr()] = StorageWeakRef(vector.untyped_storage())
        alive.append(sum(not basis.expired() for basis in bases.values()))
        return product(vector)

    spectral_density(
        watched,
        size,
        num_vectors=3,
        num_steps=num_steps,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    assert set(alive) == {1}


def test_too_large_a_basis_is_refused_before_any_product():
    calls = []
    with pytest.raises(CurvatureError, match="Lower num_steps"):
        spectral_density(
            lambda vector: calls.append(1) or vector,
            10**13,
            num_vectors=2,
            num_steps=5,
            generator=torch.Generator(),
            dtype=torch.float32,
        )
    assert not calls


@pytest.mark.parametrize("setting", [{"num_vectors": 1}, {"num_steps": 1}])
def test_settings_without_an_error_bar_are_refused(setting):
    with pytest.raises(ConfigError, match="at least 2"):
        density_of(FLAT, **setting)


@pytest.mark.parametrize("size", [3, 50])
def test_progress_counts_every_product_to_the_end(size):
    seen = []
    found = spectral_density(
        product_of(np.linspace(1, 2, size)),
        size,
        num_vectors=2,
        num_steps=6,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
        report=lambda done, total, _: seen.append((done, total)),
    )
    assert sorted({done for done, _ in seen}) == list(range(1, found.num_products + 1))
    assert seen[-1] == (found.num_products, found.num_products)
    assert all(done <= total for done, total in seen)


def test_the_seed_decides_and_nothing_else():
    first = density_of(FLAT, 3)
    torch.rand(3)
    assert density_of(FLAT, 3) == first
    assert density_of(FLAT, 4) != first


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_autograd_mode_does_not_matter(world, rows, mode):
    hessian = LossHessian(world.TinyReward(), [rows])

    def measure() -> SpectralDensity:
        generator = torch.Generator().manual_seed(0)
        return spectral_density(
            hessian.product, 63, num_vectors=2, num_steps=5, generator=generator, dtype=torch.float32
        )

    expected = measure()
    with mode():
        assert measure() == expected
