"""Means over groups of few questions: their intervals hold the truth as often as they say."""

import numpy as np
import pytest
from scipy import stats

from rmcore.suites import measure
from rmcore.suites.pairwise import LLMBAR
from rmcore.suites.question import Question, clusters

MAY_MISS = 0.05
TRIALS = 60


def questions_of(*sizes):
    return [
        Question(f"{group} {place}", f"{group} {place}", ("good", "bad"), 1, str(group), f"{group} {place}")
        for group, size in enumerate(sizes)
        for place in range(size)
    ]


def rewards_of(right):
    return [np.array([1.0, 0.0]) if one else np.array([0.0, 1.0]) for one in right]


# Chances to be right of both models in the first group and in all others; the means over groups are what is measured.
WORLDS = {
    "alike": ((0.65, 0.65), (0.65, 0.65)),
    "nearly all right": ((0.9, 0.9), (0.9, 0.9)),
    "one better at the first group, one at the others": ((0.95, 0.8), (0.75, None)),
    "one hardly ever wrong in the first group": ((1.0, 0.6), (0.9, None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (6, 120)], ids=str)
def test_a_mean_over_groups_and_a_difference_of_two_are_held(sizes, name, monkeypatch):
    """Six questions that are all right show no spread: where resampling alone made the interval, 20 to 50 % missed."""
    monkeypatch.setattr(measure, "RESAMPLES", 200)
    questions, group = questions_of(*sizes), np.repeat(np.arange(len(sizes)), sizes)
    (first, others), (second, found) = WORLDS[name]
    equal = others + (first - second) / (len(sizes) - 1) if found is None else found  # both have one true mean
    chances = [np.where(group == 0, one, rest) for one, rest in ((first, others), (second, min(equal, 1.0)))]
    truths = [np.mean([one[group == own].mean() for own in range(len(sizes))]) for one in chances]
    rng, missed = np.random.default_rng(0), {"difference": 0, "score": 0}
    for trial in range(TRIALS):
        uniform = rng.random(len(questions))
        fresh = np.where(rng.random(len(questions)) < 0.5, uniform, rng.random(len(questions)))
        rewards = [rewards_of(draw < chance) for draw, chance in zip((uniform, fresh), chances, strict=True)]
        shown = measure.difference(LLMBAR, questions, *rewards, seed=trial)
        score = measure.measure(LLMBAR, questions, rewards[1], seed=trial).scores["overall"]
        truth = truths[0] - truths[1]
        missed["difference"] += shown.ci_low is not None and not shown.ci_low <= truth <= shown.ci_high
        missed["score"] += score.ci_low is not None and not score.ci_low <= truths[1] <= score.ci_high
    for count in missed.values():
        assert stats.binomtest(count, TRIALS, MAY_MISS, alternative="greater").pvalue > 0.001


def test_a_mean_over_groups_is_known_by_its_smallest_and_one_of_questions_by_all():
    for sizes, low, high in (((6, 200), 6, 8), ((50, 50), 98, 100), ((6, 6, 6, 6), 20, 22)):
        questions = questions_of(*sizes)
        cluster, number = clusters(questions)
        assert low <= measure.known_by(measure._groups(LLMBAR, questions, cluster), number) <= high
