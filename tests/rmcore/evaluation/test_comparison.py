"""Paired comparison of two models on the same pairs."""

import json

import numpy as np
import pandas as pd
import pytest

from reward_table import reward_table
from rmcore.core.errors import DataError
from rmcore.evaluation.comparison import paired_comparison
from rmcore.evaluation.report_card import evaluate_pairs
from rmcore.evaluation.uncertainty import sign_flip_test


def better(frame: pd.DataFrame, gain: float = 0.4, noise: float = 0.3) -> pd.DataFrame:
    rng = np.random.default_rng(12)
    return frame.assign(reward_chosen=frame.reward_chosen + gain + rng.normal(0, noise, len(frame)))


def test_counts_and_differences_are_those_of_the_two_tables(make_rewards):
    frame = make_rewards(400, 40, decimals=1)
    other = better(frame).round({"reward_chosen": 1})
    result = paired_comparison(frame, other.sample(frac=1, random_state=0), num_resamples=300)
    margin_a = frame.reward_chosen - frame.reward_rejected
    margin_b = other.reward_chosen - other.reward_rejected
    assert result["num_pairs"] == 400
    assert result["only_a_right"] == ((margin_a > 0) & (margin_b <= 0)).sum()
    assert result["only_b_right"] == ((margin_b > 0) & (margin_a <= 0)).sum()
    assert result["both_right"] + result["neither_right"] == 400 - result["only_a_right"] - result["only_b_right"]
    card_a, card_b = (evaluate_pairs(rows, num_resamples=300) for rows in (frame, other))
    for prefix, name in (("", "pairwise_accuracy"), ("length_matched_", "length_matched_accuracy")):
        a, b = result[f"{prefix}accuracy_a"]["value"], result[f"{prefix}accuracy_b"]["value"]
        assert (a, b) == pytest.approx((card_a[name].value, card_b[name].value))
        assert result[f"{prefix}accuracy_difference"]["value"] == pytest.approx(a - b)
    assert result["margin_pearson"] == pytest.approx(margin_a.corr(margin_b))
    assert result["margin_spearman"] == pytest.approx(margin_a.corr(margin_b, method="spearman"))
    score = (np.sign(margin_a) - np.sign(margin_b)) / 2  # ties half, so what is tested is the difference
    assert result["accuracy_difference"]["value"] == pytest.approx(score.mean())
    assert result["sign_flip_p"] == sign_flip_test(score.groupby(frame.prompt_id).sum().to_numpy())
    json.dumps(result, allow_nan=False)


def test_the_paired_interval_is_narrower_than_the_two_apart(make_rewards):
    frame = make_rewards(800, 80)
    result = paired_comparison(frame, better(frame), num_resamples=500)
    difference = result["accuracy_difference"]
    assert difference["ci_high"] < 0
    assert result["sign_flip_p"] < 0.001
    widths = [result[name]["ci_high"] - result[name]["ci_low"] for name in ("accuracy_a", "accuracy_b")]
    assert difference["ci_high"] - difference["ci_low"] < 0.8 * np.hypot(*widths)


@pytest.mark.parametrize("num_prompts", [3, 4, 5, 6, 8])
def test_where_every_prompt_says_the_same_the_interval_agrees_with_the_exact_test(num_prompts):
    frame = reward_table(np.ones(num_prompts), 0.0)
    result = paired_comparison(frame, frame.assign(reward_chosen=-1.0), num_resamples=100)
    difference = result["accuracy_difference"]
    assert (difference["value"], difference["ci_high"]) == (1.0, 1.0)
    assert (difference["ci_low"] > 0) is (result["sign_flip_p"] < 0.05)


def test_equal_models_do_not_differ_and_constant_margins_have_the_accuracy_of_a_guess(make_rewards):
    frame = make_rewards()
    result = paired_comparison(frame, frame)
    assert result["sign_flip_p"] == 1.0
    difference = result["accuracy_difference"]
    assert difference["value"] == 0.0
    assert difference["ci_low"] < 0 < difference["ci_high"]
    assert result["margin_pearson"] == pytest.approx(1.0)
    result = paired_comparison(frame, frame.assign(reward_chosen=0.0, reward_rejected=0.0))
    assert result["margin_spearman"] is None
    assert result["accuracy_b"]["value"] == 0.5


def test_pairs_are_matched_one_by_one_and_others_are_refused_with_counts(make_rewards):
    frame = make_rewards()
    doubled = pd.concat([frame, frame])
    assert paired_comparison(doubled, doubled)["num_pairs"] == 240
    others = [(frame, frame.iloc[20:], "20 are only in A, 0 only in B"), (doubled, frame, "120 are only in A"),
              (frame, frame.assign(prompt_id="same"), "120 pairs have another prompt_id")]  # fmt: skip
    for one, two, said in others:
        with pytest.raises(DataError, match=said):
            paired_comparison(one, two)
