"""Best-of-n and the KL-regularised optimum on finite pools, against enumeration and what they must be best at."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from rmcore.core.errors import ConfigError
from rmcore.policy.sampling.best_of_n import (
    best_of_n_kl,
    best_of_n_weights,
    best_of_n_win_rate,
    pool_kl,
    pooled_deviation,
    strength_for,
    tilted_weights,
)

POOLS = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=7).map(np.array)


@pytest.mark.slow
@given(pool=POOLS, data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_weights_are_those_of_enumerating_every_draw(pool, data):
    n = data.draw(st.integers(1, len(pool)))
    counts = np.zeros(len(pool))
    draws = list(combinations(range(len(pool)), n))
    for draw in draws:
        best = [index for index in draw if pool[index] == max(pool[list(draw)])]
        counts[best] += 1 / len(best)
    # A tie is broken at random among the samples drawn; over all draws equal rewards come out equal.
    assert best_of_n_weights(pool, n) == pytest.approx(counts / len(draws), abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_the_kl_of_samples_that_never_tie_is_the_nominal_one(size):
    rng = np.random.default_rng(size)
    for n in (1, 2, 16, 64, 1000):
        assert best_of_n_kl(rng.normal(size=size), n) == pytest.approx(kl_above(0.0, n), abs=1e-9)


@pytest.mark.parametrize(("size", "tied"), [(3, 2), (7, 2), (500, 499), (500, 20)])
def test_the_kl_where_the_lowest_tie_and_the_others_do_not_is_that_of_an_atom_and_a_density(size, tied):
    pool = np.maximum(np.arange(size, dtype=float), tied - 1)
    for n in (1, 2, 16, 64):
        share = tied / size
        atom = share**n * n * math.log(share) - share**n * math.log(share)
        assert best_of_n_kl(pool, n) == pytest.approx(atom + kl_above(share, n), abs=1e-7)


def kl_above(share, n):
    """The part of the KL above a share u of the policy, by quadrature over u^n, which best-of-n draws uniformly."""
    return quad(lambda drawn: math.log(n) + (n - 1) / n * math.log(drawn), share**n, 1.0)[0]


@given(counts=st.lists(st.integers(2, 5), min_size=1, max_size=5), n=st.integers(1, 6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_kl_of_a_policy_of_atoms_is_that_of_enumerating_its_draws(counts, n):
    """A policy that gives reward j with probability counts[j] / K, whose best of n is a reward again."""
    share = np.array(counts) / sum(counts)
    below = np.cumsum(share)
    best = np.diff(np.concatenate([[0.0], below**n]))
    expected = float(np.sum(best * np.log(best / share)))
    assert best_of_n_kl(np.repeat(np.arange(len(counts)), counts).astype(float), n) == pytest.approx(expected, abs=1e-9)


def test_the_optimum_has_the_kl_asked_for_and_nothing_of_that_kl_is_better():
    rng = np.random.default_rng(1)
    pools = [rng.normal(size=size) for size in (8, 12, 20)]
    strength = strength_for(pools, 0.7)
    tilted = [tilted_weights(pool, strength) for pool in pools]
    assert np.mean([pool_kl(one) for one in tilted]) == pytest.approx(0.7, abs=1e-8)
    best = np.mean([one @ pool for one, pool in zip(tilted, pools, strict=True)])
    for _ in range(300):
        others = [one * np.exp(0.3 * rng.normal(size=len(one))) for one in tilted]
        others = [one / one.sum() for one in others]
        kl = np.mean([pool_kl(one) for one in others])
        reward = np.mean([one @ pool for one, pool in zip(others, pools, strict=True)])
        assert reward - kl / strength <= best - 0.7 / strength + 1e-12


FIVE = np.arange(5.0)
REFUSED = [
    *((lambda n=n: best_of_n_win_rate(FIVE, FIVE, n), "no opponent") for n in (0, 5, 6)),
    *((lambda n=n: best_of_n_weights(FIVE, n), "draw more") for n in (0, 6)),
    *((lambda kl=kl: strength_for([FIVE], kl), "is not between 0 and") for kl in (0.0, -1.0, 99.0)),
    (lambda: pooled_deviation([np.ones(4), np.zeros(3)]), "one and the same reward"),
]


@pytest.mark.parametrize(("choose", "words"), REFUSED)
def test_a_choice_that_the_samples_do_not_allow_is_refused(choose, words):
    with pytest.raises(ConfigError, match=words):
        choose()


def test_a_deviation_is_that_within_prompts():
    assert pooled_deviation([np.array([1.0, 3.0]), np.array([5.0, 5.0])]) == pytest.approx(1.0)
