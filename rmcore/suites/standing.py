"""Models side by side on the same questions: paired differences, and places with ties.

A place is one more than the number of models that are shown to be better, so models that cannot be told apart may
share one. All differences of all models on all benchmarks are one family (Holm), because all of them are looked at.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rmcore.core.errors import ConfigError
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.suites.measure import difference, difference_from_score
from rmcore.suites.question import Rewards
from rmcore.suites.sets import SUITES, QuestionSet

BETTER, WORSE, SAME = "better", "worse", "cannot be told apart"
LEAST_SCORE, MOST_SCORE = -0.01, 1.01
"""Ends of what a score can be: those of Ties."""
LEVEL = 0.05
"""Familywise level of all differences together."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Overall score of the first model minus that of the second."""

    suite: str
    first: str
    second: str
    value: MetricValue
    p: float | None
    """Two-sided; None where there is no interval."""
    p_adjusted: float = 1.0
    """After Holm's correction over the family."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `cannot be told apart`."""
        if self.value.value is None or self.p_adjusted >= LEVEL:
            return SAME
        return BETTER if self.value.value > 0 else WORSE


def read_published(file: Path) -> dict[str, dict[str, float]]:
    """Read published scores: {"model": {"benchmark": overall score from 0 to 1}}.

    Raises:
        ConfigError: it cannot be read, or has another form.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}.") from error
    is_right = isinstance(found, dict) and all(
        isinstance(scores, dict) and all(_is_score(one) for one in scores.values()) for scores in found.values()
    )
    if not found or not is_right:
        raise ConfigError(
            f'{file} does not hold published scores: write {{"model": {{"judgebench": 0.643}}}}, scores as shares '
            "of 1, not per cent."
        )
    return found


def require_known(published: Mapping[str, Mapping[str, float]], sets: Sequence[QuestionSet]) -> None:
    """Refuse published scores on a benchmark of another name, which would be compared with nothing.

    Raises:
        ConfigError: there are some.
    """
    known = {*SUITES, *(one.suite.name for one in sets)}
    if unknown := sorted({name for scores in published.values() for name in scores} - known):
        raise ConfigError(
            f"published scores are on {', '.join(unknown)}, which is no benchmark that is known here or measured; the "
            f"names are {', '.join(sorted(known))}."
        )


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST_SCORE <= value <= MOST_SCORE


def compare_models(
    sets: Sequence[QuestionSet], rewards: Mapping[str, Sequence[Rewards]], published: Mapping[str, Mapping[str, float]]
) -> list[Difference]:
    """Compare every two models on every benchmark that both have a score on.

    Of a published score only the number is known: see `difference_from_score`. Two published ones are not compared.

    Args:
        sets: the benchmarks; on one that is not whole, published scores are not compared.
        rewards: of each model on each of them.
        published: overall scores of further models, by benchmark.
    """
    found: list[Difference] = []
    for place, one in enumerate(sets):
        name = one.suite.name
        for first, second in itertools.combinations(rewards, 2):
            both = rewards[first][place], rewards[second][place]
            found.append(Difference(name, first, second, *difference(one.suite, one.questions, *both)))
        # A part of a set has no score that a published one can be compared with.
        for second, scores in published.items() if not one.missing else ():
            for first in rewards if name in scores else ():
                value, p = difference_from_score(one.suite, one.questions, rewards[first][place], scores[name])
                found.append(Difference(name, first, second, value, p))
    tested = [one for one in found if one.p is not None]
    adjusted = dict(zip(map(id, tested), holm([one.p for one in tested if one.p is not None]), strict=True))
    return [replace(one, p_adjusted=adjusted.get(id(one), 1.0)) for one in found]


def places(suite: str, scores: Mapping[str, float], differences: Sequence[Difference]) -> dict[str, int]:
    """Give each model its place on a benchmark, the best first: 1 + the number of those that are shown to be better."""
    better: Counter[str] = Counter()
    for one in differences:
        if one.suite == suite and one.verdict != SAME:
            better[one.second if one.verdict == BETTER else one.first] += 1
    ordered = sorted(scores, key=lambda model: (better[model], -scores[model]))
    return {model: 1 + better[model] for model in ordered}
