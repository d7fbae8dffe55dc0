"""Contamination: which questions of a benchmark have the prompt of a training pair.

Prompts are compared as splits compare them, and without the punctuation around words
(`rmcore.data.splits.compared_prompt`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import BoolArray
from rmcore.core.progress import Report, silent
from rmcore.data.splits import compared_prompt
from rmcore.data.tokenized import Pairs
from rmcore.suites.question import Question

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Overlap:
    """Questions of a set and training pairs that share a prompt."""

    seen: BoolArray
    """(Q,) questions whose prompt is that of a training pair."""
    answers: BoolArray
    """(Q,) of these, questions of which a training pair with their prompt has an answer, too."""
    pairs: BoolArray
    """(P,) training pairs with the prompt of a question."""


def find_overlap(pairs: Pairs, questions: Sequence[Question], *, report: Report = silent) -> Overlap:
    """Compare the prompts of P training pairs with those of a benchmark's Q questions; the pairs are read once."""
    asked: dict[str, list[int]] = {}
    for place, one in enumerate(questions):
        asked.setdefault(compared_prompt(one.prompt), []).append(place)
    seen, answered = np.zeros(len(questions), dtype=bool), np.zeros(len(questions), dtype=bool)
    shared = np.zeros(len(pairs), dtype=bool)
    for number, pair in enumerate(pairs):
        for place in asked.get(compared_prompt(pair.prompt), ()):
            seen[place] = shared[number] = True
            answered[place] |= not {pair.chosen, pair.rejected}.isdisjoint(questions[place].answers)
        if number % _BATCH == 0:
            report(number, len(pairs), "comparing prompts with those of training")
    report(len(pairs), len(pairs), "comparing prompts with those of training")
    return Overlap(seen, answered, shared)
