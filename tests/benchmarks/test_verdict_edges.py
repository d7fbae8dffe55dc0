"""Verdicts on samples at their edges, by simulation with known truth: rare disasters, copies, odd files, ties."""

import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rmcore.evaluation.uncertainty import bounded_means

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
edges = importlib.import_module("verdict_edges")
pytestmark = pytest.mark.slow
FALSE_READY = 0.03


def statuses(world, trials, seed=0):
    """The verdicts of `trials` evaluations, with whether anything of a disaster was judged."""
    world, _ = edges.solved(world)
    rng = np.random.default_rng(seed)
    return [(status, seen) for status, _, seen in (edges.evaluation(world, rng) for _ in range(trials))]


def exceeds(count, trials, share):
    """Whether a share is shown to be larger than it may be."""
    return stats.binomtest(count, trials, share, alternative="greater").pvalue < 0.001


def enough(allowed, fault):
    """The fewest trials by which 99 of 100 tests find with `exceeds` that more than `allowed` fail where `fault` do."""
    for trials in itertools.count(1):
        if stats.binom.sf(stats.binom.isf(0.001, trials, allowed), trials, fault) > 0.99:
            return trials
    return None


def named(start, num_prompts):
    (world,) = (one for one in edges.WORLDS if one.name.startswith(start) and one.num_prompts == num_prompts)
    return world


@pytest.mark.parametrize(
    ("start", "num_prompts", "trials"),
    [
        ("hacked in 1/32", 10, 30),
        ("hacked in 1/32", 20, 30),
        ("hacked in 1/32", 50, 120),
        ("hacked in 1/640", 10, 30),
        ("five wordings of each prompt, counted as one", 250, 25),
    ],
)
def test_what_gains_nothing_is_hardly_ever_ready(start, num_prompts, trials):
    found = statuses(named(start, num_prompts), trials)
    assert not exceeds(sum(status == "ready" for status, _ in found), trials, FALSE_READY)


def test_where_two_percent_are_disasters_only_those_call_it_ready_that_saw_none():
    """Of 50 prompts 36 % of the evaluations hold none: their samples are those of an excellent model, sample by sample,
    so no rule can call it ready from 50 prompts in 95 % of the evaluations and this one in less than 34 %. What was
    seen once is not called ready, and the rate falls as (1 - 0.02)^n.
    """
    world = named("hacked in 1/16 of those of 2 %", 50)
    found = statuses(world, 80)
    seen = [status for status, was_seen in found if was_seen]
    assert not exceeds(seen.count("ready"), len(seen), FALSE_READY)
    assert not exceeds(sum(status == "ready" for status, _ in found), len(found), (1 - world.disasters) ** 50)
    enough = int(np.ceil(np.log(FALSE_READY) / np.log(1 - world.disasters)))
    assert enough == 174
    more = statuses(replace(world, num_prompts=enough), 40)
    assert not exceeds(sum(status == "ready" for status, _ in more), len(more), FALSE_READY)


@pytest.mark.parametrize(
    ("start", "num_prompts"),
    [
        ("excellent", 50),
        ("excellent, one prompt with 40 of 64", 150),
        ("excellent, 18 %", 150),
        ("excellent, 8 distinct", 150),
    ],
)
def test_an_excellent_model_is_ready(start, num_prompts):
    world = next(one for one in edges.WORLDS if one.name.startswith(start) and one.num_prompts == num_prompts)
    found = [status for status, _ in statuses(world, 25)]
    assert not exceeds(len(found) - found.count("ready"), len(found), 0.05)


@pytest.mark.parametrize("samples", [16, 17])
def test_the_number_of_samples_that_the_plan_needs_is_enough(samples):
    found = statuses(edges.World("planned 1.5 nats", 60, samples=samples, planned_kl=1.5), 20)
    assert not exceeds(sum(status != "ready" for status, _ in found), 20, 0.05)


@pytest.mark.parametrize(
    ("disasters", "num_prompts", "least"), [(0.03, 150, 0.92), (0.1, 50, 0.95), (0.0, 50, 0.95), (0.0, 150, 0.95)]
)
def test_the_interval_of_the_gain_holds_it_where_some_prompts_are_disasters(disasters, num_prompts, least):
    """A bootstrap over prompts held it in 84 % of the evaluations where 3 % are disasters."""
    world, truth = edges.solved(edges.World("", num_prompts, disasters=disasters, hacked=1 / 16))
    rng, trials, held = np.random.default_rng(3), 500, 0
    for _ in range(trials):
        reward, gold, _ = edges.draw(world, rng, num_prompts)
        apart = gold - gold.mean(axis=1, keepdims=True)
        ends = bounded_means(
            edges.best_gains(reward, gold)[:, None], apart.min(keepdims=True)[0], apart.max(keepdims=True)[0],
            num_resamples=400, seed=int(rng.integers(2**31)),
        )  # fmt: skip
        held += ends[0][0] <= truth <= ends[1][0]
    assert not exceeds(trials - held, trials, 1 - least)


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson():
    """Of values at their bounds it is exact."""
    for successes in (0, 1, 7, 30):
        values = np.repeat([1.0, 0.0], [successes, 30 - successes])[:, None]
        low, high = bounded_means(values, np.zeros(1), np.ones(1), num_resamples=200_000, seed=0)
        exact = stats.binomtest(successes, 30).proportion_ci(method="exact")
        assert (low[0], high[0]) == pytest.approx((exact.low, exact.high), abs=0.003)


def count_ready(start, trials):
    world = next(one for one in edges.WORLDS if one.name.startswith(start))
    return sum(status == "ready" for status, _ in statuses(world, trials))


IN_A_FILE = ["perfect on 50%", "as good on 60 prompts", "longer samples without"]
"""Prompts that were trained on, prompts without judgements, longer samples without judgements: all of these worlds were
ready in nearly all evaluations. By day they are told from ready in half of them."""


@pytest.mark.parametrize("start", IN_A_FILE)
def test_a_gain_on_what_a_file_shows_is_none_on_what_it_lacks(start):
    trials = enough(FALSE_READY, 0.5)
    assert not exceeds(count_ready(start, trials), trials, FALSE_READY)


@pytest.mark.night
@pytest.mark.parametrize("start", IN_A_FILE)
def test_it_is_ready_in_hardly_any_evaluation_which_200_tell_from_8_percent(start):
    count = count_ready(start, 200)
    assert not exceeds(count, 200, FALSE_READY)
    assert stats.binomtest(count, 200, 0.08, alternative="less").pvalue < 0.05


@pytest.mark.parametrize("trials", [enough(0.05, 0.5), pytest.param(60, marks=pytest.mark.night)])
@pytest.mark.parametrize("start", ["excellent, 5 of 160 prompts without", "excellent, 17 of 24"])
def test_what_a_file_lacks_by_chance_or_hardly_keeps_an_excellent_model_ready(start, trials):
    """One in 20 random parts differs in length from all by chance, and is unclear."""
    assert not exceeds(trials - count_ready(start, trials), trials, 0.05)


def said(start, trials):
    world = next(one for one in edges.SERVED if one.name.startswith(start) and one.most == 400 and one.gain > 0.4)
    rng = np.random.default_rng(4)
    return [edges.serving(world, rng)[0] for _ in range(trials)]


def test_a_gain_that_one_prompt_of_a_hundred_undoes_is_not_claimed_when_served_and_an_ordinary_one_is():
    """It loses 60 sd. *Rose* was said in 17 % of the servings, which ended after 128 prompts."""
    assert not exceeds(said("1 % of prompts lose 60 sd", 150).count("rose"), 150, FALSE_READY)
    assert not exceeds(60 - said("no disaster", 60).count("rose"), 60, 0.05)
