"""Calibration: formulas against loops, bias against simulated truth, temperature against known scale."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit
from scipy.stats import norm

from rmcore.evaluation.calibration import (
    FOLD_TAU,
    BinnedCalibration,
    TemperatureStatistic,
    bin_of,
    expected_calibration_error,
    fit_temperature,
    fitting_half,
    reliability_bins,
)


def simulate(rng, num_pairs):
    """Margins of a calibrated model."""
    size = np.abs(rng.normal(0, 1.5, num_pairs))
    return np.where(rng.random(num_pairs) < expit(size), size, -size)


def debiased(margin):
    every = np.arange(len(margin))
    return float(BinnedCalibration(margin, every, len(margin), 10)(np.ones((1, len(margin))))["ece_debiased"][0])


def brute_force(margin, prompt, weights, num_bins):
    """Both errors by loops over bins and prompts, as in the docstring."""
    plain = corrected = total = 0.0
    p = expit(margin)
    confidence = np.maximum(p, 1 - p)
    correct = np.where(margin > 0, 1.0, np.where(margin < 0, 0.0, 0.5))
    pair_weight = weights[prompt]
    for index in range(num_bins):
        low, high = 0.5 + 0.5 * index / num_bins, 0.5 + 0.5 * (index + 1) / num_bins
        inside = (confidence >= low) & ((confidence < high) | (index == num_bins - 1))
        count = pair_weight[inside].sum()
        if count == 0:
            continue
        residual = correct - confidence
        gap = (pair_weight * residual)[inside].sum() / count
        drawn = [c for c in range(len(weights)) if weights[c] > 0 and (inside & (prompt == c)).any()]
        spread = sum((weights[c] * (residual - gap)[inside & (prompt == c)].sum()) ** 2 for c in drawn)
        spread *= len(drawn) / (len(drawn) - 1) if len(drawn) > 1 else 0
        binomial = (pair_weight**2 * confidence * (1 - confidence))[inside].sum()
        error = np.sqrt(max(spread, binomial)) / count
        z = gap / (FOLD_TAU * error)
        plain += count * abs(gap)
        corrected += count * (gap * (2 * norm.cdf(z) - 1) - 2 * error / FOLD_TAU * norm.pdf(z))
        total += count
    return plain / total, corrected / total


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(2, 12))
@settings(max_examples=40)
def test_errors_equal_the_loops_for_any_weights(seed, num_bins, num_prompts):
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([np.arange(num_prompts), rng.integers(num_prompts, size=40)])
    margin = rng.normal(0.5, 1.5, len(prompt)).round(1)
    weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts)).astype(float)
    got = BinnedCalibration(margin, prompt, num_prompts, num_bins)(weights[None, :])
    plain, corrected = brute_force(margin, prompt, weights, num_bins)
    assert got["ece_debiased"][0] == pytest.approx(corrected, abs=1e-10)
    if (weights == 1).all():
        assert expected_calibration_error(margin, num_bins) == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize(("num_pairs", "repeats"), [(200, 400), (5000, 60)])
def test_debiasing_gives_zero_for_a_calibrated_model_where_the_plug_in_does_not(num_pairs, repeats):
    rng = np.random.default_rng(num_pairs)
    samples = [simulate(rng, num_pairs) for _ in range(repeats)]
    plain = np.mean([expected_calibration_error(margin) for margin in samples])
    corrected = np.array([debiased(margin) for margin in samples])
    assert plain > 0.8 / np.sqrt(num_pairs)
    # the guard against too small errors costs a little: at most a tenth of the bias that was removed
    assert abs(corrected.mean()) < 0.1 * plain + 3 * corrected.std() / np.sqrt(repeats)


def test_debiasing_accounts_for_pairs_that_are_right_together():
    # All pairs of a prompt share one outcome draw: 40 independent outcomes, not 400.
    rng = np.random.default_rng(3)
    clustered, independent = [], []
    for _ in range(300):
        size = np.repeat(np.abs(rng.normal(0, 1.5, 40)), 10)
        right = np.repeat(rng.random(40), 10) < expit(size)
        margin = np.where(right, size, -size)
        prompt = np.repeat(np.arange(40), 10)
        clustered.append(BinnedCalibration(margin, prompt, 40, 10)(np.ones((1, 40)))["ece_debiased"][0])
        independent.append(debiased(margin))
    assert abs(np.mean(clustered)) < 0.02
    assert np.mean(independent) > 0.08


SHAPES = {
    "50 pairs": (50, 1, 0.0),
    "5000 pairs": (5000, 1, 0.0),
    "several a prompt": (60, 6, 0.5),
    "one answer a prompt": (50, 8, 1.0),
}
"""Prompts, pairs of each, and how much the pairs of a prompt are right or wrong together."""
WORLDS = {"usual": (0.0, 1.5), "unsure": (0.0, 0.3), "sure": (4.0, 1.0)}
"""Centre and spread of the stated log-odds."""


def clustered(rng, world, shape, slope):
    """Margins, prompts: right or wrong by a normal that pairs of one prompt share in part; slope 1 is calibrated."""
    num_prompts, pairs, together = shape
    centre, spread = world
    size = np.abs(rng.normal(centre, spread, (num_prompts, pairs)))
    luck = np.sqrt(together) * rng.normal(size=(num_prompts, 1)) + np.sqrt(1 - together) * rng.normal(size=size.shape)
    if together == 1:
        size = np.repeat(size[:, :1], pairs, axis=1)  # one and the same answer, counted several times
    right = norm.cdf(luck) < expit(slope * size)
    return np.where(right, size, -size).ravel(), np.repeat(np.arange(num_prompts), pairs)


def binned_truth(world, slope):
    """What the interval is of: sum over bins of P(bin) x |E[correct - confidence | bin]|, from a fine grid."""
    size = np.abs(world[0] + world[1] * norm.ppf((np.arange(200_000) + 0.5) / 200_000))
    confidence = expit(size)
    return float(np.abs(np.bincount(bin_of(confidence, 10), expit(slope * size) - confidence)).sum() / len(size))


@pytest.mark.slow
@pytest.mark.parametrize("slope", [1.0, 0.8], ids=["calibrated", "mildly off"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_interval_holds_the_true_error(shape, slope):
    repeats = 60 if shape[0] == 5000 else 150
    hits = []
    for world in WORLDS.values():
        truth = binned_truth(world, slope)
        rng = np.random.default_rng([shape[0], int(100 * slope)])
        for _ in range(repeats):
            margin, prompt = clustered(rng, world, shape, slope)
            low, high = BinnedCalibration(margin, prompt, shape[0], 10).interval()
            hits.append(low <= truth + 1e-12 and truth <= high)
    # at most three standard errors below what is promised
    assert np.mean(hits) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(hits))


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.3, 1.0, 2.5])
def test_value_and_interval_close_in_on_the_true_error(slope):
    truth, rng = binned_truth(WORLDS["usual"], slope), np.random.default_rng(2)
    margin, prompt = clustered(rng, WORLDS["usual"], (200_000, 1, 0.0), slope)
    found = BinnedCalibration(margin, prompt, 200_000, 10)
    low, high = found.interval()
    assert high - low < 0.012
    assert low <= truth <= high
    assert low <= found.value().value <= high


def test_no_mistake_yet_is_no_proof_of_calibration():
    """All of 50 pairs right at a confidence of 0.9998: up to 7 % may be wrong all the same (Clopper and Pearson)."""
    low, high = BinnedCalibration(np.full(50, 8.5), np.arange(50), 50, 10).interval()
    assert low == 0
    assert 0.03 < high < 0.15


def test_one_prompt_has_no_interval_two_one_of_what_an_error_can_be_and_certain_ties_an_honest_one():
    assert BinnedCalibration(np.ones(5), np.zeros(5, dtype=int), 1, 10).interval() is None
    for margin in ([5.0, 5.0], [1e9, -1e9], [1.0, -1.0, 1.0, 1.0]):
        prompt = np.arange(len(margin)) // (len(margin) // 2)
        low, high = BinnedCalibration(np.array(margin), prompt, 2, 10).interval()
        assert 0 <= low < high <= 1
    low, high = BinnedCalibration(np.zeros(50), np.arange(50), 50, 10).interval()
    assert low == 0 < high < 0.3


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_temperature_recovers_the_scale_and_keeps_every_sign(scale):
    margin = simulate(np.random.default_rng(5), 20_000) * scale
    temperature, reason = fit_temperature(margin)
    assert reason is None
    assert temperature == pytest.approx(scale, rel=0.05)
    best = minimize_scalar(
        lambda t: np.logaddexp(0, -margin / t).mean(), bounds=(scale / 5, scale * 5), method="bounded"
    )
    assert temperature == pytest.approx(best.x, rel=1e-4)
    assert np.array_equal(np.sign(margin / temperature), np.sign(margin))


@pytest.mark.parametrize(
    ("margin", "word"), [([1.0, 2.0, 0.0], "goes to 0"), ([1.0, -2.0], "not positive"), ([0.0, 0.0], "tied")]
)
def test_temperature_without_a_minimum_says_why(margin, word):
    temperature, reason = fit_temperature(np.array(margin))
    assert temperature is None
    assert word in reason


def test_resampled_temperatures_equal_refits():
    rng = np.random.default_rng(11)
    margin, prompt = simulate(rng, 300) * 2, rng.integers(30, size=300)
    temperature, _ = fit_temperature(margin)
    weights = rng.multinomial(30, np.full(30, 1 / 30), size=20).astype(float)
    fast = TemperatureStatistic(margin, prompt, 30, temperature)(weights)["temperature"]
    slow = [fit_temperature(np.repeat(margin, row[prompt].astype(int)))[0] for row in weights]
    np.testing.assert_allclose(fast, slow, rtol=5e-4)
    statistic = TemperatureStatistic(np.array([1.0, 2.0, -1.0]), np.array([0, 1, 2]), 3, 1.5)  # some have no minimum
    np.testing.assert_array_equal(statistic(np.array([[1.0, 1, 0], [0, 0, 3]]))["temperature"], [0.0, np.inf])


def test_reliability_bins_add_up_to_the_ece(make_rewards):
    frame = make_rewards(500, 40, decimals=1)
    bins = reliability_bins(frame, 8)
    margin = (frame.reward_chosen - frame.reward_rejected).to_numpy()
    total = ((bins.accuracy - bins.mean_confidence).abs() * bins["count"]).sum() / len(frame)
    assert total == pytest.approx(expected_calibration_error(margin, 8))
    assert bins["count"].sum() == len(frame)
    assert (bins.mean_confidence.between(bins.bin_low, bins.bin_high)).all()
    assert (bins.accuracy_low <= bins.accuracy).all()
    assert (bins.accuracy <= bins.accuracy_high).all()
    one_prompt_each = reliability_bins(frame.assign(prompt_id=frame.pair_id), 8)
    wide = reliability_bins(frame.assign(prompt_id=np.arange(len(frame)) % 5), 8)
    assert (wide.accuracy == one_prompt_each.accuracy).all()
    all_right = frame.assign(reward_chosen=3.0, reward_rejected=0.0)
    few = reliability_bins(all_right.assign(prompt_id=np.arange(len(frame)) % 5), 8).accuracy_low[0]
    assert few < reliability_bins(all_right.assign(prompt_id=frame.pair_id), 8).accuracy_low[0]


def test_the_fitting_half_is_by_prompt_and_independent_of_order(make_rewards):
    prompt_ids = make_rewards(2000, 400).prompt_id
    half = fitting_half(prompt_ids)
    assert 0.4 < half.mean() < 0.6
    assert not set(prompt_ids[half]) & set(prompt_ids[~half])
    backwards = fitting_half(prompt_ids[::-1].reset_index(drop=True))
    assert np.array_equal(backwards[::-1], half)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_prompts"), [(1.0, 100), (1.0, 20), (0.6, 20)])
def test_the_error_of_events_covers_the_truth_where_it_is_0_too(factor, num_prompts):
    """Two events a prompt, which happen together half of the time; a resampled plug-in has 0 outside in every case."""
    rng = np.random.default_rng(7)
    prompt, covered, of_zero, repeats = np.arange(2 * num_prompts) // 2, 0, 0, 200
    for _ in range(repeats):
        chance = np.repeat(rng.uniform(0.05, 0.4, num_prompts), 2)
        luck = rng.random((num_prompts, 2))
        luck[:, 1] = np.where(rng.random(num_prompts) < 0.5, luck[:, 0], luck[:, 1])
        found = BinnedCalibration.of_events(factor * chance, luck.ravel() < chance, prompt, num_prompts, 10).value()
        # Events are likelier than said in every bin, so the error is the mean gap, whatever the bins.
        covered += found.ci_low <= (1 - factor) * chance.mean() <= found.ci_high
        of_zero += found.ci_low == 0
        assert found.value >= 0  # an estimate below zero says that no error was found
    assert covered / repeats >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / repeats)
    assert factor < 1 or of_zero / repeats >= 0.95
