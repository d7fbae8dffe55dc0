"""What would decide claims that are undecided, and how likely the looks that are left do."""

import numpy as np
import pytest

from rmcore.evaluation.verdicts.estimate import SeedSample
from rmcore.evaluation.verdicts.judgement import Looks, chance_to_decide
from rmcore.study.analysis import judge_hypotheses
from rmcore.study.cells import GAP, Measured
from rmcore.study.deciding import chances, deciding_sizes

SPEED = "cost/train_pairs_per_second"
LOOKS = (5, 20)


def claim(name, metric=SPEED, **changes):
    declared = {
        "name": name,
        "claim": "It is so.",
        "metric": metric,
        "comparison": "ratio",
        "arm": "new",
        "versus": None,
        "direction": "above",
        "threshold": 1.0,
    }
    return declared | changes


def cells(metric, new, old):
    rows = {"new": new, "old": old}
    return {
        (arm, seed): Measured(arm, seed, {metric: SeedSample(value, None)})
        for arm, values in rows.items()
        for seed, value in enumerate(values)
    }


def taken(measured, *claims, looks=LOOKS):
    seeds = range(looks[-1])
    return judge_hypotheses(claims, measured, seeds, control="old", looks=looks, taken=1)


@pytest.fixture(scope="module")
def fast():
    """Some 5 % faster, by five seeds that scatter by 10 %."""
    noise = np.random.default_rng(1).normal(size=5)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    return cells(SPEED, list(100 * np.exp(0.05 + 0.1 * noise)), [100.0] * 5)


def test_only_what_is_undecided_has_a_size(fast):
    found = deciding_sizes(taken(fast, claim("open"), claim("sure", threshold=0.2)))
    assert list(found) == ["open"]
    # (1.96 + 0.84) standard errors of 0.1 / sqrt(n) are 0.05 at n = 31; that the variance is estimated takes two more.
    assert found["open"]["seeds"] in range(31, 36)
    assert found["open"]["prompts"] is None


def test_a_claim_of_equality_has_two_borders(fast):
    within = deciding_sizes(taken(fast, claim("H", direction="within", threshold=1.02)))
    outside = deciding_sizes(taken(fast, claim("H", threshold=1.02)))
    assert within == outside  # measured outside of it: the nearer border decides
    wide = deciding_sizes(taken(fast, claim("H", direction="within", threshold=1.12)))["H"]["seeds"]
    assert wide < within["H"]["seeds"]


def test_the_seeds_beyond_the_last_look_are_no_look_of_it(fast):
    assert deciding_sizes(taken(fast, claim("H"))) == deciding_sizes(taken(fast, claim("H"), looks=(5,)))


def test_other_claims_of_the_family_do_not_change_what_a_study_of_one_takes(fast):
    alone = deciding_sizes(taken(fast, claim("H")))
    assert deciding_sizes(taken(fast, claim("H"), *[claim(f"other {n}") for n in range(8)]))["H"] == alone["H"]


@pytest.mark.slow
def test_more_test_prompts_are_not_named_for_the_gap(make_rewards, measure):
    """The gap's spread over prompts is of the training's prompts, too."""
    accuracy = "eval/test_pairwise_accuracy"
    measured = {
        (arm, seed): measure(
            arm, seed, make_rewards(10 * place + seed, num_pairs=90, num_prompts=30, gain=0.3 + 0.12 * place)
        )
        for place, arm in enumerate(("old", "new"))
        for seed in range(12)
    }
    with_gap = {
        key: Measured(*key, cell.samples | {GAP: cell.samples[accuracy]}, cell.test, prompts=cell.prompts)
        for key, cell in measured.items()
    }
    shared = {"comparison": "difference", "threshold": 0.0}
    found = deciding_sizes(taken(with_gap, claim("A", accuracy, **shared), claim("G", GAP, **shared), looks=(12,)))
    assert found["A"]["prompts"] > 30
    assert found["G"] == {"seeds": found["A"]["seeds"], "prompts": None}


def test_what_is_open_has_its_chance(fast):
    looked = taken(fast, claim("open"), claim("sure", threshold=0.2))
    assert list(chances(looked, LOOKS)) == ["open"]
    own, estimates = looked.evidence["open"]
    assert chances(looked, LOOKS)["open"] == chance_to_decide(own, estimates, Looks(LOOKS), alpha=0.05)
    flat = cells(SPEED, [100.0] * 5, [100.0] * 5)  # equal values of all seeds have no interval
    assert chances(taken(flat, claim("H")), LOOKS) == {}
    assert deciding_sizes(taken(flat, claim("H"))) == {}
