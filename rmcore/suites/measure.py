"""Rewards of a benchmark's answers, and its scores with intervals beside those of rules that read no text.

The rules are scored as models are: the number of characters, and the number of Markdown marks, stand in for rewards.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.evaluation.uncertainty import MetricValue, Resampled, cluster_bootstrap, interval_p, metric_value
from rmcore.models.reward_model import refuse_not_finite
from rmcore.suites.pairwise import JUDGE_BENCH, LLMBAR, REWARD_BENCH, RMB
from rmcore.suites.question import OVERALL, Question, Rewards, Suite, clusters
from rmcore.suites.reward_bench_2 import REWARD_BENCH_2, TIES
from rmcore.suites.rm_bench import RM_BENCH

SUITES = {one.name: one for one in (REWARD_BENCH, REWARD_BENCH_2, RM_BENCH, LLMBAR, JUDGE_BENCH, RMB)}
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
        _overall(suite, questions, lengths),
        difference(suite, questions, rewards, lengths, seed=seed)[0],
        _overall(suite, questions, _counted(questions, lambda text: len(_MARKDOWN.findall(text)))),
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
    if np.isnan(found.point[OVERALL]):
        return MetricValue(None, None, None, len(questions), UNDEFINED), None
    value = metric_value(found.point[OVERALL], replicates, num_prompts=number, num_pairs=len(questions))
    return value, interval_p(replicates, number)


def _value(suite: Suite, name: str, found: Resampled, questions: Sequence[Question], cluster: IntArray) -> MetricValue:
    groups = suite.parts.get(name, (name,) if name in suite.expected else tuple(suite.expected))
    own = [place for place, one in enumerate(questions) if one.group in groups]
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


def _overall(suite: Suite, questions: Sequence[Question], rewards: Rewards) -> float | None:
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
