"""Parts of readiness on judged samples, against brute force and against worlds whose answer is known."""

import json
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from rmcore.evaluation.uncertainty import MetricValue
from rmcore.readiness.components import JudgedPools, _with_unseen_unit, on_policy_parts

seeds = st.integers(0, 10_000)


def world(seed, *, num_prompts=6, size=9, levels=None, flaw=1.0):
    """Pools with a judge and a reward that follows it with an error; `levels` makes many values equal."""
    rng = np.random.default_rng(seed)
    sizes = [size + index % 3 for index in range(num_prompts)]
    judged = [rng.normal(size=one) for one in sizes]
    rewards = [pool + flaw * rng.normal(size=len(pool)) for pool in judged]
    if levels:
        judged = [np.round(pool * levels) / levels for pool in judged]
        rewards = [np.round(pool * levels) / levels for pool in rewards]
    lengths = [rng.integers(1, 40, size=one).astype(float) for one in sizes]
    return JudgedPools(rewards, judged, lengths)


def values(pools, **settings):
    return {name: part.value for name, part in on_policy_parts(pools, num_resamples=100, **settings).items()}


def accuracy_by_loops(pools, only_hard=False):
    """Mean over prompts of the mean over pairs, from the definition."""
    by_prompt = []
    for reward, judged, length in zip(pools.rewards, pools.judged, pools.lengths, strict=True):
        right = []
        for a in range(len(reward)):
            for b in range(len(reward)):
                if judged[a] > judged[b] and not (only_hard and length[a] >= length[b]):
                    right.append(0.5 if reward[a] == reward[b] else float(reward[a] > reward[b]))
        if right:
            by_prompt.append(np.mean(right))
    return np.mean(by_prompt) if by_prompt else None


@given(seed=seeds, levels=st.sampled_from([None, 1, 2]))
def test_accuracies_are_what_two_loops_count(seed, levels):
    pools = world(seed, levels=levels, num_prompts=4, size=5)
    found = values(pools)
    assert found["on_policy_accuracy"] == pytest.approx(accuracy_by_loops(pools))
    assert found["hard_accuracy"] == pytest.approx(accuracy_by_loops(pools, only_hard=True))


def win_rate_by_subsets(reward, judged, n):
    """Over all n-subsets: does the judge prefer the one of highest reward to a sample that was not drawn?"""
    scores = []
    for subset in combinations(range(len(reward)), n):
        top = max(reward[index] for index in subset)
        best = [index for index in subset if reward[index] == top]
        for index in best:
            wins = [
                0.5 if judged[index] == judged[other] else float(judged[index] > judged[other])
                for other in range(len(reward))
                if other not in subset
            ]
            scores.append((np.mean(wins), 1 / len(best)))
    return sum(score * weight for score, weight in scores) / math.comb(len(reward), n)


@given(seed=seeds, levels=st.sampled_from([None, 1]))
def test_the_win_rate_is_that_of_all_subsets(seed, levels):
    pools = world(seed, levels=levels, num_prompts=1, size=6)
    expected = win_rate_by_subsets(pools.rewards[0], pools.judged[0], 5)
    assert values(pools)["win_rate_5"] == pytest.approx(expected)


def test_the_choice_is_of_sixteen_or_as_many_as_there_are_opponents_for():
    assert values(world(0, size=17))["win_rate_16"] is not None
    assert values(world(0, size=14)).keys() >= {"win_rate_14"}


@given(seed=seeds, flip=st.floats(0, 0.45))
def test_the_noise_of_a_judge_is_taken_off_both_accuracies_and_nothing_else(seed, flip):
    """A judge that is wrong independently with probability f turns accuracy a into a (1 - f) + (1 - a) f."""
    pools = world(seed, flaw=0.5)
    plain, corrected = values(pools), values(pools, judge_ceiling=1 - flip)
    for name in ("on_policy_accuracy", "hard_accuracy"):
        assert 0 <= corrected[name] <= 1
        if 0 < corrected[name] < 1:
            assert corrected[name] * (1 - flip) + (1 - corrected[name]) * flip == pytest.approx(plain[name])
        assert abs(corrected[name] - 0.5) >= abs(plain[name] - 0.5) - 1e-12
    assert {name: value for name, value in corrected.items() if "accuracy" not in name} == {
        name: value for name, value in plain.items() if "accuracy" not in name
    }


def test_a_judge_without_an_opinion_leaves_nothing_to_be_right_about():
    pools = world(8, size=17)
    parts = on_policy_parts(JudgedPools(pools.rewards, [np.zeros_like(pool) for pool in pools.judged], pools.lengths))
    assert parts["on_policy_accuracy"].value is None
    assert "tells apart" in parts["on_policy_accuracy"].reason
    assert parts["win_rate_16"].value == pytest.approx(0.5)
    json.dumps({name: part.to_dict() for name, part in parts.items()}, allow_nan=False)


def test_a_share_that_all_prompts_agree_on_has_an_interval_with_a_width():
    """A judge who passes one sample of each of ten prompts, the one that the model ranks first."""
    rewards = [np.linspace(1.0, 0.0, 64)] * 10
    judged = [np.array([1.0] + [0.0] * 63)] * 10
    lengths = [np.arange(64)[::-1] % 7 + 1.0] * 10
    found = on_policy_parts(JudgedPools(rewards, judged, lengths), num_resamples=200)
    for name in ("win_rate_16", "on_policy_accuracy", "hard_accuracy"):
        assert found[name].ci_low < found[name].value <= found[name].ci_high
    assert found["win_rate_16"].ci_low < 0.55


@pytest.mark.slow
def test_a_win_rate_is_held_where_every_choice_of_a_few_prompts_loses():
    """A bootstrap over 50 prompts held it in 91 % of the evaluations."""
    num_prompts, share = 50, 0.03
    rng, trials, held = np.random.default_rng(0), 600, 0
    for trial in range(trials):
        rates = np.where(rng.random(num_prompts) < share, 0.0, np.clip(rng.normal(0.75, 0.1, num_prompts), 0, 1))
        found = _with_unseen_unit(
            MetricValue(float(rates.mean()), 0.5, 0.5, 9), rates, np.ones(num_prompts), 400, trial
        )
        held += found.ci_low <= 0.75 * (1 - share) <= found.ci_high
    assert held >= 0.92 * trials


@pytest.mark.slow
def test_an_estimated_ceiling_widens_the_interval_to_where_the_accuracy_is():
    """120 evaluations of 150 prompts by a judge who reverses each prompt's order with probability 0.25, which an audit
    of 150 pairs estimates: the interval holds the accuracy as often as a 95 % interval does, and less often where the
    audit is taken at its word.
    """
    rng = np.random.default_rng(0)
    flip, num_audited, held = 0.25, 150, {"estimated": 0, "at its word": 0}
    truth = np.mean([_agreement(*_pool(rng)) for _ in range(20_000)])
    for seed in range(120):
        pools = [_pool(rng) for _ in range(150)]
        judged = [-gold if rng.random() < flip else gold for _, gold in pools]
        rewards, lengths = [reward for reward, _ in pools], [rng.normal(size=4) for _ in pools]
        ceiling = rng.binomial(num_audited, 1 - flip) / num_audited
        error = math.sqrt(ceiling * (1 - ceiling) / num_audited)
        for name, known in (("estimated", error), ("at its word", 0.0)):
            found = on_policy_parts(
                JudgedPools(rewards, judged, lengths),
                judge_ceiling=ceiling,
                judge_ceiling_error=known,
                num_resamples=100,
                seed=seed,
            )["on_policy_accuracy"]
            held[name] += found.ci_low <= truth <= found.ci_high
    assert held["estimated"] >= binom.ppf(0.001, 120, 0.95)
    assert held["at its word"] < held["estimated"]


def _pool(rng):
    gold = rng.normal(size=4)
    return gold + rng.normal(size=4), gold


def _agreement(reward, gold):
    better = gold[:, None] > gold[None, :]
    return (reward[:, None] > reward[None, :])[better].mean()
