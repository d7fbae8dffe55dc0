"""Careful rewards of members: right where the members are right, and unmoved by what no ranking sees."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.policy.conservative import (
    AGGREGATIONS,
    PENALTY,
    conservative_gains,
    disagreement_along_n,
    in_own_deviations,
)
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


def gains(*sides):
    return {name: value["value"] for name, value in conservative_gains(*sides, **QUICK)["gains"].items()}


def disagreements(rewards, members):
    return [row["value"] for row in disagreement_along_n(rewards, members, **QUICK)]


@given(seed=seeds)
def test_gains_are_those_of_the_sample_that_each_choice_likes_best(seed):
    """With n the whole pool, best-of-n is the best sample."""
    rewards, members, gold = world(seed)
    num = sum(len(pool) - 1 for pool in gold)
    deviation = math.sqrt(sum(((pool - pool.mean()) ** 2).sum() for pool in gold) / num)
    own = np.stack(members) - np.stack(members).mean(axis=2, keepdims=True)  # (C, M, K)
    own /= np.sqrt((own**2).sum(axis=(0, 2), keepdims=True) / num)
    spread = own.std(axis=1)
    choices = {
        "reward_model": np.stack(rewards),
        "mean": own.mean(axis=1),
        "worst_case": own.min(axis=1),
        "uncertainty_weighted": own.mean(axis=1) - PENALTY * spread**2,
    }
    found = gains(rewards, members, gold)
    assert set(found) == set(choices)
    judged = np.stack(gold)
    for name, by in choices.items():
        taken = judged[np.arange(len(judged)), by.argmax(axis=1)]
        assert found[name] == pytest.approx((taken - judged.mean(axis=1)).mean() / deviation), name


@given(seed=seeds)
def test_differences_are_of_the_gains_and_everything_is_json(seed):
    found = conservative_gains(*world(seed), **QUICK)
    assert found["n"] == 8
    assert set(found["differences"]) == set(AGGREGATIONS)
    for name, more in found["differences"].items():
        expected = found["gains"][name]["value"] - found["gains"]["reward_model"]["value"]
        assert more["value"] == pytest.approx(expected)
        assert more["ci_low"] <= more["ci_high"]
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
@given(seed=seeds)
def test_members_that_are_the_reward_model_gain_what_it_gains(seed):
    rewards, _, gold = world(seed)
    members = [np.stack([pool, 5 * pool + 3, 0.2 * pool - 1]) for pool in rewards]
    found = conservative_gains(rewards, members, gold, **QUICK)
    for more in found["differences"].values():
        assert more["value"] == pytest.approx(0)
        assert more["ci_low"] == pytest.approx(0)
    assert disagreements(rewards, members) == pytest.approx([0, 0, 0, 0])


@pytest.mark.slow
@given(seed=seeds, scale=st.floats(0.01, 100))
def test_neither_levels_nor_scales_matter(seed, scale):
    rewards, members, gold = world(seed)
    rng = np.random.default_rng(seed)
    factors = scale ** rng.uniform(-1, 1, size=(3, 1))
    moved = [factors * pool + rng.normal(size=(3, 1)) for pool in members]
    plain, after = gains(rewards, members, gold), gains([scale * pool - 1 for pool in rewards], moved, gold)
    assert after == pytest.approx(plain)
    assert disagreements(rewards, moved) == pytest.approx(disagreements(rewards, members))
    assert gains(rewards, members, [pool / scale + 7 for pool in gold]) == pytest.approx(plain)


def test_members_help_where_their_errors_are_independent_and_doubt_helps_where_they_part():
    """Errors are huge on every tenth sample, each member's own: the mean halves them, the others avoid them."""
    rng = np.random.default_rng(1)
    gold = list(rng.normal(size=(80, 30)))
    wild = [np.where(rng.random(30) < 0.1, 8.0, 0.1) for _ in gold]
    members = [pool + error * rng.normal(size=(4, 30)) for pool, error in zip(gold, wild, strict=True)]
    found = conservative_gains([pool[0] for pool in members], members, gold, num_resamples=300, seed=0)
    assert found["differences"]["mean"]["ci_low"] > 0
    assert found["gains"]["uncertainty_weighted"]["ci_low"] > found["gains"]["mean"]["ci_high"]
    assert found["gains"]["worst_case"]["ci_low"] > found["gains"]["mean"]["ci_high"]
    assert disagreements([pool[0] for pool in members], members) == sorted(
        disagreements([pool[0] for pool in members], members)
    )


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
    rewards, members, gold = world(2, size=12)
    rewards[3], members[3], gold[3] = rewards[3][:5], members[3][:, :5], gold[3][:5]
    assert conservative_gains(rewards, members, gold, **QUICK)["n"] == 5
    assert [row["n"] for row in disagreement_along_n(rewards, members, **QUICK)] == [1, 2, 4]


def test_a_member_without_opinion_is_refused():
    rewards, members, gold = world(3)
    flat = [np.concatenate([pool[:1], np.ones((1, 8))]) for pool in members]
    with pytest.raises(ConfigError, match="one and the same reward"):
        conservative_gains(rewards, flat, gold, **QUICK)
