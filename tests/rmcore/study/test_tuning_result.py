"""The verdict on a winner: fresh seeds, test prompts, an interval that covers, and sentences that say it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rmcore.core.errors import DataError
from rmcore.study.objectives import Scores
from rmcore.study.tuning_result import Confirmed, compare_arms, metric, shown_difference, verdict

NUM_PROMPTS, PAIRS, SEEDS = 120, 3, 3


def scores(rng, level, difficulty, lost=0.0):
    share = 1 / (1 + np.exp(-(level - difficulty + lost)))
    prompts = tuple(f"{place:04d}" for place in range(len(difficulty)))
    return Scores(prompts, rng.binomial(PAIRS, share).astype(float), np.full(len(difficulty), float(PAIRS)))


def confirmed(rng, seed, level, difficulty, seed_spread=0.05):
    shift = rng.normal(0, seed_spread)
    validation = scores(rng, level + shift, rng.normal(0, 1, 40))
    test = scores(rng, level + shift, difficulty)
    return Confirmed(seed, validation, test, "0123456789abcdef", 10.0)


def repeat(rng, gain):
    difficulty = rng.normal(0, 1, NUM_PROMPTS)
    arms = [[confirmed(rng, seed, 0.8 + add, difficulty) for seed in range(SEEDS)] for add in (gain, 0.0)]
    return compare_arms("accuracy", *arms)


@pytest.mark.slow
def test_equal_arms_are_called_better_about_as_rarely_as_the_level_says():
    rng = np.random.default_rng(0)
    repeats = 120
    found = [repeat(rng, 0.0) for _ in range(repeats)]
    false = np.mean([one.is_better for one in found])
    assert false <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / repeats)
    covered = np.mean([one.difference.ci_low <= 0 <= one.difference.ci_high for one in found])
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_a_winner_that_is_better_is_found_and_the_sign_of_a_loss_is_turned():
    found = repeat(np.random.default_rng(1), 1.0)
    assert found.is_better
    assert found.difference.value == pytest.approx(found.winner.value - found.defaults.value)
    assert "they share (MOVER)" in found.difference.method
    rng = np.random.default_rng(2)
    difficulty = rng.normal(0, 1, NUM_PROMPTS)
    better, worse = ([confirmed(rng, seed, level, difficulty) for seed in range(SEEDS)] for level in (0.0, 1.0))
    turned = compare_arms("loss", better, worse)  # as if shares were losses: less is better
    assert turned.is_better
    assert turned.difference.value == pytest.approx(turned.defaults.value - turned.winner.value)


def first(scores, number):
    return Scores(scores.prompts[:number], scores.sums[:number], scores.counts[:number])


def test_prompts_that_one_arm_cannot_read_count_for_neither():
    rng = np.random.default_rng(3)
    difficulty = rng.normal(0, 1, 30)
    whole = [confirmed(rng, seed, 0.5, difficulty) for seed in range(2)]
    fewer = [replace(one, test=first(one.test, 20)) for one in whole]
    found = compare_arms("accuracy", fewer, whole)
    assert found.winner == found.defaults
    assert found.winner.value == pytest.approx(np.mean([one.test.value for one in fewer]))
    assert found.winner.num_prompts == 20
    other = [replace(one, prompts="fedcba9876543210") for one in fewer]
    mixed = compare_arms("accuracy", other, whole)
    assert "they share (MOVER)" in mixed.difference.method  # under every seed the same two sets
    silent = [replace(one, test=first(one.test, 0)) for one in whole]
    with pytest.raises(DataError, match="no test pair of seed 0"):
        compare_arms("accuracy", silent, whole)


def test_the_spread_over_prompts_is_known_by_the_prompts_that_the_objective_is_about():
    rng = np.random.default_rng(5)
    arms = [[confirmed(rng, seed, level, rng.normal(0, 1, 50)) for seed in range(3)] for level in (2.0, 0.0)]
    few = np.arange(50) < 1
    scarce = [
        [replace(one, test=Scores(one.test.prompts, one.test.sums * few, one.test.counts * few)) for one in arm]
        for arm in arms
    ]
    assert compare_arms("accuracy", *arms).difference.num_prompts == 50
    found = compare_arms("length-matched", *scarce).difference
    assert (found.num_prompts, found.ci_low) == (1, None)
    assert "only one prompt" in found.reason


def difference(value, low, high, reason=None):
    return {"value": value, "ci_low": low, "ci_high": high, "num": 3, "reason": reason}


def test_sentences_say_the_difference_and_what_to_do():
    better = verdict("accuracy", difference(0.021, 0.006, 0.036), are_defaults=False)
    assert better == "Better than the defaults by +2.1 points [+0.6, +3.6] of test pairwise accuracy."
    equal = verdict("loss", difference(0.003, -0.01, 0.016), are_defaults=False)
    said = "Not shown to be better than the defaults: keep them."
    assert equal.startswith(f"{said} The difference is +0.003 nats [-0.010, +0.016]")
    worse = verdict("accuracy", difference(-0.05, -0.06, -0.04), are_defaults=False)
    assert worse.startswith("Worse than the defaults: keep them. The difference is -5.0 points")
    unknown = verdict("accuracy", difference(0.021, None, None, "one prompt"), are_defaults=False)
    assert unknown.startswith(said)
    assert "no interval: one prompt" in shown_difference(difference(0.0, None, None, "one prompt"), "accuracy")
    assert "keep them" in verdict("accuracy", difference(0.0, None, None), are_defaults=True)


def test_a_share_is_reported_within_its_bounds():
    rng = np.random.default_rng(4)
    arm = [confirmed(rng, seed, 6.0, rng.normal(0, 1, 4), seed_spread=3.0) for seed in range(2)]
    found = metric(compare_arms("accuracy", arm, arm).fresh[0], "share")
    assert found["ci_low"] is None or 0 <= found["ci_low"] <= found["ci_high"] <= 1
