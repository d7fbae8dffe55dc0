"""The matrices of pairs say what the dense matrices over weights say, and what leaving pairs out does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import check_grad

from rmcore.core.errors import CurvatureError
from rmcore.explain.linearized import (
    MarginLoss,
    choose_damping,
    correlation,
    fit_coefficients,
    left_out_together,
    resolvent,
)

LOSSES = [MarginLoss(), MarginLoss(beta=0.4, label_smoothing=0.1), MarginLoss(beta=2.5)]


class Quadratic(MarginLoss):
    """(m - 1)^2 / 2, of which one Newton step is exact."""

    def value(self, margins):
        return np.square(margins - 1) / 2

    def slope(self, margins):
        return margins - 1

    def curvature(self, margins):
        return np.ones_like(margins)


def draw(num_pairs=12, num_weights=7, num_targets=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_pairs, num_weights)), rng.normal(size=(num_targets, num_weights))


def change_without(gradients, targets, left_out, damping, loss):
    """Real change of the targets' margins: the linear model trained on all, and without some at the same divisor."""
    num, kept = len(gradients), np.setdiff1d(np.arange(len(gradients)), left_out)
    before = targets @ gradients.T @ fit_coefficients(gradients @ gradients.T, damping, loss)
    rest = gradients[kept]  # the mean over fewer pairs is n / (n - R) times as large, and so must the penalty be
    return targets @ rest.T @ fit_coefficients(rest @ rest.T, damping * num / len(kept), loss) - before


def predicted_without(gradients, targets, left_out, damping, loss):
    """First order, and one Newton step."""
    kernel, across = gradients @ gradients.T, targets @ gradients.T
    margins = kernel @ fit_coefficients(kernel, damping, loss)
    response, own = (resolvent(kernel, one, margins, damping, loss) for one in (across, kernel))
    slope, curvature = loss.slope(margins)[left_out], loss.curvature(margins)[left_out]
    step = left_out_together(response[:, left_out], own[np.ix_(left_out, left_out)], slope, curvature)
    return response[:, left_out] @ slope, step


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_pairs", [3, 12])
def test_the_matrix_of_pairs_is_the_inverse_hessian_over_weights(loss, num_pairs):
    gradients, targets = draw(num_pairs)
    margins = np.random.default_rng(1).normal(scale=3, size=num_pairs)
    hessian = gradients.T @ (loss.curvature(margins)[:, None] * gradients) / num_pairs + 0.03 * np.eye(7)
    expected = targets @ np.linalg.solve(hessian, gradients.T) / num_pairs
    found = resolvent(gradients @ gradients.T, targets @ gradients.T, margins, 0.03, loss)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(margin=st.floats(-30, 30), beta=st.floats(0.1, 5), smoothing=st.floats(0, 0.9))
def test_the_derivatives_are_those_of_the_loss(margin, beta, smoothing):
    loss = MarginLoss(beta, smoothing)
    assert check_grad(lambda x: loss.value(x)[0], loss.slope, [margin]) < 1e-5
    assert check_grad(lambda x: loss.slope(x)[0], loss.curvature, [margin]) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("damping", [10.0, 1e-3])
def test_the_linearised_training_ends_where_its_gradient_is_zero(loss, damping):
    gradients, _ = draw(40, 15)
    weights = gradients.T @ fit_coefficients(gradients @ gradients.T, damping, loss)
    gradient = gradients.T @ loss.slope(gradients @ weights) / 40 + damping * weights
    assert np.abs(gradient).max() < 1e-8
    assert np.abs(weights).max() > 1e-3


@pytest.mark.parametrize("left_out", [[3], [0, 2, 5, 11]])
def test_the_newton_step_is_exact_for_a_quadratic_loss_and_the_first_order_is_not(left_out):
    gradients, targets = draw()
    real = change_without(gradients, targets, left_out, 0.05, Quadratic())
    first, step = predicted_without(gradients, targets, left_out, 0.05, Quadratic())
    np.testing.assert_allclose(step, real, rtol=1e-7)
    assert np.abs(first - real).max() > 0.01 * np.abs(real).max()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("left_out", [[3], [1, 4, 7]])
def test_both_become_exact_as_damping_grows(loss, left_out):
    """What first order leaves out of a change is of the next power of 1 / damping, so ten times gives a tenth."""
    gradients, targets = draw()
    errors = []
    for damping in (30.0, 300.0):
        real = change_without(gradients, targets, left_out, damping, loss)
        first, step = predicted_without(gradients, targets, left_out, damping, loss)
        errors.append([np.abs(one - real).max() / np.abs(real).max() for one in (first, step)])
    (first, step), (first_later, step_later) = errors
    assert first_later == pytest.approx(first / 10, rel=0.2)
    assert step_later < 0.2 * step
    assert step < first


@pytest.mark.parametrize("power", [-1.0, 0.0])
def test_the_damping_of_a_linear_world_is_found(power):
    gradients, held_out = draw(200, 30, 100)
    kernel, across = gradients @ gradients.T, held_out @ gradients.T
    damping, loss = float(10**power * kernel.diagonal().mean()), MarginLoss(label_smoothing=0.05)
    margins = across @ fit_coefficients(kernel, damping, loss)
    best, *others = choose_damping(kernel, across, margins, loss)
    assert best.damping == pytest.approx(damping)
    assert best.error < 1e-10
    assert best.correlation == pytest.approx(1.0)
    assert min(one.error for one in others) > 1e-3


def test_pairs_without_gradients_are_refused():
    with pytest.raises(CurvatureError, match="has a gradient"):
        choose_damping(np.zeros((3, 3)), np.zeros((2, 3)), np.ones(2), MarginLoss())


def test_a_kernel_that_is_none_is_refused():
    kernel = np.array([[1.0, 5.0], [5.0, 1.0]])  # of no gradients: an eigenvalue is -4
    with pytest.raises(CurvatureError, match="accurate"):
        fit_coefficients(-kernel, 1e-6, MarginLoss())


def test_correlation_is_that_of_numpy_and_nan_of_a_constant():
    first, second = np.random.default_rng(0).normal(size=(2, 30))
    assert correlation(first, second) == pytest.approx(np.corrcoef(first, second)[0, 1])
    assert np.isnan(correlation(first, np.ones(30)))
