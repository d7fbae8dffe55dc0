"""Things that a preference may follow and that are no quality: features of an answer that are
counted, not learned.

A reward model that is trained with `train.nuisance` has their part of the preference explained by a second, linear head
that sees nothing else, and the reward that is served is without it (ODIN, Chen et al. 2024, arXiv:2402.07319).
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.errors import DataError
from rmcore.data.observation import Observation

_MARKS = re.compile(r"^\s*(?:[-*+]|\d+\.)\s|^#{1,6}\s|\*\*|```", re.MULTILINE)


def _length(answer: str) -> float:
    return math.log1p(len(answer))


def _markdown(answer: str) -> float:
    return math.log1p(len(_MARKS.findall(answer)))


FEATURES: Mapping[str, Callable[[str], float]] = {"length": _length, "markdown": _markdown}
"""Logarithms of one more than: characters; marks of lists, headings, bold text and code."""


@dataclass(frozen=True)
class Feature:
    """A feature with its mean and standard deviation over the training answers, by which it is standardised."""

    name: str
    mean: float
    deviation: float

    def of(self, answer: str) -> float:
        """The standardised value of an answer."""
        return (FEATURES[self.name](answer) - self.mean) / self.deviation


def measure_features(observations: Iterable[Observation], names: Sequence[str]) -> tuple[Feature, ...]:
    """Take the features' means and deviations over all answers.

    Raises:
        DataError: all answers have the same value, so nothing can be explained by it.
    """
    if not names:
        return ()
    values = np.array(
        [[FEATURES[name](answer) for name in names] for one in observations for answer in one.answers]
    ).reshape(-1, len(names))
    means, deviations = values.mean(0), values.std(0)
    for name, deviation in zip(names, deviations, strict=True):
        if not deviation > 0:
            raise DataError(
                f"train.nuisance names {name}, and all answers have the same: it explains nothing. Leave it out."
            )
    return tuple(map(Feature, names, means.tolist(), deviations.tolist()))
