"""Serving best-of-n on fresh prompts: the gain is the true one, its interval covers, and nothing is said of no data."""

import numpy as np
import pytest

from rmcore.core.errors import DataError
from rmcore.policy.confirmation import MOST_SAMPLES, OPPONENTS, confirm, smallest_n, verdict_of_confirmation
from rmcore.policy.sampling.best_of_n import nominal_kl

NUMBERS = {"num_resamples": 400, "seed": 0}


def served(rng, num_prompts, n, quality):
    """Gold of the chosen and of the others, of a proxy whose correlation with gold is `quality`, differing by prompt.

    Prompts differ in level, in spread and in how well the proxy sees them, as they do.
    """
    level, spread = rng.normal(size=(num_prompts, 1)), rng.uniform(0.5, 2, size=(num_prompts, 1))
    gold = rng.normal(size=(num_prompts, n + OPPONENTS))
    own = np.clip(quality + rng.normal(0, 0.2, size=(num_prompts, 1)), -1, 1)
    proxy = own * gold + np.sqrt(1 - own**2) * rng.normal(size=gold.shape)
    best = proxy[:, :n].argmax(axis=1)
    gold = level + spread * gold
    return gold[np.arange(num_prompts), best], gold[:, n:]


@pytest.mark.slow
@pytest.mark.parametrize("quality", [0.0, 0.6, -0.4])
def test_intervals_cover_the_true_gain(quality):
    rng = np.random.default_rng(5)
    truth = confirm(*served(rng, 400_000, 16, quality), num_resamples=1, seed=0)
    inside = {"gain": 0, "win_rate": 0}
    repeats = 400
    for _ in range(repeats):
        found = confirm(*served(rng, 60, 16, quality), **NUMBERS)
        for name in inside:
            inside[name] += found[name].ci_low <= truth[name].value <= found[name].ci_high
    # Nominal 95 %; three standard errors of 400 repeats are 3.3 points, and a ratio of sums is slightly too narrow.
    assert min(inside.values()) / repeats >= 0.915, inside
    assert max(inside.values()) / repeats <= 0.985, inside


@pytest.mark.parametrize(("num_prompts", "passes"), [(200, 0.995), (60, 0.98), (60, 0.9), (12, 0.9)])
def test_a_judge_of_passes_and_failures_is_believed_only_where_prompts_enough_tell_them_apart(num_prompts, passes):
    """The chosen one is no better than the others: claims are errors, and a few prompts must not make them."""
    rng = np.random.default_rng(7)
    claimed, repeats = 0, 200
    for _ in range(repeats):
        judged = (rng.random((num_prompts, 1 + OPPONENTS)) < passes).astype(float)
        if not np.ptp(judged[:, 1:], axis=1).any():
            continue  # refused: it has no unit
        found = confirm(judged[:, 0], judged[:, 1:], **NUMBERS)["gain"]
        record = {"n": 16, "num_prompts": num_prompts, "min_gain": 0.3, "gold": {"gain": found.to_dict()}}
        claimed += verdict_of_confirmation(record)["status"] != "unclear"
    assert claimed / repeats <= 0.095  # nominal 5 %, three standard errors of 200 repeats


def test_a_perfect_choice_gains_what_the_largest_of_n_normals_does():
    best, others = served(np.random.default_rng(1), 200_000, 16, 10.0)
    equal = confirm(best, others, num_resamples=1, seed=0)
    assert equal["win_rate"].value == pytest.approx(16 / 17, abs=0.003)  # n / (n + 1)
    spread = np.random.default_rng(2).normal(size=(200_000, 16)).max(axis=1).mean()  # 1.766, in each prompt's own unit
    mean_over_root = 1.25 / np.sqrt((0.5**2 + 0.5 * 2 + 2**2) / 3)  # of uniform spreads between 0.5 and 2
    assert equal["gain"].value == pytest.approx(spread * mean_over_root, abs=0.02)


def test_offsets_of_prompts_and_the_unit_of_the_judge_do_not_matter():
    rng = np.random.default_rng(3)
    best, others = served(rng, 30, 8, 0.5)
    offsets = rng.normal(0, 50, size=30)
    moved = confirm(3 * best + offsets, 3 * others + offsets[:, None], **NUMBERS)
    for name, value in confirm(best, others, **NUMBERS).items():
        assert moved[name].value == pytest.approx(value.value)
        assert moved[name].ci_low == pytest.approx(value.ci_low)


@pytest.mark.parametrize(
    ("best", "others", "message"),
    [
        (np.ones(5), np.ones((5, 4)), "one and the same reward"),
        (np.ones(5), np.ones((4, 4)), "rewards of shape"),
        (np.ones(1), np.eye(1, 4), "two prompts or more"),
        (np.ones(5), np.eye(5, 1), "at least two"),
        (np.array([1.0, np.nan]), np.eye(2, 4), "not finite"),
    ],
)
def test_nothing_is_said_of_what_tells_nothing(best, others, message):
    with pytest.raises(DataError, match=message):
        confirm(best, others, **NUMBERS)


@pytest.mark.parametrize("planned", [0.01, 0.5, 1.0, 2.0, 3.0, 7.0])
def test_n_is_the_smallest_that_goes_as_far_as_planned(planned):
    n = smallest_n(planned)
    assert nominal_kl(n) >= planned
    assert n == 2 or nominal_kl(n // 2) < planned


def test_a_plan_beyond_best_of_n_is_refused():
    with pytest.raises(DataError, match=rf"n = {MOST_SAMPLES}, and 9 are planned"):
        smallest_n(9.0)


@pytest.mark.parametrize(
    ("low", "high", "status", "reason"),
    [
        (0.35, 0.6, "rose", None),
        (0.1, 0.6, "rose", "0.3 sd was asked for"),
        (-0.1, 0.2, "unclear", "fresh_prompts"),
        (-0.4, -0.1, "fell", None),
    ],
)
def test_the_interval_decides(low, high, status, reason):
    gain = {"value": (low + high) / 2, "ci_low": low, "ci_high": high}
    found = verdict_of_confirmation({"n": 16, "num_prompts": 50, "min_gain": 0.3, "gold": {"gain": gain}})
    assert found["status"] == status
    assert "best-of-16 on 50 fresh prompts" in found["headline"]
    assert [reason in one for one in found["reasons"]] == ([] if reason is None else [True])
