"""The likelihoods of ranks and of grades against sums over all outcomes, in float64."""

import itertools
import math

import pytest
import torch
from scipy import stats
from torch.nn import functional

from rmcore.training.likelihood import free_thresholds, grade_log_likelihood, ranking_log_likelihood, thresholds


def weak_orders(number: int) -> list[tuple[int, ...]]:
    """All rankings with ties of so many answers, as dense ranks from 1."""
    found = set()
    for ranks in itertools.product(range(1, number + 1), repeat=number):
        levels = sorted(set(ranks))
        found.add(tuple(levels.index(rank) + 1 for rank in ranks))
    return sorted(found)


def log_likelihood(utilities: list[float], ranks: tuple[int, ...], tie: list[float], **how) -> float:
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    sorted_utilities = torch.tensor([[utilities[place] for place in order]], dtype=torch.float64)
    sorted_ranks = torch.tensor([[ranks[place] for place in order]])
    first_only = torch.tensor([how.pop("first_only", False)])
    log_tie = torch.tensor(tie, dtype=torch.float64).log()
    found = ranking_log_likelihood(sorted_utilities, sorted_ranks, log_tie, first_only=first_only, **how)
    return float(found[0])


@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_probabilities_of_all_outcomes_sum_to_one(number: int) -> None:
    utilities = [0.3, -1.2, 2.0, 0.9][:number]
    tie = [0.7, 0.4, 0.2][: number - 1]
    total = math.fsum(math.exp(log_likelihood(utilities, ranks, tie)) for ranks in weak_orders(number))
    assert total == pytest.approx(1, abs=1e-12)
    strict = itertools.permutations(range(1, number + 1))
    assert math.fsum(math.exp(log_likelihood(utilities, ranks, [])) for ranks in strict) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_choice_of_the_best_is_a_softmax(number: int) -> None:
    utilities = [0.3, -1.2, 2.0, 0.9, 0.0][:number]
    for best in range(number):
        ranks = tuple(1 if place == best else 2 for place in range(number))
        expected = functional.log_softmax(torch.tensor(utilities, dtype=torch.float64), 0)[best]
        # Whatever the width of ties: one had to be named.
        assert log_likelihood(utilities, ranks, [0.8] * (number - 1), first_only=True) == pytest.approx(float(expected))


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.3])
def test_two_answers_without_ties_are_bradley_terry(smoothing: float) -> None:
    margin = 0.3 + 1.2
    expected = -(1 - smoothing / 2) * math.log1p(math.exp(-margin)) - smoothing / 2 * math.log1p(math.exp(margin))
    assert log_likelihood([0.3, -1.2], (1, 2), [], label_smoothing=smoothing) == pytest.approx(expected, abs=1e-12)


def test_two_answers_with_ties_are_davidson() -> None:
    first, second, nu = math.exp(0.3), math.exp(-1.2), 0.7
    total = first + second + nu * math.sqrt(first * second)
    assert log_likelihood([0.3, -1.2], (1, 2), [nu]) == pytest.approx(math.log(first / total))
    assert log_likelihood([0.3, -1.2], (1, 1), [nu]) == pytest.approx(math.log(nu * math.sqrt(first * second) / total))


def test_padding_and_neighbours_change_nothing() -> None:
    """Each ranking alone, and all in one call padded to the longest: equal, gradients too."""
    generator = torch.Generator().manual_seed(0)
    rankings = [(1, 2), (1, 1), (1, 1, 2, 3), (1, 2, 3), (1, 2, 2, 2, 2), (1, 2, 2)]
    first_only = torch.tensor([False, False, False, False, False, True])
    utilities = torch.randn(len(rankings), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    log_tie = torch.tensor([-0.3, -0.9, -1.2], dtype=torch.float64, requires_grad=True)
    ranks = torch.tensor([ranks + (0,) * (5 - len(ranks)) for ranks in rankings])
    together = ranking_log_likelihood(utilities, ranks, log_tie, first_only=first_only, label_smoothing=0.1)
    gradients = torch.autograd.grad(together.sum(), (utilities, log_tie))
    alone = torch.cat(
        [
            ranking_log_likelihood(
                utilities[at : at + 1, : len(one)],
                torch.tensor([one]),
                log_tie,
                first_only=first_only[at : at + 1],
                label_smoothing=0.1,
            )
            for at, one in enumerate(rankings)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for found, expected in zip(gradients, torch.autograd.grad(alone.sum(), (utilities, log_tie)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_large_utilities_in_float32_stay_finite() -> None:
    utilities = torch.tensor([[80.0, -90.0, 0.0, 50.0]], requires_grad=True)
    log_tie = torch.zeros(3, requires_grad=True)
    said = ranking_log_likelihood(
        utilities, torch.tensor([[1, 2, 2, 3]]), log_tie, first_only=torch.tensor([False]), label_smoothing=0.05
    )
    said.sum().backward()
    assert said.isfinite().all()
    assert utilities.grad.isfinite().all()
    assert log_tie.grad.isfinite().all()


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
