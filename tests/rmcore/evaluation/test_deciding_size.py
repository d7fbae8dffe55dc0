"""The sizes that are named for an undecided claim decide it in four of five studies, and smaller ones do not."""

import numpy as np
import pytest

from rmcore.evaluation.verdicts.estimate import Estimate, SeedSample, estimate_over_seeds
from rmcore.evaluation.verdicts.intervals import Component, TInterval
from rmcore.evaluation.verdicts.judgement import Claim, Looks, judge
from rmcore.evaluation.verdicts.size import FEWEST_SEEDS, deciding_size

SEED_SD, PROMPT_SD, BOTH_SD = 0.03, 0.08, 0.4
"""Of a seed, a prompt, and an answer of a seed to a prompt: of the size that differences of accuracies have."""
CLAIMS = {
    "above": (0.02, Claim("H", "above", 0.0), (0.0,)),
    "refuted": (0.02, Claim("H", "above", 0.045), (0.045,)),
    "equal": (0.005, Claim("H", "within", 0.03), (-0.03, 0.03)),
}


def weights_of(rng, num_prompts):
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=150).astype(float)


def study(rng, prompts, weights, *, num_seeds):
    """What S new seeds measure on prompts (C,) whose own effects are given, with the replicates that `weights` draw."""
    both = BOTH_SD * rng.normal(size=(num_seeds, len(prompts)))
    answers = prompts + SEED_SD * rng.normal(size=(num_seeds, 1)) + both
    replicates = answers @ weights.T / len(prompts)
    samples = [SeedSample(float(row.mean()), own) for row, own in zip(answers, replicates, strict=True)]
    return estimate_over_seeds(samples, num_prompts=len(prompts), prompts_shared=True)


def typical(truth, *, num_seeds, num_prompts):
    """A study that measured the truth, with the variances that its size has on average."""
    together = BOTH_SD**2 / num_prompts / num_seeds
    over_seeds = Component(SEED_SD**2 / num_seeds + together, num_seeds - 1)
    over_prompts = Component(PROMPT_SD**2 / num_prompts, num_prompts - 1)
    spread = TInterval(truth, (over_seeds, over_prompts), together)
    return Estimate(truth, *spread.bounds(0.05), num_seeds, num_prompts, "", None, spread)


def share_decided(truth, claim, draw, *, num_seeds, num_studies=300):
    """Of studies with as many new seeds, each on the prompts that `draw` gives."""
    rng = np.random.default_rng(8)
    right = "supported" if claim.holds(truth) else "refuted"
    verdicts = [
        judge({"H": (claim, [study(rng, *draw(rng), num_seeds=num_seeds)])}, Looks((1,)))["H"].verdict
        for _ in range(num_studies)
    ]
    return verdicts.count(right) / num_studies


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "claim", "borders"), CLAIMS.values(), ids=CLAIMS.keys())
def test_the_seeds_that_are_named_decide_four_of_five_on_the_same_prompts(truth, claim, borders):
    found = deciding_size(typical(truth, num_seeds=5, num_prompts=400), borders)
    assert found.seeds > 8
    rng = np.random.default_rng(1)
    own = rng.normal(size=400)
    own = truth + PROMPT_SD * (own - own.mean()) / own.std()
    weights = weights_of(rng, 400)

    def decided(num_seeds):
        return share_decided(truth, claim, lambda _: (own, weights), num_seeds=num_seeds)

    # 300 studies know a share of 0.8 to 0.023 (one standard error).
    assert decided(found.seeds) == pytest.approx(0.8, abs=0.07)
    assert decided(found.seeds // 2) < 0.65


@pytest.mark.slow
def test_the_prompts_that_are_named_decide_four_of_five_with_as_many_seeds():
    """Seeds, prompts and the answer of each seed to each prompt are drawn again in each study."""
    num_seeds, truth, claim, borders = 5, 0.08, Claim("H", "above", 0.0), (0.0,)
    found = deciding_size(typical(truth, num_seeds=num_seeds, num_prompts=20), borders)
    assert 20 < found.prompts < 500

    def decided(num_prompts):
        weights = weights_of(np.random.default_rng(3), num_prompts)
        return share_decided(
            truth, claim, lambda rng: (truth + PROMPT_SD * rng.normal(size=num_prompts), weights), num_seeds=num_seeds
        )

    assert decided(found.prompts) == pytest.approx(0.8, abs=0.07)
    assert decided(found.prompts // 2) < 0.7


def test_the_part_of_seed_and_prompt_together_is_measured_with_the_spread():
    rng = np.random.default_rng(6)
    weights = weights_of(rng, 300)
    seen = [study(rng, PROMPT_SD * rng.normal(size=300), weights, num_seeds=6) for _ in range(60)]
    assert np.mean([one.spread.together for one in seen]) == pytest.approx(BOTH_SD**2 / 300 / 6, rel=0.05)
    assert all(one.spread.together > 0 for one in seen)


def test_no_seeds_come_nearer_to_a_border_than_the_interval_of_the_prompts():
    prompt_half = 1.96 * PROMPT_SD / 100**0.5
    near = deciding_size(typical(0.9 * prompt_half, num_seeds=60, num_prompts=100), (0.0,))
    far = deciding_size(typical(1.2 * prompt_half, num_seeds=60, num_prompts=100), (0.0,))
    assert near.seeds is None
    assert near.prompts > 100
    assert far.seeds is not None


@pytest.mark.parametrize("borders", [(0.0,), (-0.08, 0.08), (0.09,)])
def test_a_stricter_level_and_a_nearer_border_take_more_of_either(borders):
    estimate = typical(0.04, num_seeds=8, num_prompts=1000)
    sizes = [deciding_size(estimate, borders, alpha=alpha) for alpha in (0.2, 0.05, 0.01, 0.001)]
    sizes_near = [deciding_size(estimate, (0.04 - distance,)) for distance in (0.04, 0.02, 0.012)]
    for found in (sizes, sizes_near):
        seeds, prompts = [one.seeds or 10**6 for one in found], [one.prompts or 10**12 for one in found]
        assert seeds == sorted(seeds)
        assert seeds[0] < seeds[-1]
        assert prompts == sorted(prompts)
        assert prompts[0] < prompts[-1]


def test_where_the_seeds_part_alone_reaches_the_border_no_prompts_help():
    found = deciding_size(typical(0.02, num_seeds=5, num_prompts=2000), (0.0,))
    assert 1.96 * SEED_SD / 5**0.5 > 0.02
    assert found.prompts is None
    assert found.seeds > 5


def test_on_a_border_nothing_decides():
    assert deciding_size(typical(0.2, num_seeds=6, num_prompts=50), (0.2,)) == (None, None)


@pytest.mark.slow
def test_times_need_seeds_alone():
    samples = [SeedSample(x, None) for x in (0.1, 0.2, 0.3, 0.15, 0.25)]
    estimate = estimate_over_seeds(samples, num_prompts=None, prompts_shared=True)
    found = deciding_size(estimate, (0.16,))
    assert found.prompts is None
    rng, half = np.random.default_rng(2), {}
    for num_seeds in (found.seeds, found.seeds // 2):
        drawn = estimate.value + np.std([0.1, 0.2, 0.3, 0.15, 0.25], ddof=1) * rng.normal(size=(4000, num_seeds))
        half[num_seeds] = np.mean([one_sided(row) for row in drawn])
    assert half[found.seeds] == pytest.approx(0.8, abs=0.03)
    assert half[found.seeds // 2] < 0.6


def one_sided(values):
    estimate = estimate_over_seeds([SeedSample(float(x), None) for x in values], num_prompts=None, prompts_shared=True)
    return estimate.ci_low > 0.16


def test_few_seeds_and_no_spread_name_no_size():
    few = typical(0.1, num_seeds=FEWEST_SEEDS - 1, num_prompts=50)
    assert deciding_size(few, (0.0,)) is None
    same = estimate_over_seeds([SeedSample(0.1, None)] * 6, num_prompts=None, prompts_shared=True)
    assert deciding_size(same, (0.0,)) is None
