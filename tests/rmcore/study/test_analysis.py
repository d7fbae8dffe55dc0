"""From cells to arms with intervals and hypotheses with verdicts."""

import json
import math

import numpy as np
import pytest

from rmcore.evaluation.verdicts.estimate import SeedSample
from rmcore.reporting.figures.claims import measured, verdict_words
from rmcore.study.analysis import arm_metrics, judge_hypotheses
from rmcore.study.cells import SHARES, Measured

ACCURACY = "eval/test_pairwise_accuracy"
SPEED = "cost/train_pairs_per_second"
SEEDS = (0, 1, 2)


def hypothesis(**changes):
    declared = {
        "name": "H1",
        "claim": "It is so.",
        "metric": ACCURACY,
        "comparison": "difference",
        "arm": "new",
        "versus": None,
        "direction": "above",
        "threshold": 0.0,
    }
    return declared | changes


def judged(cells, *hypotheses, seeds=SEEDS):
    found = judge_hypotheses(hypotheses or [hypothesis()], cells, seeds, control="old")
    json.dumps(found, allow_nan=False)
    return found if len(hypotheses) > 1 else found[0]


def timed(values, metric=SPEED):
    """Cells of arms by name from one number a seed; None: the cell has none."""
    return {
        (arm, seed): Measured(arm, seed, {} if value is None else {metric: SeedSample(value, None)})
        for arm, numbers in values.items()
        for seed, value in enumerate(numbers)
    }


@pytest.fixture
def tested(measure, make_rewards):
    """Three seeds of two arms on the same prompts, the new one better."""
    frames = {
        (arm, seed): make_rewards(10 * number + seed, num_pairs=300, num_prompts=30, gain=gain)
        for number, (arm, gain) in enumerate({"old": 0.2, "new": 0.9}.items())
        for seed in SEEDS
    }
    return frames, {key: measure(*key, frame) for key, frame in frames.items()}


def test_cells_that_choose_among_different_judged_answers_have_no_estimate_and_say_what_to_do():
    metric = "eval/answers_gain_4"

    def cells(*answers):
        rng = np.random.default_rng(0)
        return {
            (arm, seed): Measured(arm, seed, {metric: SeedSample(own, own + rng.normal(0, 0.1, 200), 30)}, answers=one)
            for arm, own in (("old", 0.1), ("new", 0.9))
            for seed, one in zip(SEEDS, answers, strict=True)
        }

    same = judged(cells("x", "x", "x"), hypothesis(metric=metric))
    assert same["verdict"] == "supported"
    assert "prompts that they share" in same["method"]
    apart = judged(cells("x", "x", "y"), hypothesis(metric=metric))
    assert (apart["value"], apart["verdict"]) == (None, "inconclusive")
    assert "data.eval_source" in apart["reason"]


def test_a_difference_is_the_mean_over_seeds_of_arm_minus_versus(tested):
    _, cells = tested
    found = judged(cells)
    apart = [cells["new", seed].value(ACCURACY) - cells["old", seed].value(ACCURACY) for seed in SEEDS]
    assert found["value"] == pytest.approx(np.mean(apart))
    assert found["ci_low"] < found["value"] < found["ci_high"]
    assert (found["versus"], found["num_seeds"], found["num_prompts"]) == ("old", 3, 30)
    back = judged(cells, hypothesis(arm="old", versus="new"))
    assert [back["value"], back["ci_low"], back["ci_high"]] == pytest.approx(
        [-found["value"], -found["ci_high"], -found["ci_low"]]
    )


def test_a_ratio_is_shown_as_a_ratio():
    cells = timed({"new": [20, 22, 25], "old": [10, 10, 12]})
    found = judged(cells, hypothesis(metric=SPEED, comparison="ratio", threshold=1.0))
    ratios = np.array([2.0, 2.2, 25 / 12])
    assert found["value"] == pytest.approx(np.exp(np.log(ratios).mean()))
    assert 1 < found["ci_low"] < ratios.min() < ratios.max() < found["ci_high"]
    # symmetric on the log scale, so that the reciprocal claim is the reciprocal interval
    assert found["ci_low"] * found["ci_high"] == pytest.approx(found["value"] ** 2)
    back = judged(cells, hypothesis(metric=SPEED, comparison="ratio", arm="old", versus="new", threshold=1.0))
    assert back["ci_high"] == pytest.approx(1 / found["ci_low"])
    assert (found["verdict"], back["verdict"]) == ("supported", "refuted")


def test_no_verdict_rests_on_the_seeds_that_survived():
    cells = timed({"new": [20, 22, 25], "old": [10, 11, 12]})
    above = hypothesis(metric=SPEED), hypothesis(metric=SPEED, comparison="level", arm="old", versus=None)
    assert [judged(cells, one)["num_seeds"] for one in above] == [3, 3]
    del cells["old", 1]
    for one in above:
        found = judged(cells, one)
        assert (found["value"], found["verdict"]) == (None, "inconclusive")
        assert "1 of 3 declared seeds failed" in found["reason"]
    level = arm_metrics(cells, "old", SEEDS, [SPEED])[SPEED]
    assert (level["num"], level["value"]) == (2, 11.0)
    assert "1 of 3 declared seeds failed" in level["reason"]


def test_a_metric_with_a_value_in_some_seeds_has_no_mean_of_the_lucky_ones():
    name = "train/steps_to_target"
    cells = timed({"new": [20, None, 25], "old": [30, 30, 31]}, name)
    found = judged(cells, hypothesis(metric=name))
    assert (found["value"], found["verdict"]) == (None, "inconclusive")
    assert "steps to the target accuracy has a value in only 2 of 3 seeds" in found["reason"]
    metrics = arm_metrics(cells, "new", SEEDS, [name])[name]
    assert (metrics["value"], metrics["num"]) == (None, 0)
    assert arm_metrics(cells, "old", SEEDS, [name])[name]["num"] == 3


def test_shared_prompts_are_told_from_prompts_of_each_seeds_own(tested, measure, make_rewards):
    _, shared = tested
    own = {
        (arm, seed): measure(f"own-{arm}", seed, make_rewards(seed, world=seed, gain=gain))
        for arm, gain in (("old", 0.2), ("new", 0.9))
        for seed in SEEDS
    }
    mixed = shared | {("old", seed): own["old", seed] for seed in SEEDS}
    for cells, words in ((shared, "that they share"), (own, "prompts of its own"), (mixed, "prompts of its own")):
        assert words in judged(cells)["method"]
    assert "that they share" in judged(mixed, hypothesis(comparison="level"))["method"]
    assert judged(mixed)["num_prompts"] == 20  # of the smaller table


def test_holm_counts_every_hypothesis_also_those_without_a_value():
    cells = timed({"new": [20, 22, 25], "old": [10, 10, 12]})
    alone = judged(cells, hypothesis(metric=SPEED))
    together = judged(
        cells,
        hypothesis(metric=SPEED),
        *[hypothesis(name=f"N{number}", metric="calib/test_ece_debiased") for number in range(3)],
    )
    assert alone["p_holm"] == alone["p"] == together[0]["p"]
    assert together[0]["p_holm"] == pytest.approx(4 * alone["p"])
    assert together[0]["smallest_detectable"] > alone["smallest_detectable"]
    assert [one["verdict"] for one in together[1:]] == ["inconclusive"] * 3


def test_the_interval_of_a_share_stays_within_0_and_1_and_a_debiased_error_below_zero_reads_as_none():
    """Student's t knows no bounds: three seeds near an end reach far beyond it."""
    metric = "calib/test_ece_debiased"
    assert {ACCURACY, metric} <= SHARES
    below = arm_metrics(timed({"new": [-0.01, -0.02, 0.01]}, metric), "new", SEEDS, [metric])[metric]
    assert (below["value"], below["ci_low"]) == (0.0, 0.0) != below["ci_high"]
    cells = timed({"high": [0.9, 0.99, 1.0], "low": [0.0, 0.01, 0.1], "middle": [0.49, 0.5, 0.51]}, metric)
    ends = {arm: arm_metrics(cells, arm, SEEDS, [metric])[metric] for arm in ("high", "low", "middle")}
    assert (ends["high"]["ci_high"], ends["low"]["ci_low"]) == (1.0, 0.0)
    assert 0 < ends["high"]["ci_low"] < ends["high"]["value"]
    half = ends["middle"]["ci_high"] - 0.5
    assert half == pytest.approx(4.302653 * 0.01 / math.sqrt(3))  # t(0.975, 2 degrees of freedom)
    found = judged(cells, hypothesis(metric=metric, comparison="level", arm="high", threshold=0.5))
    assert found["ci_high"] == 1.0
    difference = judged(cells, hypothesis(metric=metric, arm="high", versus="low", threshold=0.5))
    assert difference["ci_high"] > 1.0  # as far as its own t interval reaches


def growing(effect, num_seeds=20, sd=0.02):
    """Speeds of two arms, the new one better by `effect` a seed with the given spread."""
    rng = np.random.default_rng(7)
    old = 10 + rng.normal(0, 0.5, num_seeds)
    return {"old": old.tolist(), "new": (old + effect + rng.normal(0, sd, num_seeds)).tolist()}


def test_arms_may_be_claimed_to_be_as_good_as_equal():
    equal, other = timed(growing(0.0, sd=0.02)), timed(growing(0.5, sd=0.02))
    within = hypothesis(metric=SPEED, direction="within", threshold=0.1)
    verdicts = [judged(cells, within, seeds=range(8))["verdict"] for cells in (equal, other)]
    assert verdicts == ["supported", "refuted"]
    unsure = judged(timed(growing(0.0, sd=0.5)), within, seeds=range(8))
    assert unsure["verdict"] == "inconclusive"
    assert "includes an end of what is claimed" in unsure["reason"]
    ratio = judged(
        equal, hypothesis(metric=SPEED, comparison="ratio", direction="within", threshold=1.02), seeds=range(8)
    )
    assert ratio["verdict"] == "supported"
    assert 1 / 1.02 < ratio["ci_low"] < 1 < ratio["ci_high"] < 1.02


def test_bounds_of_a_ratio_beyond_all_numbers_are_left_out_and_the_rest_is_told():
    cells = timed({"old": [10.0, 10.0], "new": [9.0, 22.0]})
    claims = [hypothesis(name=f"H{k}", metric=SPEED, comparison="ratio", threshold=1.0) for k in range(100)]
    found = judge_hypotheses(claims, cells, [0, 1], control="old")
    json.dumps(found, allow_nan=False)
    assert found[0]["value"] == pytest.approx(math.sqrt(0.9 * 2.2))
    assert (found[0]["smallest_detectable"], found[0]["verdict"]) == (None, "inconclusive")


@pytest.mark.parametrize(("num_matched", "has_interval"), [(1, False), (12, True)])
def test_the_spread_over_prompts_is_known_by_the_prompts_that_carry_a_metric(
    num_matched, has_interval, measure, make_rewards
):
    """A hundred prompts, of which few have sides of one length: as many degrees of freedom as those give."""
    name, cells = "eval/test_length_matched_accuracy", {}
    for number, (arm, gain) in enumerate({"old": -0.5, "new": 0.8}.items()):
        for seed in SEEDS:
            frame = make_rewards(10 * number + seed, num_pairs=300, num_prompts=100, gain=gain)
            matched = frame["prompt_id"].isin([f"prompt-0-{i}" for i in range(num_matched)])
            frame["chosen_chars"], frame["rejected_chars"] = 100, np.where(matched, 100, 300)
            cells[arm, seed] = measure(arm, seed, frame)
    found = judged(cells, hypothesis(metric=name))
    assert found["num_prompts"] == num_matched
    assert (found["ci_low"] is not None) == has_interval
    if not has_interval:
        assert found["verdict"] == "inconclusive"
        assert "only one prompt" in found["reason"]
    level = arm_metrics(cells, "new", SEEDS, [name])[name]
    assert (level["ci_low"] is not None) == has_interval


def test_a_seed_that_collapsed_is_named_and_stays_in_the_mean():
    cells = timed({"old": [0.7, 0.71, 0.69, 0.705, 0.7], "new": [0.72, 0.71, 0.505, 0.73, 0.715]}, ACCURACY)
    found = judged(cells, seeds=range(5))
    assert "Seed 2 of new collapsed" in found["method"]
    assert "of old" not in found["method"]
    assert found["condition"] == "if trainings collapse as often as here"
    assert "if trainings collapse as often as here" in found["reason"]
    assert verdict_words(found) == f"{found['verdict']} if trainings collapse as often as here"
    assert found["num_seeds"] == 5
    assert found["value"] == pytest.approx(0.676 - 0.701)
    steady = timed({"old": [0.7, 0.71, 0.69, 0.705, 0.7], "new": [0.72, 0.71, 0.725, 0.73, 0.715]}, ACCURACY)
    found = judged(steady, seeds=range(5))
    assert "up to 45 % may" in found["method"]
    assert found["condition"] == "if no training collapses"
    assert measured(found, "points")[1].endswith(" if no training collapses")
    chance = timed({"old": [0.7, 0.71, 0.69], "new": [0.5, 0.51, 0.49]}, ACCURACY)
    assert "collapsed" not in judged(chance)["method"]


def test_a_claim_of_eight_seeds_is_covered_under_the_condition_that_its_own_sentence_has():
    """One training of ten collapses in one arm, by 0.2. The interval of all experiments holds the difference of all
    trainings in 61 %, the one that its condition names in 97.5 %: without any, or with as many as here.
    """
    rng, trials, covered = np.random.default_rng(8), 300, {"as said": 0, "of all trainings": 0}
    for _ in range(trials):
        old, new = 0.7 + 0.012 * rng.normal(size=(2, 8))
        broken = rng.random(8) < 0.1
        cells = timed({"old": old.tolist(), "new": np.where(broken, new - 0.2, new).tolist()}, ACCURACY)
        found = judged(cells, seeds=range(8))
        share = broken.mean() if found["condition"].endswith("as often as here") else 0.0
        for name, truth in (("as said", -0.2 * share), ("of all trainings", -0.2 * 0.1)):
            covered[name] += found["ci_low"] <= truth <= found["ci_high"]
        assert found["condition"] in found["reason"]
        assert found["condition"] in measured(found, "points")[1]
    assert covered["of all trainings"] / trials < 0.92
    assert covered["as said"] / trials >= 0.92
