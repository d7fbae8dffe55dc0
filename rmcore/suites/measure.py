"""Rewards of a benchmark's answers, and its scores with intervals next to that of "the longer answer is better".

Length is scored as models are: the number of characters stands in for a reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.evaluation.uncertainty import MetricValue, Resampled, cluster_bootstrap, metric_value, with_unseen_prompts
from rmcore.models.checks import refuse_not_finite, warn_of_equal
from rmcore.suites.question import OVERALL, Question, Rewards, Suite, clusters, groups_of
from rmcore.suites.several_answers import TIES

RESAMPLES = 2000
_ALIKE = 1e-9
"""Scores differ by rounding alone."""
UNDEFINED = "the part of the set that is there does not define it"


@dataclass(frozen=True, slots=True)
class Measured:
    """One model on one benchmark."""

    scores: dict[str, MetricValue]
    """By name, `overall` first."""
    longer: float | None
    """Overall score of "the longer one is better"; None where it is not defined, as in a part of a set."""
    over_longer: MetricValue
    """How far the model is above it, on the same draws of prompts."""
    num_unreadable: int
    """Questions with an answer that the model cannot read: none of them counts as right."""


def score_answers(rm: SideScorer, questions: Sequence[Question], *, report: Report = silent) -> list[FloatArray]:
    """Score all answers in one pass; answers to one prompt are computed together where the model allows it.

    Returns:
        The rewards of each question's answers, NaN where the model cannot read one.

    Raises:
        DataError: it can read none of them.
        ModelError: a reward is not finite.
    """
    found = rm.renderer.try_sides([(one.prompt, answer) for one in questions for answer in one.answers], report=report)
    sides = [side for side in found if isinstance(side, TokenizedSide)]
    if not sides:
        raise DataError(f"none of the {len(found)} answers can be read as this model reads text: {found[0]}")
    rewards = np.full(len(found), np.nan)
    readable = [isinstance(side, TokenizedSide) for side in found]
    scored = rm.score_sides(sides, report=report)
    refuse_not_finite(scored, lambda place: f"readable answer {place + 1} of {len(sides)}")
    warn_of_equal(scored)
    rewards[readable] = scored
    ends = np.cumsum([len(one.answers) for one in questions])
    return np.split(rewards, ends[:-1])


def measure(suite: Suite, questions: Sequence[Question], rewards: Rewards, *, seed: int = 0) -> Measured:
    """Score a model by the benchmark's own rule; intervals are 95 %, over prompts."""
    cluster, number = clusters(questions)
    scores = suite.scores(questions, rewards)
    found = cluster_bootstrap(
        lambda weights: scores(weights[:, cluster]), number, num_resamples=RESAMPLES, seed=seed, row_size=len(questions)
    )
    lengths = [np.array([len(text) for text in one.answers], dtype=np.float64) for one in questions]
    return Measured(
        {name: _value(suite, name, found, questions, cluster, rewards) for name in found.point},
        overall(suite, questions, lengths),
        difference(suite, questions, rewards, lengths, seed=seed),
        sum(bool(np.isnan(own).any()) for own in rewards),
    )


def difference(
    suite: Suite, questions: Sequence[Question], first: Rewards, second: Rewards, *, seed: int = 0
) -> MetricValue:
    """Overall score of the first model minus that of the second on the same draws of prompts."""
    cluster, number = clusters(questions)
    both = [suite.scores(questions, rewards) for rewards in (first, second)]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        a, b = (scores(weights[:, cluster])[OVERALL] for scores in both)
        return {OVERALL: a - b}

    found = cluster_bootstrap(compute, number, num_resamples=RESAMPLES, seed=seed, row_size=len(questions))
    value, replicates = found.point[OVERALL], found.replicates.get(OVERALL)
    if np.isnan(value):
        return MetricValue(None, None, None, len(questions), UNDEFINED)
    if replicates is not None and len(np.unique(replicates[~np.isnan(replicates)])) < 2:
        why = "it is the same in every draw of prompts, which says nothing about others"
        return MetricValue(value, None, None, len(questions), why)
    groups = _groups(suite, questions, cluster)
    shown = metric_value(value, replicates, num_prompts=known_by(groups, number), num_pairs=len(questions))
    return _widened(shown, _hidden(suite, questions, groups, first, second), -1.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Questions that a score may weigh otherwise than others.

    places: of the questions.
    num_prompts: of the questions.
    weight: what the overall score gains where these questions alone become right.
    """

    places: IntArray
    num_prompts: int
    weight: float


def _groups(suite: Suite, questions: Sequence[Question], cluster: IntArray) -> list[Group]:
    none = overall(suite, questions, _all_right(questions, None)) or 0.0
    found = []
    for name, mask in groups_of(questions).items():
        places = np.flatnonzero(mask)
        weight = (overall(suite, questions, _all_right(questions, name)) or 0.0) - none
        found.append(Group(places, len(np.unique(cluster[places])), weight))
    return found


def _all_right(questions: Sequence[Question], group: str | None) -> list[FloatArray]:
    """Rewards by which the questions of a group are right and no others."""
    found = []
    for one in questions:
        own = np.zeros(len(one.answers))
        own[: one.num_good] = 1.0 if one.group == group else -1.0
        found.append(own)
    return found


def _hidden(
    suite: Suite, questions: Sequence[Question], groups: Sequence[Group], first: Rewards, second: Rewards | None = None
) -> tuple[float, float]:
    """How far the overall score may be below and above, because all questions of a group say the same.

    Resampling shows no spread there, and six questions that are all right leave room for many that are not. The mean m
    of such a group, in [l, 1], may be any within m - u (m - l) and m + u (1 - m) (`with_unseen_prompts`). The distances
    to these ends are put together as those of independent parts are, by their squares.

    Args:
        suite: whose rule makes the score.
        questions: all of them.
        groups: of `_groups`.
        first: rewards of a model.
        second: of another, where it is the difference of both that is measured.

    Source:
        Zou and Donner 2008, Construction of confidence limits about effect measures, Statistics in Medicine 27(10).
    """
    rng, wrong = np.random.default_rng(0), _all_right(questions, None)
    models = [(1.0, first), *([] if second is None else [(-1.0, second)])]
    scored = [(sign, suite.scores(questions, rewards)) for sign, rewards in models]
    lowest, below, above = 0.0 if second is None else -1.0, 0.0, 0.0
    for group in groups:
        weights = np.ones((2, len(questions)))
        weights[1, group.places] = rng.exponential(size=len(group.places)) + 0.1
        as_is, weighed = np.sum([sign * scores(weights)[OVERALL] for sign, scores in scored], axis=0)
        if np.isnan(weighed) or abs(weighed - as_is) > _ALIKE or group.weight <= 0:
            continue
        without_it = sum(sign * _overall_with(suite, questions, rewards, wrong, group) for sign, rewards in models)
        mean = (as_is - without_it) / group.weight
        low, high = with_unseen_prompts(mean, group.num_prompts, lowest)
        below += (group.weight * (mean - low)) ** 2
        above += (group.weight * (high - mean)) ** 2
    return float(below**0.5), float(above**0.5)


def _overall_with(
    suite: Suite, questions: Sequence[Question], rewards: Rewards, others: Rewards, group: Group
) -> float:
    """Overall score where the questions of a group have other rewards."""
    mixed = list(rewards)
    for place in group.places:
        mixed[place] = others[place]
    return overall(suite, questions, mixed) or 0.0


def known_by(groups: Sequence[Group], number: int) -> float:
    """How many prompts, alike in weight, know the spread of the overall score as well as these do.

    A mean over groups has much of its variance from the smallest, which few prompts show: its degrees of freedom are
    Satterthwaite's, with v_g = W_g^2 / n_g for a group of n_g prompts. A group's weight W_g is what the score gains
    where the group's questions alone become right. Where all questions weigh the same this is about their `number`.

    Source:
        Satterthwaite 1946, An approximate distribution of estimates of variance components, Biometrics Bulletin 2(6).
    """
    sizes = np.array([one.num_prompts for one in groups], dtype=np.float64)  # (G,)
    parts = np.array([one.weight for one in groups]) ** 2 / sizes
    if parts.sum() == 0:
        return float(number)
    df = parts.sum() ** 2 / (parts**2 / np.maximum(sizes - 1, 0.5)).sum()
    return min(float(number), float(df) + 1)


def _widened(shown: MetricValue, hidden: tuple[float, float], lowest: float) -> MetricValue:
    """A score whose interval holds what groups hide in which all questions say the same."""
    if shown.value is None or shown.ci_low is None or shown.ci_high is None:
        return shown
    below, above = np.hypot(shown.value - shown.ci_low, hidden[0]), np.hypot(shown.ci_high - shown.value, hidden[1])
    return replace(shown, ci_low=max(lowest, shown.value - float(below)), ci_high=min(1.0, shown.value + float(above)))


def without(suite: Suite, questions: Sequence[Question], rewards: Rewards, left_out: BoolArray) -> float | None:
    """Overall score without some questions (Q,); None where the rest does not define it, as where a group is gone."""
    kept = [place for place in range(len(questions)) if not left_out[place]]
    if {questions[place].group for place in kept} != {one.group for one in questions}:
        return None
    return overall(suite, [questions[place] for place in kept], [rewards[place] for place in kept])


def _value(
    suite: Suite, name: str, found: Resampled, questions: Sequence[Question], cluster: IntArray, rewards: Rewards
) -> MetricValue:
    parts = suite.parts.get(name, (name,))
    own = [place for place, one in enumerate(questions) if one.group in parts] or list(range(len(questions)))
    if np.isnan(found.point[name]):
        return MetricValue(None, None, None, len(own), UNDEFINED)
    number = float(len(np.unique(cluster[own])))
    hidden = (0.0, 0.0)
    if name == OVERALL:
        groups = _groups(suite, questions, cluster)
        number, hidden = known_by(groups, int(number)), _hidden(suite, questions, groups, rewards)
    value = metric_value(
        found.point[name], found.replicates.get(name), num_prompts=number, num_pairs=len(own), is_share=name != TIES
    )
    return _widened(value, hidden, 0.0)


def overall(suite: Suite, questions: Sequence[Question], rewards: Rewards) -> float | None:
    """Overall score by the benchmark's own rule; None where the questions do not define it."""
    value = float(suite.scores(questions, rewards)(np.ones((1, len(questions))))[OVERALL][0])
    return None if np.isnan(value) else value


def to_table(questions: Sequence[Question], rewards: Rewards) -> pd.DataFrame:
    """One row an answer: question, group, answer (its place), is_right, reward."""
    return pd.DataFrame(
        {
            "question": [one.id for one in questions for _ in one.answers],
            "group": [one.group for one in questions for _ in one.answers],
            "answer": [place for one in questions for place in range(len(one.answers))],
            "is_right": [place < one.num_good for one in questions for place in range(len(one.answers))],
            "reward": np.concatenate(rewards),
        }
    )


def from_table(questions: Sequence[Question], table: pd.DataFrame) -> list[FloatArray]:
    """The rewards that `to_table` wrote of these questions."""
    ends = np.cumsum([len(one.answers) for one in questions])
    return np.split(table["reward"].to_numpy(dtype=np.float64), ends[:-1])
