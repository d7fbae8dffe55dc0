"""The report card: what it refuses, what it leaves undefined and why, and that row order does not matter."""

import json

import numpy as np
import pandas as pd
import pytest

from reward_table import reward_table
from rmcore.core.errors import DataError
from rmcore.evaluation.calibration import fitting_half
from rmcore.evaluation.report_card import batch_metrics, evaluate_pairs, most_confident_mistakes


def test_values_lie_inside_their_intervals_and_are_plain_json(make_rewards):
    metrics = evaluate_pairs(make_rewards(600, 60, decimals=2), num_resamples=300)
    for name, metric in metrics.items():
        assert metric.reason is None, name
        assert metric.ci_low <= metric.value <= metric.ci_high, name
        assert metric.num > 0
    text = json.dumps({name: metric.to_dict() for name, metric in metrics.items()}, allow_nan=False)
    assert set(json.loads(text)["loss"]) == {"value", "ci_low", "ci_high", "num", "reason"}


def test_row_order_does_not_matter_and_the_seed_decides(make_rewards):
    frame = make_rewards(decimals=1)
    shuffled = frame.sample(frac=1, random_state=1)
    first, second = (evaluate_pairs(rows, num_resamples=200, seed=5) for rows in (frame, shuffled))
    assert first.keys() == second.keys()
    for name in first:
        for field in ("value", "ci_low", "ci_high", "num"):
            assert getattr(second[name], field) == pytest.approx(getattr(first[name], field), abs=1e-9), (name, field)
    assert evaluate_pairs(frame, num_resamples=200, seed=6)["loss"].ci_low != first["loss"].ci_low


def test_all_tied_pairs_have_the_accuracy_of_a_guess(make_rewards):
    metrics = evaluate_pairs(make_rewards().assign(reward_chosen=1.5, reward_rejected=1.5), num_resamples=100)
    for name in ("pairwise_accuracy", "length_matched_accuracy", "pairwise_accuracy[easy]", "roc_auc"):
        assert metrics[name].value == 0.5, name
    assert (metrics["tie_rate"].value, metrics["ece_debiased"].value, metrics["temperature"].value) == (1.0, 0.0, None)


@pytest.mark.parametrize(
    ("right", "longer", "shown"),
    [(True, True, None), (False, False, False), (False, True, False), (True, "half", True)],
    ids=["as length has it", "against length", "length alone is right", "more than length"],
)
def test_what_is_alike_in_every_prompt_is_shown_as_far_as_their_number_goes(right, longer, shown):
    """40 prompts: a perfect model whose chosen sides are all longer is equal to length, and loses to nothing."""
    is_longer = np.resize([True, False], 80) if longer == "half" else np.full(80, longer)
    chars = {"chosen_chars": np.where(is_longer, 20, 10), "rejected_chars": np.where(is_longer, 10, 20)}
    frame = reward_table(np.full(80, 1.0 if right else -1.0), 0.0, np.arange(80) // 2, **chars)
    over = evaluate_pairs(frame, num_resamples=100)["accuracy_over_baseline"]
    assert over.ci_low < over.ci_high
    assert {None: over.ci_low < 0 < over.ci_high, True: over.ci_low > 0, False: over.ci_high < 0}[shown]


def test_a_subset_within_one_prompt_has_no_interval(make_rewards):
    frame = make_rewards(100, 20)
    frame["subset"] = np.where(frame.prompt_id == frame.prompt_id[0], "lonely", "rest")
    metrics = evaluate_pairs(frame, num_resamples=100)
    lonely = metrics["pairwise_accuracy[lonely]"]
    assert lonely.value is not None
    assert lonely.ci_low is None
    assert "one prompt" in lonely.reason
    assert metrics["pairwise_accuracy[rest]"].ci_low is not None
    for name, metric in evaluate_pairs(make_rewards(30, 1), num_resamples=100).items():  # all of one prompt
        assert (metric.ci_low, metric.ci_high) == (None, None), name
        assert metric.reason, name


def test_unusable_tables_and_rewards_are_refused(make_rewards):
    frame = make_rewards()
    for value in (np.nan, np.inf, -np.inf, None):
        broken = frame.copy()
        broken.loc[7, "reward_rejected"] = value
        with pytest.raises(DataError, match=r"pair-00007.*reward|reward_rejected.*pair-00007"):
            evaluate_pairs(broken)
    for table, said in ((frame.drop(columns="subset"), "subset"), (frame.iloc[:0], "no pairs"),
                        (frame.assign(prompt_id=None), "prompt_id"),
                        (frame.assign(reward_chosen="high"), "not numeric")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            evaluate_pairs(table)


def test_temperature_is_fitted_and_judged_on_different_prompts(make_rewards):
    frame = make_rewards(600, 80)
    half = fitting_half(frame.prompt_id)
    own = evaluate_pairs(frame, num_resamples=100)
    assert own["temperature"].num == half.sum()
    assert own["ece_tempered_debiased"].num == (~half).sum()
    # pairs that only judge cannot move the temperature
    changed = frame.assign(reward_chosen=frame.reward_chosen.where(half, frame.reward_chosen - 5))
    assert evaluate_pairs(changed, num_resamples=100)["temperature"] == own["temperature"]

    other = make_rewards(400, 60, seed=3).assign(prompt_id=lambda rows: "other-" + rows.prompt_id)
    given = evaluate_pairs(frame, calibration=other, num_resamples=100)
    assert given["temperature"].num == len(other)
    assert given["ece_tempered_debiased"].num == len(frame)
    leaking = pd.concat([other, frame.assign(reward_chosen=-9.0)])
    assert evaluate_pairs(frame, calibration=leaking, num_resamples=100)["temperature"] == given["temperature"]
    none_left = evaluate_pairs(frame, calibration=frame, num_resamples=100)["temperature"]
    assert none_left.value is None
    assert "calibration split" in none_left.reason


def test_tempering_removes_a_wrong_scale(make_rewards):
    rng = np.random.default_rng(2)
    size = np.abs(rng.normal(0, 1.5, 6000))
    margin = np.where(rng.random(6000) < 1 / (1 + np.exp(-size)), size, -size)
    frame = make_rewards(6000, 600).assign(reward_chosen=5 * margin, reward_rejected=0.0)
    metrics = evaluate_pairs(frame, num_resamples=200)
    assert metrics["temperature"].ci_low < 5 < metrics["temperature"].ci_high
    assert metrics["ece_debiased"].value > 0.15
    assert metrics["ece_tempered_debiased"].value < 0.02


def test_batch_metrics_agree_with_the_report_card(make_rewards):
    frame = make_rewards(300, 30, decimals=1)
    settings = {"num_bins": 7, "thresholds": (0.2, 0.9)}
    quick = batch_metrics(frame[["reward_chosen", "reward_rejected"]].to_numpy(), **settings)
    full = evaluate_pairs(frame, num_resamples=100, **settings)
    for name, value in quick.items():
        if name != "ece":  # the plug-in, which training alone uses
            assert value == pytest.approx(full[name].value, abs=1e-12), name
    assert {"roc_auc", "margin_p05", "margin_p50", "fpr@0.2", "fnr@0.9", "tpr@0.9"} <= quick.keys()
    assert not any(name.endswith("@0.5") for name in full)
    assert batch_metrics(np.zeros((3, 2)))["pairwise_accuracy"] == 0.5
    with pytest.raises(DataError, match=r"positions \[1\]"):
        batch_metrics(np.array([[0.5, 0.0], [0.0, np.nan]]))
    with pytest.raises(DataError, match="at least one"):
        batch_metrics(np.zeros((0, 2)))


def test_mistakes_are_the_most_negative_margins_first(make_rewards):
    frame = make_rewards(200, 20, decimals=1)
    mistakes = most_confident_mistakes(frame.sample(frac=1, random_state=3))
    margin = (frame.reward_chosen - frame.reward_rejected).sort_values()
    np.testing.assert_allclose(mistakes.margin, margin[margin < 0])
    pd.testing.assert_frame_equal(mistakes, most_confident_mistakes(frame))
    np.testing.assert_allclose(mistakes.confidence, 1 / (1 + np.exp(mistakes.margin)))
