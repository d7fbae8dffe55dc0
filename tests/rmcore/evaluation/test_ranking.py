"""Ranking metrics: definitions against brute force, and weights against explicit resampling."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from reward_table import reward_table
from rmcore.core.errors import DataError
from rmcore.evaluation.ranking import (
    OVER_BASELINE,
    PERCENTILES,
    SIDE_THRESHOLDS,
    MarginPercentiles,
    OverBaseline,
    PooledSides,
    PromptMean,
    Spread,
    mean_statistic,
    pair_means,
)
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import cluster_bootstrap


def statistics(frame: pd.DataFrame, weights: np.ndarray | None = None) -> dict[str, float]:
    table = RewardTable.from_frame(frame)
    rows = np.ones((1, table.num_prompts)) if weights is None else np.asarray(weights, float)[None, :]
    values = {mean.name: mean_statistic(mean, table.prompt, rows) for mean in pair_means(table)}
    for statistic in (
        OverBaseline(table),
        Spread(table),
        MarginPercentiles(table),
        PooledSides(table),
        PromptMean(table),
    ):
        values |= statistic(rows)
    return {name: float(value[0]) for name, value in values.items()}


def test_definitions_match_plain_pandas(make_rewards):
    frame = make_rewards(decimals=1)
    margin = frame.reward_chosen - frame.reward_rejected
    right = (np.sign(margin) + 1) / 2
    assert (margin == 0).sum() > 0
    sides = pd.concat([frame.reward_chosen, frame.reward_rejected])
    prompts = pd.concat([frame.prompt_id, frame.prompt_id])
    longer = frame[["chosen_chars", "rejected_chars"]].max(axis=1)
    matched = (frame.chosen_chars - frame.rejected_chars).abs() / longer < 0.15
    p = expit(margin)
    expected = {
        "pairwise_accuracy": right.mean(),
        "tie_rate": (margin == 0).mean(),
        "loss": -np.log(p).mean(),
        "mean_margin": margin.mean(),
        "margin_std": margin.std(ddof=0),
        "negative_margin_rate": (margin < 0).mean(),
        "brier": ((1 - p) ** 2).mean(),
        "length_matched_accuracy": right[matched].mean(),
        "longer_wins_accuracy": (np.sign(frame.chosen_chars - frame.rejected_chars).mean() + 1) / 2,
        "accuracy_over_baseline": (
            np.sign(margin).mean() - abs(np.sign(frame.chosen_chars - frame.rejected_chars).mean())
        )
        / 2,
        "accuracy_by_prompt": pd.Series(right).groupby(frame.prompt_id).mean().mean(),
        "pairwise_accuracy[easy]": right[frame.subset == "easy"].mean(),
        "pairwise_accuracy[hard]": right[frame.subset == "hard"].mean(),
        "pooled_reward_variance": sides.var(ddof=0),
        "within_prompt_reward_variance": sides.groupby(prompts).var(ddof=1).mean(),
    }
    for percent in PERCENTILES:
        expected[f"margin_p{percent:02d}"] = np.percentile(margin, percent)
    for threshold in SIDE_THRESHOLDS:
        good_chosen = expit(frame.reward_chosen - sides.mean()) >= threshold
        expected[f"tpr@{threshold}"] = good_chosen.mean()
        expected[f"fnr@{threshold}"] = 1 - good_chosen.mean()
        expected[f"fpr@{threshold}"] = (expit(frame.reward_rejected - sides.mean()) >= threshold).mean()
    probability = np.random.default_rng(1).random(len(frame))
    expected["expected_accuracy"] = (right * probability + (1 - right) * (1 - probability)).mean()
    actual = statistics(frame.assign(chosen_probability=probability))
    assert set(actual) == set(expected) | {"roc_auc"}
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=25))
@settings(max_examples=40)
def test_auc_is_the_quadratic_count_with_ties_half(pairs):
    chosen, rejected = np.array(pairs, dtype=float).T
    frame = reward_table(chosen, rejected, np.arange(len(pairs)) % 4)
    wins = (chosen[:, None] > rejected).sum() + (chosen[:, None] == rejected).sum() / 2
    assert statistics(frame)["roc_auc"] == pytest.approx(wins / len(pairs) ** 2)


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6).filter(any), st.integers(0, 50))
@settings(max_examples=30)
def test_weights_equal_explicit_copies_of_prompts(weights, seed):
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([np.arange(6), rng.integers(6, size=24)])
    rewards = rng.normal(0.3, 1, 30).round(2), rng.normal(0, 1, 30).round(2)
    chars = {"chosen_chars": rng.integers(50, 60, 30), "rejected_chars": rng.integers(50, 65, 30)}
    frame = reward_table(*rewards, prompt, **chars, subset=["a", "b", None] * 10)
    copies = [
        frame[prompt == index].assign(prompt_id=f"prompt-{index}-{copy}")
        for index, weight in enumerate(weights)
        for copy in range(weight)
    ]
    explicit = statistics(pd.concat(copies))
    weighted = statistics(frame, np.array(weights))
    for name, value in explicit.items():
        assert weighted[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name
    for name in set(weighted) - set(explicit):  # a subset that was not drawn at all
        assert np.isnan(weighted[name])


@pytest.mark.parametrize(("shorter", "counts"), [(85, False), (86, True)])
def test_length_matched_is_strictly_below_fifteen_percent_of_the_longer(make_rewards, shorter, counts):
    frame = make_rewards(3, 3).assign(chosen_chars=[100, shorter, 100], rejected_chars=[shorter, 100, 300])
    assert RewardTable.from_frame(frame).length_matched.tolist() == [counts, counts, False]


def test_moments_survive_a_large_common_offset(make_rewards):
    frame = make_rewards()
    far = frame.assign(reward_chosen=frame.reward_chosen + 1e6, reward_rejected=frame.reward_rejected + 1e6)
    before, after = statistics(frame), statistics(far)
    for name in ("pooled_reward_variance", "within_prompt_reward_variance", "margin_std"):
        assert after[name] == pytest.approx(before[name], rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("chosen_longer", [0.3, 0.5])
def test_a_model_of_length_alone_is_seldom_shown_to_know_more(chosen_longer):
    """It is the baseline, or, where that has turned by chance, worse: any claim is an error."""
    rng = np.random.default_rng(2)
    claimed, repeats, num = 0, 200, 150
    for _ in range(repeats):
        longer = rng.random(num) < chosen_longer
        likes = longer if chosen_longer >= 0.5 else ~longer
        chars = {"chosen_chars": np.where(longer, 20, 10), "rejected_chars": np.where(longer, 10, 20)}
        frame = reward_table(np.where(likes, 1.0, -1.0), np.zeros(num), np.arange(num) // 3, **chars)
        drawn = cluster_bootstrap(OverBaseline(RewardTable.from_frame(frame)), num // 3, num_resamples=200, seed=0)
        found = drawn.value(OVER_BASELINE, num_prompts=num // 3, num_pairs=num, is_difference=True)
        claimed += found.ci_low > 0
    assert claimed / repeats <= 0.05  # nominal 2.5 %, 200 repeats


def test_a_chance_that_is_none_is_refused_and_an_unknown_one_gives_no_metric(make_rewards):
    frame = make_rewards(decimals=1)
    with pytest.raises(DataError, match=r"chosen_probability of -0\.5 to 1"):
        RewardTable.from_frame(frame.assign(chosen_probability=np.resize([-0.5, 1.0], len(frame))))
    for unknown in (frame, frame.assign(chosen_probability=np.resize([None, 0.5], len(frame)))):
        assert "expected_accuracy" not in statistics(unknown)
