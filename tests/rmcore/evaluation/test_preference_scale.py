"""P(chosen preferred) = sigmoid(beta * margin): evaluation knows the beta of what it evaluates."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from rmcore.core.errors import ConfigError
from rmcore.evaluation.calibration import reliability_bins
from rmcore.evaluation.report_card import batch_metrics, evaluate_pairs, most_confident_mistakes

IN_LOGITS = ("mean_margin", "margin_std", "margin_p05", "margin_p25", "margin_p50", "margin_p75", "margin_p95")
IN_SQUARED_LOGITS = ("pooled_reward_variance", "within_prompt_reward_variance")


SPREAD = 1.8
"""Of log-odds: as a model of about 78 % accuracy has them."""


def table(margin, *, offset=0.0, scale=1.0):
    """Pairs with these margins, two a prompt; `scale` is of all rewards."""
    margin, offset = np.asarray(margin), np.broadcast_to(offset, len(margin))
    every = np.arange(len(margin))
    return pd.DataFrame(
        {
            "pair_id": [f"pair {index:05d}" for index in every],
            "prompt_id": [f"prompt {index // 2}" for index in every],
            "reward_chosen": scale * (offset + margin / 2),
            "reward_rejected": scale * (offset - margin / 2),
            "chosen_chars": every % 7 + 10,
            "rejected_chars": every % 5 + 10,
            "subset": None,
        }
    )


def drawn(num, beta, seed=0):
    """Margins whose sign is right with probability sigmoid(beta * |margin|): calibrated under that beta."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.normal(0, SPREAD / beta, num))
    return np.where(rng.random(num) < expit(beta * size), size, -size)


@pytest.mark.slow
def test_a_calibrated_model_of_beta_a_quarter_has_no_calibration_error():
    rewards = table(drawn(20_000, 0.25))
    found = evaluate_pairs(rewards, num_resamples=10, beta=0.25)
    assert found["ece_debiased"].value == pytest.approx(0, abs=0.01)
    assert found["temperature"].value == pytest.approx(1, abs=0.05)
    taken_for_one = evaluate_pairs(rewards, num_resamples=10)
    size = np.abs(np.random.default_rng(1).normal(0, SPREAD, 100_000))
    expected = np.mean(expit(4 * size) - expit(size))
    assert taken_for_one["ece_debiased"].value == pytest.approx(expected, abs=0.01) == pytest.approx(0.16, abs=0.01)
    assert taken_for_one["temperature"].value == pytest.approx(4, rel=0.05)
    assert taken_for_one["brier"].value > found["brier"].value
    assert taken_for_one["loss"].value > found["loss"].value


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
