"""Rewards of a benchmark's answers, and its scores with intervals beside those of rules that read no text.

The rules are scored as models are: the number of characters, and the number of Markdown marks, stand in for rewards.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.evaluation.ranking import ratio
from rmcore.evaluation.rewards import LENGTH_MATCHED
from rmcore.evaluation.uncertainty import MetricValue, Resampled, cluster_bootstrap, interval_p, metric_value
from rmcore.models.reward_model import refuse_not_finite
from rmcore.suites.question import OVERALL, Question, Rewards, Suite, clusters
from rmcore.suites.reward_bench_2 import TIES

_MARKDOWN = re.compile(r"(?m)^\s*(?:[-*+]|\d+[.)])\s|^#{1,6}\s|\*\*|```|^\|")
"""List items, headings, bold, code, tables."""
RESAMPLES = 2000
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
    markdown: float | None
    """Overall score of "the one with more Markdown is better"."""
    length_matched: MetricValue
    """Share of right answers above wrong ones of about the same length."""
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
    found = rm.renderer.try_sides([(one.prompt, answer) for one in questions for answer in one.answers])
    sides = [side for side in found if isinstance(side, TokenizedSide)]
    if not sides:
        raise DataError(f"none of the {len(found)} answers can be read as this model reads text: {found[0]}")
    rewards = np.full(len(found), np.nan)
    readable = [isinstance(side, TokenizedSide) for side in found]
    scored = rm.score_sides(sides, report=report)
    refuse_not_finite(scored, lambda place: f"readable answer {place + 1} of {len(sides)}")
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
    lengths = _counted(questions, len)
    return Measured(
        {name: _value(suite, name, found, questions, cluster) for name in found.point},
        overall(suite, questions, lengths),
        difference(suite, questions, rewards, lengths, seed=seed)[0],
        overall(suite, questions, _counted(questions, lambda text: len(_MARKDOWN.findall(text)))),
        length_matched(questions, rewards, seed=seed),
        sum(bool(np.isnan(own).any()) for own in rewards),
    )


def difference(
    suite: Suite, questions: Sequence[Question], first: Rewards, second: Rewards, *, seed: int = 0
) -> tuple[MetricValue, float | None]:
    """Overall score of the first model minus that of the second on the same draws of prompts; and its p value."""
    cluster, number = clusters(questions)
    both = [suite.scores(questions, rewards) for rewards in (first, second)]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        a, b = (scores(weights[:, cluster])[OVERALL] for scores in both)
        return {OVERALL: a - b}

    found = cluster_bootstrap(compute, number, num_resamples=RESAMPLES, seed=seed, row_size=len(questions))
    replicates = found.replicates.get(OVERALL)
    return _of_difference(found.point[OVERALL], replicates, number, len(questions))


def _of_difference(
    value: float, replicates: FloatArray | None, num_prompts: int, num_questions: int
) -> tuple[MetricValue, float | None]:
    """A difference with its interval and p value, or with the reason why there is none."""
    if np.isnan(value):
        return MetricValue(None, None, None, num_questions, UNDEFINED), None
    if replicates is not None and len(np.unique(replicates[~np.isnan(replicates)])) < 2:
        why = "it is the same in every draw of prompts, which says nothing about others"
        return MetricValue(value, None, None, num_questions, why), None
    shown = metric_value(value, replicates, num_prompts=num_prompts, num_pairs=num_questions)
    p = interval_p(replicates, num_prompts)
    if p is not None and replicates is not None:
        # Of 2,000 draws the smallest p is 0.001, which a family of fifty makes 0.05. Where no draw is beyond zero,
        # the tail is that of a t distribution with the draws' spread.
        defined = replicates[~np.isnan(replicates)]
        if np.all(defined > 0) or np.all(defined < 0):
            p = min(p, float(2 * special.stdtr(num_prompts - 1, -abs(value) / defined.std(ddof=1))))
    return shown, p


def difference_from_score(
    suite: Suite, questions: Sequence[Question], rewards: Rewards, published: float, *, seed: int = 0
) -> tuple[MetricValue, float | None]:
    """Overall score of a model minus a published one, of which only the number is known; and its p value.

    The published model is taken to be as uncertain as this one and independent of it, which is wide: models find the
    same questions hard.
    """
    cluster, number = clusters(questions)
    scores = suite.scores(questions, rewards)
    found = cluster_bootstrap(
        lambda weights: {OVERALL: scores(weights[:, cluster])[OVERALL]},
        number, num_resamples=RESAMPLES, seed=seed, row_size=len(questions),
    )  # fmt: skip
    own, replicates = found.point[OVERALL], found.replicates.get(OVERALL)
    if replicates is not None:
        other = published + np.random.default_rng(seed).permutation(replicates - own)
        replicates = replicates - other
    return _of_difference(own - published, replicates, number, len(questions))


def length_matched(questions: Sequence[Question], rewards: Rewards, *, seed: int = 0) -> MetricValue:
    """Share of a right and a wrong answer to one question, of about the same length, with the right one above.

    About the same: they differ by less than 15 % of the longer one's characters. All such pairs count alike.
    """
    right, there = np.zeros(len(questions)), np.zeros(len(questions))
    for place, (one, own) in enumerate(zip(questions, rewards, strict=True)):
        chars = np.array([len(text) for text in one.answers], dtype=np.float64)
        good, bad = np.split(chars, [one.num_good])
        alike = np.abs(good[:, None] - bad) < LENGTH_MATCHED * np.maximum(good[:, None], bad)  # (good, bad)
        above = own[: one.num_good, None] > own[one.num_good :]
        right[place], there[place] = (alike & above).sum(), alike.sum()
    cluster, number = clusters(questions)
    found = cluster_bootstrap(
        lambda weights: {OVERALL: ratio(weights[:, cluster] @ right, weights[:, cluster] @ there)},
        number, num_resamples=RESAMPLES, seed=seed, row_size=len(questions),
    )  # fmt: skip
    if not there.any():
        return MetricValue(None, None, None, 0, "no right and wrong answer of about the same length")
    return metric_value(
        found.point[OVERALL],
        found.replicates.get(OVERALL),
        num_prompts=len(np.unique(cluster[there > 0])),
        num_pairs=int(there.sum()),
        is_share=True,
    )


def without(suite: Suite, questions: Sequence[Question], rewards: Rewards, left_out: BoolArray) -> float | None:
    """Overall score without some questions (Q,); None where the rest does not define it, as where a group is gone."""
    kept = [place for place in range(len(questions)) if not left_out[place]]
    if {questions[place].group for place in kept} != {one.group for one in questions}:
        return None
    return overall(suite, [questions[place] for place in kept], [rewards[place] for place in kept])


def _value(suite: Suite, name: str, found: Resampled, questions: Sequence[Question], cluster: IntArray) -> MetricValue:
    parts = suite.parts.get(name, (name,))
    own = [place for place, one in enumerate(questions) if one.group in parts] or list(range(len(questions)))
    if np.isnan(found.point[name]):
        return MetricValue(None, None, None, len(own), UNDEFINED)
    return metric_value(
        found.point[name],
        found.replicates.get(name),
        num_prompts=len(np.unique(cluster[own])),
        num_pairs=len(own),
        is_share=name != TIES,
    )


def _counted(questions: Sequence[Question], count: Callable[[str], int]) -> list[FloatArray]:
    return [np.array([count(text) for text in one.answers], dtype=np.float64) for one in questions]


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
