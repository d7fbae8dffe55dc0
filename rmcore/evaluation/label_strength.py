"""How good the labelled answers of one prompt are, from the pairs that compare some of them.

Least squares on the graph of comparisons: the ratings s that leave the least of sum (s_better - s_worse - difference)^2
(Massey 1997; HodgeRank, Jiang et al. 2011, arXiv:0811.1067). Annotated margins that are differences of one score are
given back exactly, whichever pairs were annotated. Where there are outcomes alone each counts as a difference of one:
then the ratings are an order with a scale of its own, on complete designs that of (wins - losses) / K. (A Bradley-Terry
fit has none for an answer that never lost.)

What such ratings assume: that preferences are transitive and add up along the paths between two answers. Nothing tests
it where the pairs of a prompt form no loop, and one wrong label in a chain moves everything beyond it. Answers that no
pair tells apart come out equal, which says that they were not compared, not that they are equally good.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rmcore.core.arrays import FloatArray, IntArray

_ROUNDING = 1e-9
"""Share of the largest difference within which two ratings are one: labels that tie must not be told apart."""


@dataclass(frozen=True, slots=True)
class Ratings:
    """The answers of one prompt that its pairs connect.

    Attributes:
        answers: (K,) which of the given answers they are, ascending.
        strength: (K,) ratings with mean 0, in the unit of the differences.
        num_pairs: pairs among them.
        num_agreeing: of these, how many the ratings order as labelled.
        num_loops: pairs beyond those that it takes to connect them: as many could contradict the others.
    """

    answers: IntArray
    strength: FloatArray
    num_pairs: int
    num_agreeing: int
    num_loops: int


def rate_answers(better: IntArray, worse: IntArray, differences: FloatArray, size: int) -> Ratings:
    """Rate the largest part of a prompt's answers that is connected by its pairs.

    Answers of other parts have no place on the same scale. Of parts with equally many answers, the one with the lowest
    answer is taken.

    Args:
        better: (P,) the preferred answer of each pair, 0 to size-1.
        worse: (P,) the other one.
        differences: (P,) by how much it is better, finite.
        size: number of answers.
    """
    _, part = connected_components(coo_array((np.ones(len(better)), (better, worse)), shape=(size, size)))
    answers = np.flatnonzero(part == np.argmax(np.bincount(part))).astype(np.int64)
    inside = part[better] == part[answers[0]]
    place = np.zeros(size, dtype=np.int64)
    place[answers] = np.arange(len(answers))
    high, low, given = place[better[inside]], place[worse[inside]], differences[inside]
    strength = _merged(_least_squares(high, low, given, len(answers)), _ROUNDING * float(np.abs(given).max(initial=0)))
    agreeing = int(np.count_nonzero(strength[high] > strength[low]))
    return Ratings(answers, strength, len(given), agreeing, len(given) - len(answers) + 1)


def _least_squares(high: IntArray, low: IntArray, differences: FloatArray, size: int) -> FloatArray:
    """Ratings (size,) of mean 0; the Laplacian of a connected graph is singular along the constant alone."""
    laplacian = np.full((size, size), 1 / size)
    np.add.at(laplacian, (high, high), 1.0)
    np.add.at(laplacian, (low, low), 1.0)
    np.add.at(laplacian, (high, low), -1.0)
    np.add.at(laplacian, (low, high), -1.0)
    net = np.bincount(high, differences, size) - np.bincount(low, differences, size)
    return np.asarray(np.linalg.solve(laplacian, net))


def _merged(ratings: FloatArray, tolerance: float) -> FloatArray:
    """Ratings within `tolerance` of their neighbour become their mean."""
    order = np.argsort(ratings, kind="stable")
    group = np.concatenate([[0], np.cumsum(np.diff(ratings[order]) > tolerance)])
    merged = np.empty_like(ratings)
    merged[order] = (np.bincount(group, ratings[order]) / np.bincount(group))[group]
    return merged
