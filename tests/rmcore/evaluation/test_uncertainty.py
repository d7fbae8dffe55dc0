"""Intervals cover what they promise, tests reject as often as they may, resampling is what it says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation import uncertainty
from rmcore.evaluation.uncertainty import (
    FEWEST_FOR_GAIN,
    RARE_DISASTERS,
    GainValue,
    cluster_bootstrap,
    ends,
    interval_p,
    metric_value,
    percentile_interval,
    sign_flip_test,
    unseen_share,
    with_unseen_prompts,
)


def mean_interval(values, prompt, num_prompts, seed):
    sums = np.bincount(prompt, values, minlength=num_prompts)
    counts = np.bincount(prompt, minlength=num_prompts).astype(float)
    resampled = cluster_bootstrap(
        lambda w: {"mean": (w @ sums) / (w @ counts)}, num_prompts, num_resamples=400, seed=seed
    )
    return percentile_interval(resampled.replicates["mean"], num_prompts)


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [12, 60])
def test_cluster_intervals_cover_and_pair_intervals_do_not(num_prompts):
    rng = np.random.default_rng(num_prompts)
    trials, clustered, naive = 400, 0, 0
    truth = stats.norm(0.7, 0.2).expect(lambda rate: np.clip(rate, 0.05, 0.95))
    for trial in range(trials):
        sizes = rng.integers(5, 16, size=num_prompts)
        prompt = np.repeat(np.arange(num_prompts), sizes)
        rate = np.clip(rng.normal(0.7, 0.2, num_prompts), 0.05, 0.95)
        right = (rng.random(len(prompt)) < rate[prompt]).astype(float)
        low, high = mean_interval(right, prompt, num_prompts, trial)
        clustered += low <= truth <= high
        low, high = mean_interval(right, np.arange(len(right)), len(right), trial)
        naive += low <= truth <= high
    # 400 trials: three standard errors of a 95 % coverage are 3.3 points
    assert 0.915 <= clustered / trials <= 0.985
    assert naive / trials < 0.85


def test_resamples_are_multinomial_counts_of_prompts():
    resampled = cluster_bootstrap(
        lambda w: {"total": w.sum(axis=1), "first": w[:, 0], "integer": (w == np.floor(w)).all(axis=1).astype(float)},
        8,
        num_resamples=4000,
        seed=1,
    )
    assert (resampled.replicates["total"] == 8).all()
    assert (resampled.replicates["integer"] == 1).all()
    expected = stats.binom.pmf(np.arange(5), 8, 1 / 8) * 4000
    seen = np.bincount(resampled.replicates["first"].astype(int), minlength=9)
    observed = np.append(seen[:4], seen[4:].sum())
    assert stats.chisquare(observed, np.append(expected[:4], 4000 - expected[:4].sum())).pvalue > 0.001


def test_chunking_changes_nothing(monkeypatch):
    def run():
        return cluster_bootstrap(lambda w: {"x": w @ np.arange(9.0)}, 9, num_resamples=101, seed=3).replicates["x"]

    whole = run()
    monkeypatch.setattr(uncertainty, "_CHUNK_ELEMENTS", 63)
    np.testing.assert_array_equal(run(), whole)


def test_one_prompt_has_no_interval_and_says_so_and_nothing_to_resample_is_refused():
    resampled = cluster_bootstrap(lambda w: {"x": w.sum(axis=1)}, 1, num_resamples=10, seed=0)
    assert resampled.replicates == {}
    metric = metric_value(resampled.point["x"], None, num_prompts=1, num_pairs=4)
    assert (metric.value, metric.ci_low, metric.ci_high, metric.num) == (1.0, None, None, 4)
    assert "one prompt" in metric.reason
    for none in ((None, 5), (np.array([np.nan, np.nan]), 5), (np.ones(9), 1)):
        assert interval_p(*none) is None
    with pytest.raises(ConfigError, match="num_resamples=0"):
        cluster_bootstrap(lambda w: {}, 3, num_resamples=0, seed=0)


@pytest.mark.parametrize("num_prompts", [8, 500])
@pytest.mark.parametrize("shift", [-2.0, 0.0, 1.5])
def test_the_p_value_is_the_level_at_which_the_interval_begins_to_contain_zero(num_prompts, shift):
    replicates = np.random.default_rng(0).normal(shift, 1, size=4000)
    p = interval_p(replicates, num_prompts)
    for level, contains in ((1 - 0.8 * p, True), (1 - 1.25 * p, False)):
        if level > 0:
            low, high = percentile_interval(replicates, num_prompts, level)
            assert (low <= 0 <= high) == contains, level
    assert interval_p(-replicates, num_prompts) == pytest.approx(p)


def test_intervals_are_wider_than_percentiles_for_few_prompts_and_equal_for_many():
    replicates = np.random.default_rng(0).normal(size=200_000)
    for num_prompts, factor in ((5, 2.776 / 1.96 * np.sqrt(5 / 4)), (100_000, 1.0)):
        low, high = percentile_interval(replicates, num_prompts)
        assert (high - low) / (2 * 1.96) == pytest.approx(factor, rel=0.03)


def test_undefined_replicates_are_left_out_and_infinite_ends_are_not_given():
    many = np.concatenate([np.linspace(0, 1, 100), [np.nan] * 50])
    low, high = percentile_interval(many, 1000)
    assert 0 <= low < 0.05
    assert 0.95 < high <= 1
    assert percentile_interval(np.full(5, np.nan), 10) is None
    assert percentile_interval(np.array([1.0] * 50 + [np.inf] * 50), 10) is None


def prompts_means(kind, rng, num_prompts):
    """Each prompt's mean, (C,), and what they are on average in truth."""
    if kind == "even":
        return rng.normal(0.5, 0.1, num_prompts), 0.5
    if kind == "sure":  # nearly all or nothing
        return rng.beta(0.5, 0.1, num_prompts), 5 / 6
    return np.where(rng.random(num_prompts) < 0.1, 0.0, rng.uniform(0.9, 1, num_prompts)), 0.9 * 0.95  # rare and bad


@pytest.mark.parametrize("num_prompts", [2, 5])
@pytest.mark.parametrize("kind", ["even", "sure", "rare"])
@pytest.mark.parametrize("is_share", [True, False])
def test_few_prompts_know_little(kind, num_prompts, is_share):
    """No resample is outside the range of the prompts, which holds the truth in 1 - 2^(1 - C) at best: 1/2 of two."""
    rng, covered, repeats = np.random.default_rng(0), 0, 400
    for seed in range(repeats):
        means, truth = prompts_means(kind, rng, num_prompts)
        found = cluster_bootstrap(
            lambda w, means=means: {"mean": w @ means / num_prompts}, num_prompts, num_resamples=200, seed=seed
        )
        counts = {"num_prompts": num_prompts, "num_pairs": 20 * num_prompts}
        metric = metric_value(float(means.mean()), found.replicates["mean"], **counts, is_share=is_share)
        assert not is_share or 0 <= metric.ci_low <= metric.value <= metric.ci_high <= 1
        covered += metric.ci_low <= truth <= metric.ci_high
    if is_share or kind == "even":  # without bounds on them, values of one kind in ten cannot be known of
        assert covered / repeats >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / repeats)


@pytest.mark.parametrize("num_prompts", [3, 137])
def test_a_share_of_zero_or_one_gets_the_exact_binomial_bound(num_prompts):
    exact = stats.binomtest(0, num_prompts).proportion_ci(method="exact")
    assert with_unseen_prompts(0.0, num_prompts) == pytest.approx((exact.low, exact.high))
    low, high = with_unseen_prompts(1.0, num_prompts)
    assert (1 - high, 1 - low) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize(("common", "other", "lowest"), [(0.5, 0.0, 0.0), (0.0, -1.0, -1.0), (1.0, -1.0, -1.0)])
def test_what_all_prompts_have_in_common_is_held_against_prompts_that_are_otherwise(common, other, lowest):
    """The rare prompts are as far from the common value as there can be, and as seldom as 20 prompts may miss them."""
    rng = np.random.default_rng(0)
    repeats = 2000
    low, high = with_unseen_prompts(common, 20, lowest)
    for rare in (0.02, 0.1, 0.16):
        truth = (1 - rare) * common + rare * other
        were_seen = (rng.random((repeats, 20)) < rare).any(axis=1)  # resamples differ then: not this interval's case
        covered = were_seen.sum() + (low <= truth <= high) * (~were_seen).sum()
        assert covered / repeats >= 0.95, rare


def test_shares_whose_resamples_are_all_alike_have_no_interval_of_width_zero():
    alike = np.full(50, 0.3)
    for what in ({"is_share": True}, {"is_difference": True}):
        found = metric_value(0.3, alike, num_prompts=8, num_pairs=9, **what)
        assert found.ci_low < 0.3 < found.ci_high, what
    gain = metric_value(0.0, 0 * alike, num_prompts=8, num_pairs=9)
    assert (gain.ci_low, gain.ci_high) == (0.0, 0.0)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
@settings(max_examples=40)
def test_sign_flip_is_the_enumeration(differences):
    # tenths are not exact in binary: sums that are equal on paper must be counted as equal
    values = np.array(differences) / 10
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = np.mean([total >= abs(sum(differences)) for total in sums])
    assert sign_flip_test(values) == pytest.approx(expected)
    assert sign_flip_test(-values) == pytest.approx(expected)


def test_sign_flip_monte_carlo_agrees_with_the_exact_distribution():
    differences = np.random.default_rng(4).integers(-3, 4, size=40)
    distribution = {0: 1.0}
    for size in np.abs(differences):
        step: dict[int, float] = {}
        for total, chance in distribution.items():
            for end in (total + int(size), total - int(size)):
                step[end] = step.get(end, 0.0) + chance / 2
        distribution = step
    exact = sum(chance for total, chance in distribution.items() if abs(total) >= abs(differences.sum()))
    assert 0.001 < exact < 0.2
    p = sign_flip_test(differences, num_permutations=20_000)
    assert p == pytest.approx(exact, abs=4 * np.sqrt(exact / 20_000))
    assert sign_flip_test(np.ones(60), num_permutations=999) == 1 / 1000
    with pytest.raises(DataError, match="1 not finite"):
        sign_flip_test([1.0, np.nan])


def test_a_gain_has_an_interval_where_its_prompts_show_rare_disasters():
    """Of 149 prompts 95 % of the evaluations see a disaster that 2 % of all prompts are; of 148 fewer do."""
    assert unseen_share(FEWEST_FOR_GAIN) <= RARE_DISASTERS < unseen_share(FEWEST_FOR_GAIN - 1)
    few, enough = (GainValue.of(0.5, 0.4, 0.7, num=9, num_prompts=FEWEST_FOR_GAIN - one).to_dict() for one in (1, 0))
    assert (few["ci_low"], few["ci_high"]) == (None, None)
    assert (few["low_if_no_disaster"], few["high_if_no_disaster"]) == ends(few) == (0.4, 0.7)
    assert "2 % of all prompts may be disasters" in few["reason"]
    assert (enough["ci_low"], enough["ci_high"]) == ends(enough) == (0.4, 0.7)
    assert GainValue.of(0.5, -0.4, 0.7, num=9, num_prompts=50).at_most(0.0).ends == (-0.4, 0.0)
