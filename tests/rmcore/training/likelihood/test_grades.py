"""The likelihood of grades against sums and integrals in float64."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from rmcore.training.likelihood.grades import (
    free_thresholds,
    gaussian_with_offset,
    grade_log_likelihood,
    hermite_rule,
    thresholds,
)

RISING = torch.tensor([-1.3, 0.2, 1.1], dtype=torch.float64)
NO_SIGMA = torch.zeros(1, dtype=torch.float64)


def test_the_probabilities_of_all_grades_sum_to_one() -> None:
    levels = torch.arange(4, dtype=torch.float64)
    for eta in (-30.0, -0.7, 0.0, 4.0, 30.0):
        said = grade_log_likelihood(torch.full((4,), eta, dtype=torch.float64), levels, RISING, NO_SIGMA, "ordinal")
        assert float(said.exp().sum()) == pytest.approx(1, abs=1e-12)


def test_it_is_the_cumulative_link() -> None:
    eta, edges = 0.4, [-math.inf, *RISING.tolist(), math.inf]
    for level in range(4):
        code = torch.tensor([float(level)], dtype=torch.float64)
        said = grade_log_likelihood(torch.tensor([eta], dtype=torch.float64), code, RISING, NO_SIGMA, "ordinal")
        expected = stats.logistic.cdf(edges[level + 1] - eta) - stats.logistic.cdf(edges[level] - eta)
        assert float(said.exp()) == pytest.approx(expected, rel=1e-12)


def test_two_grades_are_logistic_regression() -> None:
    eta, cut = torch.tensor([0.4, 0.4], dtype=torch.float64), torch.tensor([0.9], dtype=torch.float64)
    said = grade_log_likelihood(eta, torch.tensor([0.0, 1.0], dtype=torch.float64), cut, NO_SIGMA, "binary")
    assert said.exp().tolist() == pytest.approx([stats.logistic.cdf(0.9 - 0.4), stats.logistic.cdf(0.4 - 0.9)])


def test_real_grades_are_normal() -> None:
    eta, code = torch.tensor([0.4], dtype=torch.float64), torch.tensor([1.1], dtype=torch.float64)
    cut, log_sigma = torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    said = grade_log_likelihood(eta, code, cut, log_sigma, "real")
    assert float(said) == pytest.approx(stats.norm.logpdf(1.1, loc=0.4 - 0.3, scale=math.exp(-0.5)), rel=1e-12)


def test_thresholds_rise_and_come_back() -> None:
    torch.testing.assert_close(thresholds(free_thresholds(RISING)), RISING, rtol=1e-12, atol=1e-12)
    assert (thresholds(torch.tensor([0.0, -30.0, 2.0])).diff() > 0).all()


def test_an_offset_of_real_grades_is_a_joint_normal() -> None:
    eta = torch.tensor([0.4, -0.2, 1.0], dtype=torch.float64)
    codes = torch.tensor([1.1, 0.0, 0.7], dtype=torch.float64)
    log_sigma, log_tau = torch.tensor([-0.5], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    cut = torch.tensor([0.3], dtype=torch.float64)
    groups = torch.tensor([0, 1, 0])
    found = gaussian_with_offset(eta, codes, groups, cut, log_sigma, log_tau, 2)
    for group in (0, 1):
        own = (groups == group).numpy()
        covariance = np.eye(own.sum()) * math.exp(-1.0) + math.exp(0.6)
        expected = stats.multivariate_normal.logpdf(codes.numpy()[own], eta.numpy()[own] - 0.3, covariance)
        assert float(found[group]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0, 2.0])
def test_the_rule_integrates_an_offset_of_eight_grades_out(tau: float) -> None:
    codes = torch.tensor([3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 3.0, 3.0], dtype=torch.float64)
    eta = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def joint(offset: torch.Tensor) -> torch.Tensor:
        return grade_log_likelihood(eta + offset[:, None], codes, RISING, NO_SIGMA, "ordinal").sum(1)

    nodes, log_weights = hermite_rule(eta)
    found = (joint(tau * nodes) + log_weights).logsumexp(0)
    expected, _ = integrate.quad(
        lambda b: math.exp(float(joint(torch.tensor([b], dtype=torch.float64)))) * stats.norm.pdf(b, scale=tau),
        -12 * tau,
        12 * tau,
        epsabs=1e-14,
    )
    assert float(found) == pytest.approx(math.log(expected), abs=1e-4)
