"""An observation: what one judgement says of the answers to one prompt. Every kind of preference data becomes this.

| kind | answers | what is known |
| --- | --- | --- |
| pair | 2 | ranks 1 and 2 |
| tie | 2 | ranks 1 and 1 |
| ranking | 3 or more | a rank for each answer, 1 is best; equal ranks are ties |
| best of K | 3 or more | which one is best, nothing of the order of the others |
| grades | 1 or more | numbers for the answers, of one or several attributes; some may be missing |

A file of strict pairs alone needs none of this and keeps its `PreferencePair` records. Where a file says more, its
pairs are what its observations imply, for what can only be said of pairs: pairwise accuracy, curvature, readiness.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair, Prompt, content_id, is_blank, opening, prompt_text

ANNOTATOR = "annotator"
"""Where a pair's metadata have who labelled it."""
ANNOTATORS = (ANNOTATOR, "annotator_id", "judge")
"""Columns that say who judged, and so the names in a pair's metadata; the first one that is there counts."""
WEIGHT = "judgement_weight"
"""Name, in a pair's metadata, of how often a judgement counts: what `data.weight_column` names. A column that is merely
called weight may be of anything."""
OVERALL = "overall"
"""Name of the attribute of a file that grades answers as a whole."""
Grades = tuple[float | None, ...]
"""A grade for each answer; None where it was not graded."""


def annotator_of(carried: Mapping[str, Any]) -> str | None:
    """Who judged, from the columns of a row or the metadata of a pair; None where nobody is named."""
    for name in ANNOTATORS:
        who = carried.get(name)
        if isinstance(who, float) and who.is_integer():  # a column of whole numbers with gaps is read as such
            who = int(who)
        if isinstance(who, str | int) and not isinstance(who, bool) and not is_blank(str(who)):
            return str(who)
    return None


class Kind(StrEnum):
    """Which likelihood an observation has; see the table above."""

    PAIR = "pair"
    TIE = "tie"
    RANKING = "ranking"
    BEST = "best of K"
    GRADES = "grades"


def kind_of(ranks: tuple[int, ...] | None, *, top_only: bool) -> Kind:
    """Tell the kind of a judgement; without ranks it is of grades."""
    if ranks is None:
        return Kind.GRADES
    if len(ranks) == 2:
        return Kind.TIE if ranks[0] == ranks[1] else Kind.PAIR
    return Kind.BEST if top_only else Kind.RANKING


@dataclass(frozen=True, slots=True)
class Observation:
    """One judgement of K answers to one prompt: either ranks, or grades of one or several attributes.

    Attributes:
        prompt: what was answered.
        answers: (K,) texts, all different.
        ranks: (K,) 1 is best, equal ranks are ties; None where answers were graded.
        top_only: of the ranks only 1 means something: who is best, not how the others compare.
        grades: attribute -> (K,) grades; empty where answers were ranked.
        annotator: who judged, where that is known.
        weight: how often the judgement counts.
        metadata: whatever else the record carried.
        observation_id: left out, a digest of prompt, answers, judgement and annotator.

    Raises:
        DataError: see the messages: it says nothing, contradicts itself, or cannot be scored.
    """

    prompt: Prompt
    answers: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    top_only: bool = False
    grades: Mapping[str, Grades] = field(default_factory=dict)
    annotator: str | None = None
    weight: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    observation_id: str = ""

    def __post_init__(self) -> None:
        if is_blank(prompt_text(self.prompt)) or any(map(is_blank, self.answers)):
            raise DataError("a prompt or an answer is empty: nothing can be scored. Drop the row.")
        if len(set(self.answers)) != len(self.answers):
            raise DataError("two of the answers are the same text, which cannot be told apart. Drop one of them.")
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise DataError(f"weight={self.weight:g} is no finite number above 0: drop the row, or weight it.")
        if (self.ranks is None) == (not self.grades):
            raise DataError("an observation has either ranks or grades: split the row into two, or drop it.")
        if self.ranks is not None:
            self._check_ranks(self.ranks)
        for attribute, grades in self.grades.items():
            if len(grades) != len(self.answers):
                raise DataError(f"{len(grades)} grades of {attribute} for {len(self.answers)} answers: give one each.")
            if not all(grade is None or math.isfinite(grade) for grade in grades):
                raise DataError(f"a grade of {attribute} is not a finite number: leave it out where it is missing.")
        if self.grades and not self.num_terms:
            raise DataError("no answer is graded: the row says nothing. Drop it.")
        if not self.observation_id:
            said = repr((self.ranks, self.top_only, sorted(self.grades.items()), self.annotator))
            identity = content_id(prompt_text(self.prompt), *self.answers, said)
            object.__setattr__(self, "observation_id", identity)

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) != len(self.answers):
            raise DataError(f"{len(ranks)} ranks for {len(self.answers)} answers: give one each.")
        if len(ranks) < 2:
            raise DataError("a ranking of one answer says nothing. Drop the row.")
        if min(ranks) != 1:
            raise DataError(f"the best rank is {min(ranks)}, not 1: ranks count from 1, 1 is best.")
        if self.top_only and ranks.count(1) != 1:
            raise DataError(f"{ranks.count(1)} answers are the best one: name exactly one, or give all ranks.")

    @classmethod
    def of_pair(cls, pair: PreferencePair) -> "Observation":
        """Take the strict preference of a pair; its annotator and its weight are in the pair's metadata.

        Raises:
            DataError: the weight is no number, or not above 0.
        """
        weight = pair.metadata.get(WEIGHT)
        try:
            counts = 1.0 if weight in (None, "") else float(weight)
        except (TypeError, ValueError) as error:
            raise DataError(f"weight={weight!r} of pair {pair.pair_id} is no number: correct or drop it.") from error
        return cls(
            pair.prompt,
            (pair.chosen, pair.rejected),
            ranks=(1, 2),
            annotator=annotator_of(pair.metadata),
            weight=counts,
            metadata=pair.metadata,
            observation_id=pair.pair_id,
        )

    @property
    def kind(self) -> Kind:
        """Which likelihood it has."""
        return kind_of(self.ranks, top_only=self.top_only)

    @property
    def num_terms(self) -> int:
        """How many terms of the likelihood it has: 1 for ranks, else one for each grade that was given."""
        if self.ranks is not None:
            return 1
        return sum(grade is not None for grades in self.grades.values() for grade in grades)

    @property
    def prompt_id(self) -> str:
        """Digest of what the prompt's conversation began with: the unit that intervals are drawn over."""
        return content_id(opening(self.prompt))
