"""Estimates over seeds are what they say, p values invert their intervals, verdicts follow from both."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rmcore.evaluation.uncertainty import percentile_interval, t_interval
from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds, shared_variances
from rmcore.evaluation.verdicts.judgement import Claim, holm, judge

NUM_PROMPTS = 50


def samples_of(num_seeds, *, with_prompts=True, seed_sd=0.03, prompt_sd=0.02, seed=0):
    """Values around 0.05; all seeds share the prompt part of their replicates, as with common prompt weights."""
    rng = np.random.default_rng(seed)
    values = 0.05 + seed_sd * rng.normal(size=num_seeds)
    common = prompt_sd * rng.normal(size=400)
    own = prompt_sd / 4 * rng.normal(size=(num_seeds, 400))
    return [
        SeedSample(float(value), value + common + row if with_prompts else None)
        for value, row in zip(values, own, strict=True)
    ]


def estimated(samples, *, shared=True, num_prompts=NUM_PROMPTS, **options):
    return estimate_over_seeds(samples, num_prompts=num_prompts, prompts_shared=shared, **options)


def values_only(values):
    return estimated([SeedSample(value, None) for value in values], num_prompts=None)


KINDS = {
    "one seed": (1, True, True),
    "t": (3, False, True),
    "own prompts": (4, True, False),
    "shared": (10, True, True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request):
    num_seeds, with_prompts, shared = request.param
    return samples_of(num_seeds, with_prompts=with_prompts), shared


def test_p_is_below_alpha_exactly_where_the_interval_excludes_the_threshold(kind):
    estimate = estimated(kind[0], shared=kind[1])
    decisions = set()
    for threshold, alpha in itertools.product(np.linspace(-0.3, 0.4, 29), (0.3, 0.05, 0.02, 0.01, 0.003, 1e-5)):
        low, high = estimate.spread.bounds(alpha)
        excluded = not low <= threshold <= high
        assert (estimate.p_value(threshold) < alpha) == excluded
        decisions.add(excluded)
    assert decisions == {True, False}
    assert estimate.spread.bounds(0.05) == (estimate.ci_low, estimate.ci_high)


def test_smaller_alpha_gives_wider_intervals_and_farther_thresholds_smaller_p(kind):
    estimate = estimated(kind[0], shared=kind[1])
    bounds = [estimate.spread.bounds(alpha) for alpha in np.geomspace(0.5, 1e-6, 40)]
    assert all(b[0] <= a[0] <= estimate.value <= a[1] <= b[1] for a, b in itertools.pairwise(bounds))
    p = [estimate.p_value(estimate.value + distance) for distance in np.linspace(0.01, 0.5, 40)]
    assert all(near >= far for near, far in itertools.pairwise(p))
    assert p[-1] < 0.05


def test_without_prompts_it_is_the_textbook_t_interval():
    values = [0.61, 0.66, 0.64, 0.7]
    estimate, alone = values_only(values), t_interval(values)
    textbook = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    for found in (estimate, alone):
        assert (found.value, found.ci_low, found.ci_high) == pytest.approx((np.mean(values), *textbook))
    for threshold in (0.65, 0.6, 0.0):
        assert estimate.p_value(threshold) == pytest.approx(stats.ttest_1samp(values, threshold).pvalue)
    own_prompts = [SeedSample(value, np.linspace(0, 1, 9)) for value in values]
    assert estimated(own_prompts, shared=False).spread.bounds(0.05) == pytest.approx(estimate.spread.bounds(0.05))
    assert (t_interval([0.5]).ci_low, bool(t_interval([0.5]).reason)) == (None, True)


@pytest.mark.parametrize("num_seeds", [2, 8])
def test_shared_prompts_add_what_seeds_do_not_have_already(num_seeds):
    """Half-widths combine in squares, and the noise of seed and prompt together, in both spreads, counts once."""
    samples = samples_of(num_seeds)
    low, high = estimated(samples).spread.bounds(0.1)
    of_seeds = np.var([sample.value for sample in samples], ddof=1) / num_seeds
    crossed = np.array([sample.replicates for sample in samples]) * np.sqrt(NUM_PROMPTS / (NUM_PROMPTS - 1))
    of_mean, of_one = crossed.mean(axis=0).var(ddof=1), crossed.var(axis=1, ddof=1).mean()
    together = (of_one - of_mean) / (num_seeds - 1)
    half = np.sqrt(
        stats.t.ppf(0.95, num_seeds - 1) ** 2 * of_seeds
        + stats.t.ppf(0.95, NUM_PROMPTS - 1) ** 2 * (of_mean - together)
    )
    assert (high - low) / 2 == pytest.approx(half)


def test_the_parts_of_a_crossed_variance_are_those_it_was_made_of():
    """S seeds on C prompts with known variances: estimates by replicates against the truth, over many experiments."""
    rng, found = np.random.default_rng(3), []
    num_seeds, num_prompts, of_prompt, of_both = 4, 60, 0.5, 2.0
    for _ in range(200):
        both = np.sqrt(of_both) * rng.normal(size=(num_seeds, num_prompts))
        answers = np.sqrt(of_prompt) * rng.normal(size=num_prompts) + both
        weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=300)
        found.append(shared_variances(answers @ weights.T / num_prompts, num_prompts))
    expected = (of_prompt + of_both / num_seeds) / num_prompts, of_both / num_seeds / num_prompts
    assert np.mean(found, axis=0) == pytest.approx(expected, rel=0.03)  # one standard error is 1.3 %


def test_one_seed_has_the_interval_over_prompts_and_says_what_is_missing():
    (sample,) = samples_of(1)
    estimate = estimated([sample])
    assert estimate.spread.bounds(0.05) == percentile_interval(sample.replicates, NUM_PROMPTS)
    assert "spread over seeds is not in it" in estimate.method


NO_INTERVALS = {
    "one seed": ([SeedSample(0.5, None)], None, "one seed"),
    "one prompt": ([SeedSample(x, np.full(9, x)) for x in (0.5, 0.6)], 1, "one prompt"),
    # That none of three trainings stopped early does not show that none ever does.
    "constant": ([SeedSample(0.1, None)] * 3, None, "one and the same"),
    "constant, with prompts": ([SeedSample(1.0, np.ones(9))] * 9, 20, "one and the same"),
    "undefined": ([SeedSample(x, np.full(9, np.nan)) for x in (0.5, 0.6)], 20, "too few prompts"),
    "unbounded": ([SeedSample(x, np.array([0.5, 0.6, np.inf])) for x in (0.5, 0.6)], 20, "too few prompts"),
    "unbounded, one seed": ([SeedSample(0.5, np.array([0.5, 0.6, np.inf]))], 20, "too few prompts"),
}


@pytest.mark.parametrize(("samples", "num_prompts", "reason"), NO_INTERVALS.values(), ids=NO_INTERVALS.keys())
def test_where_the_spread_is_unknown_there_is_no_interval_but_a_reason(samples, num_prompts, reason):
    estimate = estimated(samples, num_prompts=num_prompts)
    assert estimate.value == pytest.approx(np.mean([sample.value for sample in samples]))
    assert estimate.spread is estimate.ci_low is estimate.ci_high is None
    assert estimate.p_value() is estimate.smallest_detectable(0.05) is None
    assert reason in estimate.reason


def test_a_few_infinite_resamples_leave_an_interval_whose_tails_are_not_guessed():
    replicates = np.append(np.linspace(0.4, 0.6, 1999), np.inf)
    estimate = estimated([SeedSample(0.5, replicates)])
    assert estimate.ci_high < 0.6
    assert estimate.spread.bounds(1e-9) is None
    assert 1e-4 < estimate.p_value(0.0) < 0.01
    assert estimate.smallest_detectable(0.05) is None


@pytest.mark.parametrize(("num_seeds", "alpha"), [(2, 0.05), (3, 0.01), (7, 0.05)])
def test_the_smallest_effect_of_one_component_is_that_of_the_non_central_t(num_seeds, alpha):
    values = np.random.default_rng(1).normal(size=num_seeds)
    effect = values_only(values).smallest_detectable(alpha) / stats.sem(values)
    power = stats.nct.sf(stats.t.isf(alpha / 2, num_seeds - 1), num_seeds - 1, effect)
    assert power == pytest.approx(0.8, abs=0.003)


@pytest.mark.slow
def test_the_smallest_effect_is_seen_in_four_experiments_of_five():
    num_seeds, prompt_sd, rng = 3, 0.8, np.random.default_rng(3)
    noise = rng.normal(size=400)
    noise = prompt_sd * (noise - noise.mean()) / noise.std()

    def experiment(values):
        return estimated([SeedSample(float(value), value + noise) for value in values], num_prompts=1000)

    typical = stats.norm.ppf((np.arange(num_seeds) + 0.5) / num_seeds)
    effect = experiment(typical / typical.std(ddof=1)).smallest_detectable(0.05)
    seen, trials = 0, 4000
    for _ in range(trials):
        values = effect + rng.normal(size=num_seeds) + prompt_sd * rng.normal()
        seen += experiment(values).ci_low > 0
    assert seen / trials == pytest.approx(0.8, abs=0.02)  # 0.006 is one standard error


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5), st.randoms())
@settings(max_examples=60)
def test_holm_is_its_sequential_procedure(p_values, alpha, random):
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    adjusted = holm(p_values)
    rejected: list[int] = []
    for step, index in enumerate(np.argsort(p_values, kind="stable")):
        if (len(p_values) - step) * p_values[index] >= alpha:
            break
        rejected.append(int(index))
    assert {i for i, p in enumerate(adjusted) if p < alpha} == set(rejected)
    assert all(p <= a <= min(1.0, len(p_values) * p) for p, a in zip(p_values, adjusted, strict=True))
    order = random.sample(range(len(p_values)), len(p_values))
    assert holm([p_values[i] for i in order]) == [adjusted[i] for i in order]


def around(centre):
    """Three seeds with standard error 0.01: the 95 % interval is centre -/+ 0.043."""
    return values_only([centre - 0.01 * 3**0.5, centre, centre + 0.01 * 3**0.5])


@pytest.mark.parametrize(
    ("centre", "direction", "verdict", "said"),
    [
        (0.1, "above", "supported", "lies above the threshold"),
        (0.1, "below", "refuted", "lies above the threshold"),
        (-0.1, "below", "supported", "lies below the threshold"),
        (0.06, "above", "inconclusive", "includes the threshold"),
    ],
)
def test_a_verdict_is_the_side_of_the_interval(centre, direction, verdict, said):
    judgement = judge({"H1": (Claim("H1", direction, 0.02), around(centre))})["H1"]
    assert judgement.verdict == verdict
    assert said in judgement.reason
    assert judgement.p == judgement.p_holm == around(centre).p_value(0.02)
    assert judgement.smallest_detectable == around(0).smallest_detectable(0.05)


def test_holm_takes_back_what_one_claim_alone_would_have_supported():
    claim, unknown = Claim("gain", "above", 0.0), estimated([SeedSample(0.4, None)], num_prompts=None)
    alone = judge({"gain": (claim, around(0.05))})["gain"]
    assert (alone.verdict, alone.p) == ("supported", pytest.approx(0.0377, abs=1e-4))
    # A claim that could not be tested was registered all the same, and counts.
    both = judge({"gain": (claim, around(0.05)), "lost": (Claim("lost", "above", 0.0), unknown)})
    assert both["gain"].verdict == "inconclusive"
    assert both["gain"].p_holm == pytest.approx(2 * alone.p)
    assert "but not after Holm's correction over 2 hypotheses" in both["gain"].reason
    assert both["gain"].smallest_detectable == around(0).smallest_detectable(0.025)
    assert (both["lost"].verdict, both["lost"].p, both["lost"].p_holm) == ("inconclusive", None, None)
    assert "No interval: one seed" in both["lost"].reason
    sure = judge({"gain": (claim, around(0.2)), "lost": (claim, unknown)})["gain"]
    assert sure.verdict == "supported"
    assert "also after Holm's correction over 2 hypotheses" in sure.reason


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), num_seeds=st.integers(2, 4), binary=st.booleans())
@settings(max_examples=40)
def test_experiments_of_few_seeds_have_intervals_at_every_alpha_that_shrink_as_it_grows(seed, num_seeds, binary):
    rng = np.random.default_rng(seed)
    num_prompts, seed_sd = int(rng.integers(5, 60)), rng.choice([0, 0.01, 0.3, 5])
    weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=60) / num_prompts
    answers = rng.normal(size=(2, num_seeds, num_prompts)) + 0.5 * rng.normal(size=(2, 1, num_prompts))
    answers += seed_sd * rng.normal(size=(2, num_seeds, 1))
    arms = [
        [SeedSample(float(row.mean()), row @ weights.T, num_prompts) for row in arm]
        for arm in (np.sign(answers) if binary else answers)
    ]
    apart = [
        SeedSample(a.value - b.value, a.replicates - b.replicates, num_prompts) for a, b in zip(*arms, strict=True)
    ]
    estimate = estimated(apart, num_prompts=num_prompts)
    if estimate.spread is None:
        assert estimate.reason
        return
    alphas = [1e-90, 1e-9, 0.001, 0.05, 0.3, 0.5, 0.9, 0.99, *(1 - 10.0 ** -np.arange(4, 17)), 1.0]
    widths = [float(np.diff(estimate.spread.bounds(alpha))[0]) for alpha in alphas]
    rounding = 1e-7 * widths[3] + 1e-12 * abs(estimate.value)  # quantiles of t near its centre are known to 1e-8
    assert all(wider >= narrower - rounding for wider, narrower in itertools.pairwise(widths))
    assert widths[-1] == pytest.approx(0, abs=rounding)
    for distance in (1e-13, 1e-9, 0.01, 0.5 * widths[3], 50):
        nearer, p = estimate.p_value(estimate.value + distance / 2), estimate.p_value(estimate.value + distance)
        assert 0 <= p <= nearer + 1e-7 <= 1 + 1e-7
    assert estimate.smallest_detectable(0.05) >= 0
