"""Disagreement of members along best-of-n, unmoved by what no ranking sees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.policy.disagreement import disagreement_along_n, in_own_deviations
from rmcore.policy.sampling.best_of_n import best_of_n_weights

seeds = st.integers(0, 10_000)
QUICK = {"num_resamples": 100, "seed": 0}


def world(seed, *, num_prompts=8, size=8, num_members=3):
    """Gold (K,), a reward that follows it, and members (M, K) with levels and scales of their own."""
    rng = np.random.default_rng(seed)
    gold = list(rng.normal(size=(num_prompts, size)))
    rewards = [pool + rng.normal(size=size) for pool in gold]
    scale = rng.uniform(0.5, 4, size=(num_members, 1))
    members = [scale * (pool + rng.normal(size=(num_members, size))) for pool in gold]
    return rewards, members, gold


def disagreements(rewards, members):
    return [row["value"] for row in disagreement_along_n(rewards, members, **QUICK)]


@pytest.mark.slow
@given(seed=seeds, scale=st.floats(0.01, 100))
def test_neither_levels_nor_scales_matter(seed, scale):
    rewards, members, _ = world(seed)
    rng = np.random.default_rng(seed)
    factors = scale ** rng.uniform(-1, 1, size=(3, 1))
    moved = [factors * pool + rng.normal(size=(3, 1)) for pool in members]
    assert disagreements(rewards, moved) == pytest.approx(disagreements(rewards, members))


@given(seed=seeds)
def test_disagreement_for_n_of_1_is_that_of_a_usual_sample_and_for_all_that_of_the_best(seed):
    rewards, members, _ = world(seed)
    spread = np.stack(in_own_deviations(members)).std(axis=1)
    rows = disagreement_along_n(rewards, members, **QUICK)
    assert [row["n"] for row in rows] == [1, 2, 4, 8]
    assert rows[0]["value"] == pytest.approx(spread.mean())
    assert rows[-1]["value"] == pytest.approx(spread[np.arange(8), np.stack(rewards).argmax(axis=1)].mean())
    half = np.mean([best_of_n_weights(pool, 4) @ one for pool, one in zip(rewards, spread, strict=True)])
    assert rows[2]["value"] == pytest.approx(half)


def test_pools_may_differ_in_size_and_the_smallest_says_n():
    rewards, members, _ = world(2, size=12)
    rewards[3], members[3] = rewards[3][:5], members[3][:, :5]
    assert [row["n"] for row in disagreement_along_n(rewards, members, **QUICK)] == [1, 2, 4]


def test_a_member_without_opinion_is_refused():
    rewards, members, _ = world(3)
    flat = [np.concatenate([pool[:1], np.ones((1, 8))]) for pool in members]
    with pytest.raises(ConfigError, match="one and the same reward"):
        disagreement_along_n(rewards, flat, **QUICK)
