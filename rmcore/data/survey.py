"""A survey of observations: their kinds, ties, scales of grades. The likelihood is made to measure.

It is taken once, of the training split, and kept with the model: a held-out grade is read on the training scale.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rmcore.data.observation import Kind, Observation

Link = Literal["binary", "ordinal", "real"]
"""Two levels, several, or numbers on a line."""
MOST_LEVELS = 11
"""Whole numbers and halves of more different values than this (0 to 10) are real grades."""
OVERALL_GRADES = ("overall", "helpfulness", "score", "rating", "quality", "grade")
"""Grades of an answer as a whole: the first one that is there says alone what better means."""
SCALINGS = 100
LARGEST_TIE = 8
"""Answers that may be called equal at once; an observation with more is set aside."""


@dataclass(frozen=True)
class Scale:
    """The grades of one attribute, as the training data have them.

    Attributes:
        attribute: its name.
        link: which likelihood they have.
        levels: the grades that occur, rising; empty for real ones.
        shares: how often each level occurs in training, summing to 1; empty for real ones.
        mean: of the training grades; real ones are standardised by it and `deviation`.
        deviation: their standard deviation.
    """

    attribute: str
    link: Link
    levels: tuple[float, ...]
    shares: tuple[float, ...]
    mean: float
    deviation: float

    def code(self, grade: float) -> float | None:
        """A grade as the likelihood takes it: number of its level, or standardised; None: it is not on the scale."""
        if self.link == "real":
            return (grade - self.mean) / self.deviation
        return float(self.levels.index(grade)) if grade in self.levels else None

    @classmethod
    def of(cls, attribute: str, counts: Mapping[float, int]) -> "Scale | None":
        """Take the scale of the grades that occur so often; None: they are all the same, so they say nothing."""
        if len(counts) < 2:
            return None
        levels = sorted(counts)
        total = sum(counts.values())
        mean = sum(level * count for level, count in counts.items()) / total
        deviation = math.sqrt(sum(count * (level - mean) ** 2 for level, count in counts.items()) / total)
        discrete = len(levels) == 2 or (
            len(levels) <= MOST_LEVELS and all((2 * level).is_integer() for level in levels)
        )
        link: Link = "real" if not discrete else "binary" if len(levels) == 2 else "ordinal"
        shares = tuple(counts[level] / total for level in levels) if discrete else ()
        return cls(attribute, link, tuple(levels) if discrete else (), shares, mean, deviation)


@dataclass(frozen=True)
class Survey:
    """A survey of N observations.

    Attributes:
        kinds: how many there are of each kind.
        tie_odds: how readily 1, 2, 3, ... answers are called equal, against one alone, if all were equally good; the
            first is 1.
        scales: of the graded attributes that have more than one value, by name.
        single_valued: attributes whose grades are all the same.
        num_weighted: observations whose weight is not 1.
    """

    kinds: Mapping[str, int] = field(default_factory=dict)
    tie_odds: tuple[float, ...] = (1.0,)
    scales: tuple[Scale, ...] = ()
    single_valued: tuple[str, ...] = ()
    num_weighted: int = 0

    @property
    def has_choices(self) -> bool:
        """Whether anything was ranked."""
        return any(count for kind, count in self.kinds.items() if kind != Kind.GRADES)


def survey(observations: Iterable[Observation]) -> Survey:
    """Look through the observations once."""
    kinds: Counter[str] = Counter()
    chosen: Counter[int] = Counter()
    among: Counter[int] = Counter()
    grades: dict[str, Counter[float]] = {}
    num_weighted = 0
    for one in observations:
        kinds[str(one.kind)] += 1
        num_weighted += one.weight != 1
        if one.ranks is not None and not one.top_only:
            left = len(one.ranks)
            for _, size in sorted(Counter(one.ranks).items()):
                if left > 1 and size <= LARGEST_TIE:  # the last one alone is no choice
                    chosen[size] += 1
                    among[left] += 1
                left -= size
        for attribute, given in one.grades.items():
            grades.setdefault(attribute, Counter()).update(grade for grade in given if grade is not None)
    scales = {name: Scale.of(name, counts) for name, counts in sorted(grades.items())}
    return Survey(
        kinds=dict(kinds),
        tie_odds=_tie_odds(chosen, among),
        scales=tuple(scale for scale in scales.values() if scale is not None),
        single_valued=tuple(name for name, scale in scales.items() if scale is None),
        num_weighted=num_weighted,
    )


def _tie_odds(chosen: Mapping[int, int], left: Mapping[int, int]) -> tuple[float, ...]:
    """The most likely odds if all answers were equally good: delta_t of `rmcore.training.likelihood`.

    Of n answers, t are chosen at once with probability delta_t C(n, t) / Z(n). The odds are those whose expected counts
    are the counts, by iterative scaling (Darroch and Ratcliff 1972).

    Args:
        chosen: t -> how often so many were chosen at once.
        left: n -> how often a choice was made among so many.
    """
    sizes = range(1, max(chosen, default=1) + 1)
    counts = {size: chosen.get(size, 0) + 0.5 for size in sizes}  # half a choice more, so that none is impossible
    odds = dict.fromkeys(sizes, 1.0)
    for _ in range(SCALINGS):
        totals = {n: sum(odds[size] * math.comb(n, size) for size in sizes) for n in left}
        expected = {size: sum(left[n] * math.comb(n, size) / totals[n] for n in left) for size in sizes}
        odds = {size: counts[size] / expected[size] if expected[size] else 1.0 for size in sizes}
        odds = {size: value / odds[1] for size, value in odds.items()}
    return tuple(odds.values())


def better_weights(attributes: Sequence[str], asked: Mapping[str, float] | None) -> dict[str, float]:
    """Weights of the attributes in what "better" means, for those of which it is not 0.

    As requested; else the first of `OVERALL_GRADES` that is there alone; else all alike, summing to 1.

    Args:
        attributes: names of those that are graded.
        asked: `data.attribute_weights`.
    """
    if asked is not None:
        return {name: weight for name, weight in asked.items() if weight and name in attributes}
    preferred = next((name for name in OVERALL_GRADES if name in attributes), None)
    if preferred is not None:
        return {preferred: 1.0}
    return {name: 1 / len(attributes) for name in attributes}
