"""The likelihood of grades against sums in float64."""

import math

import pytest
import torch
from scipy import stats

from rmcore.training.likelihood import free_thresholds, grade_log_likelihood, thresholds

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


def test_real_grades_are_normal() -> None:
    eta, code = torch.tensor([0.4], dtype=torch.float64), torch.tensor([1.1], dtype=torch.float64)
    cut, log_sigma = torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    said = grade_log_likelihood(eta, code, cut, log_sigma, "real")
    assert float(said) == pytest.approx(stats.norm.logpdf(1.1, loc=0.4 - 0.3, scale=math.exp(-0.5)), rel=1e-12)


def test_thresholds_rise_and_come_back() -> None:
    torch.testing.assert_close(thresholds(free_thresholds(RISING)), RISING, rtol=1e-12, atol=1e-12)
    assert (thresholds(torch.tensor([0.0, -30.0, 2.0])).diff() > 0).all()
