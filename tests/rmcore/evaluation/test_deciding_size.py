"""The size that is named for an undecided claim decides it in four of five experiments, and no smaller one does."""

import numpy as np
import pytest

from rmcore.evaluation.verdicts.estimate import Estimate, SeedSample, estimate_over_seeds
from rmcore.evaluation.verdicts.intervals import Component, TInterval
from rmcore.evaluation.verdicts.judgement import ONE_LOOK, Claim, judge
from rmcore.evaluation.verdicts.size import MOST_SEEDS, deciding_size, power_to_decide

SEED_SD, PROMPT_SD, BOTH_SD = 0.03, 0.08, 0.4
"""Of a seed, a prompt, and an answer of a seed to a prompt: of the size that differences of accuracies have."""


def experiment(rng, truth, weights, *, num_seeds):
    """What S seeds measure on C common prompts, with the replicates that `weights` (B, C) draw."""
    num_prompts = weights.shape[1]
    answers = (
        truth
        + SEED_SD * rng.normal(size=(num_seeds, 1))
        + PROMPT_SD * rng.normal(size=num_prompts)
        + BOTH_SD * rng.normal(size=(num_seeds, num_prompts))
    )
    replicates = answers @ weights.T / num_prompts
    samples = [SeedSample(float(row.mean()), own) for row, own in zip(answers, replicates, strict=True)]
    return estimate_over_seeds(samples, num_prompts=num_prompts, prompts_shared=True)


def typical(truth, *, num_seeds, num_prompts):
    """An experiment that measured the truth, with the variances that its size has on average."""
    over_seeds = Component((SEED_SD**2 + BOTH_SD**2 / num_prompts) / num_seeds, num_seeds - 1)
    over_prompts = Component(PROMPT_SD**2 / num_prompts, num_prompts - 1)
    spread = TInterval(truth, (over_seeds, over_prompts))
    return Estimate(truth, *spread.bounds(0.05), num_seeds, num_prompts, "", None, spread)


def share_decided(truth, claim, *, num_seeds, num_prompts, num_experiments=600):
    rng = np.random.default_rng(8)
    weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=150).astype(float)
    verdicts = [
        judge({"H": (claim, [experiment(rng, truth, weights, num_seeds=num_seeds)])}, ONE_LOOK)["H"].verdict
        for _ in range(num_experiments)
    ]
    return verdicts.count("supported" if claim.holds(truth) else "refuted") / num_experiments


CLAIMS = {
    "above": (0.02, Claim("H", "above", 0.0)),
    "refuted": (0.02, Claim("H", "above", 0.045)),
    "equal": (0.005, Claim("H", "within", 0.03)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "claim"), CLAIMS.values(), ids=CLAIMS.keys())
def test_the_seeds_that_are_named_decide_four_of_five(truth, claim):
    found = deciding_size(typical(truth, num_seeds=5, num_prompts=400), claim.borders, alpha=0.05)
    assert found.prompts is None
    assert 6 < found.seeds < 60
    # 600 experiments know a share of 0.8 to 0.016 (one standard error); 150 replicates blur the prompts' part.
    assert share_decided(truth, claim, num_seeds=found.seeds, num_prompts=400) == pytest.approx(0.8, abs=0.06)
    assert share_decided(truth, claim, num_seeds=found.seeds // 2, num_prompts=400) < 0.65


def test_where_seeds_cannot_decide_the_prompts_that_could_are_named():
    truth, claim = 0.02, Claim("H", "above", 0.0)
    found = deciding_size(typical(truth, num_seeds=5, num_prompts=100), claim.borders, alpha=0.05)
    assert found.seeds is None
    # 80 % power takes 1.96 + 0.84 standard errors, and the prompts' part alone is one that no seeds make smaller.
    assert found.prompts == pytest.approx((2.8 * PROMPT_SD / truth) ** 2, rel=0.2)


@pytest.mark.parametrize("borders", [(0.0,), (-0.08, 0.08), (0.09,)])
def test_a_nearer_border_and_a_stricter_level_take_more_seeds(borders):
    estimate = typical(0.04, num_seeds=5, num_prompts=4000)
    needed = [deciding_size(estimate, borders, alpha=alpha).seeds for alpha in (0.2, 0.05, 0.01, 0.001)]
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]
    near = [(estimate.value - distance,) for distance in (0.04, 0.02, 0.01)]
    nearer = [deciding_size(estimate, border, alpha=0.05).seeds for border in near]
    assert nearer == sorted(nearer)
    assert nearer[0] < nearer[-1]


def test_no_size_is_named_that_was_there_already():
    assert deciding_size(typical(0.5, num_seeds=5, num_prompts=400), (0.0,), alpha=0.05) == (6, None)


def test_on_a_border_nothing_decides():
    estimate = estimate_over_seeds(
        [SeedSample(x, None) for x in (0.1, 0.2, 0.3)], num_prompts=None, prompts_shared=True
    )
    assert deciding_size(estimate, (estimate.value,), alpha=0.05) == (None, None)


def test_times_need_seeds_alone():
    estimate = estimate_over_seeds(
        [SeedSample(x, None) for x in (0.1, 0.2, 0.3)], num_prompts=None, prompts_shared=True
    )
    found = deciding_size(estimate, (0.15,), alpha=0.05)
    assert found.prompts is None
    variance = 0.01
    for num_seeds, decides in ((found.seeds, True), (found.seeds - 1, False)):
        part = Component(variance / num_seeds, num_seeds - 1)
        assert (power_to_decide(0.2, (0.15,), (part,), alpha=0.05) >= 0.8) == decides


def test_one_seed_says_nothing_of_others():
    one = estimate_over_seeds([SeedSample(0.1, np.linspace(0, 0.2, 99))], num_prompts=9, prompts_shared=True)
    assert deciding_size(one, (0.0,), alpha=0.05) is None
    same = estimate_over_seeds([SeedSample(0.1, None)] * 3, num_prompts=None, prompts_shared=True)
    assert deciding_size(same, (0.0,), alpha=0.05) is None


def test_power_grows_with_either_part_and_ends_at_one():
    powers = [
        power_to_decide(0.02, (0.0,), (Component(0.001 / n, n - 1), Component(1e-6, 900)), alpha=0.05)
        for n in (3, 10, 100, MOST_SEEDS)
    ]
    assert powers == sorted(powers)
    assert powers[-1] > 0.999
    assert power_to_decide(0.02, (0.0,), (Component(0.0, 4),), alpha=0.05) == 1.0
