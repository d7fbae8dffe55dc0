"""Ratings of a prompt's answers from pairs, and the scale of preferences that evaluation knows."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logged_sample import connected_pairs
from reward_table import reward_table
from rmcore.core.errors import ConfigError
from rmcore.evaluation.calibration import reliability_bins
from rmcore.evaluation.label_strength import rate_answers
from rmcore.evaluation.report_card import batch_metrics, evaluate_pairs, most_confident_mistakes


def rate(pairs, differences=None, size=None):
    """Ratings from (better, worse) pairs, each with a difference of one unless told."""
    better, worse = np.array(pairs, dtype=np.int64).T
    given = np.ones(len(pairs)) if differences is None else np.array(differences, dtype=float)
    return rate_answers(better, worse, given, size or int(max(better.max(), worse.max())) + 1)


@given(seed=st.integers(0, 10_000), size=st.integers(2, 12), extra=st.integers(0, 6), noise=st.sampled_from([0.0, 0.3]))
@settings(max_examples=40)
def test_margins_are_fitted_as_least_squares_does_and_those_of_one_score_give_it_back(seed, size, extra, noise):
    rng = np.random.default_rng(seed)
    score = rng.normal(size=size)
    pairs = [(a, b) if score[a] >= score[b] else (b, a) for a, b in connected_pairs(rng, size, extra)]
    differences = np.array([score[a] - score[b] for a, b in pairs]) + noise * rng.normal(size=len(pairs))
    design = np.zeros((len(pairs), size))
    for row, (high, low) in enumerate(pairs):
        design[row, high], design[row, low] = 1, -1
    found = rate(pairs, differences, size)
    expected = np.linalg.lstsq(design, differences, rcond=None)[0]  # of least norm, so of mean 0
    assert found.answers.tolist() == list(range(size))
    assert found.strength == pytest.approx(expected, abs=1e-9)
    assert (found.num_pairs, found.num_loops) == (len(pairs), extra)
    if not noise:
        assert found.strength == pytest.approx(score - score.mean(), abs=1e-9)
        assert found.num_agreeing == len(pairs)


def test_of_parts_that_no_pair_connects_the_largest_counts():
    found = rate([(0, 1), (5, 3), (3, 2), (2, 6)], size=8)
    assert found.answers.tolist() == [2, 3, 5, 6]
    assert found.num_pairs == 3
    assert found.strength == pytest.approx([-0.5, 0.5, 1.5, -1.5])
    assert rate([(3, 2), (0, 1)]).answers.tolist() == [0, 1]  # of parts of one size the first


def test_answers_that_no_pair_tells_apart_are_exactly_equal():
    """Rounding must not order what was not compared."""
    for size in range(4, 30):
        strength = rate([(0, other) for other in range(1, size)]).strength
        assert len(np.unique(strength[1:])) == 1
        assert strength[0] > strength[1]


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]])
def test_labels_that_contradict_each_other_altogether_rate_no_answer_higher(pairs):
    found = rate(pairs)
    assert np.ptp(found.strength) == 0
    assert found.num_agreeing == 0


IN_LOGITS = ("mean_margin", "margin_std", "margin_p05", "margin_p25", "margin_p50", "margin_p75", "margin_p95")
IN_SQUARED_LOGITS = ("pooled_reward_variance", "within_prompt_reward_variance")


def table(margin, *, offset=0.0, scale=1.0):
    """Pairs with these margins, two a prompt; `scale` is of all rewards."""
    margin, every = np.asarray(margin), np.arange(len(margin))
    rewards = scale * (offset + margin / 2), scale * (offset - margin / 2)
    return reward_table(*rewards, every // 2, chosen_chars=every % 7 + 10, rejected_chars=every % 5 + 10)


@pytest.mark.slow
@given(seed=st.integers(0, 1000), power=st.integers(-4, 4))
@settings(max_examples=10)
def test_rewards_with_their_beta_are_worth_the_same_as_scaled_ones_without(seed, power):
    """Exactly: a power of two is no rounding. What is in logits is left as the rewards are."""
    beta = 2.0**power
    rng = np.random.default_rng(seed)
    margin, offset = rng.normal(0.5, 1.5, 60).round(1), rng.normal(size=30).repeat(2)
    raw, scaled = table(margin, offset=offset), table(margin, offset=offset, scale=beta)
    ours = evaluate_pairs(raw, calibration=None, num_resamples=30, beta=beta)
    theirs = evaluate_pairs(scaled, calibration=None, num_resamples=30)
    for name, value in theirs.items():
        factor = beta if name in IN_LOGITS else beta**2 if name in IN_SQUARED_LOGITS else 1.0
        for end in ("value", "ci_low", "ci_high"):
            mine, its = getattr(ours[name], end), getattr(value, end)
            assert (mine is None and its is None) or factor * mine == its, (name, end)
    pd.testing.assert_frame_equal(reliability_bins(raw, beta=beta), reliability_bins(scaled))
    mistakes = most_confident_mistakes(raw, beta=beta), most_confident_mistakes(scaled)
    assert mistakes[0]["confidence"].tolist() == mistakes[1]["confidence"].tolist()
    assert (beta * mistakes[0]["margin"]).tolist() == mistakes[1]["margin"].tolist()
    sides = [frame[["reward_chosen", "reward_rejected"]].to_numpy() for frame in (raw, scaled)]
    quick = batch_metrics(sides[0], beta=beta), batch_metrics(sides[1])
    assert all((beta if name in IN_LOGITS else 1.0) * quick[0][name] == value for name, value in quick[1].items())


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_beta_that_is_no_scale_is_refused(beta):
    with pytest.raises(ConfigError, match=f"beta={beta}"):
        evaluate_pairs(table([1.0, -0.5, 2.0]), beta=beta)
