"""Looking at an experiment more than once: what each look may claim so that all of them together err no more than one.

More seeds are added in looks that are registered beforehand. Each spends a share of the error rate; what a look may
spend follows from how much of its estimate the looks before it have seen already. That is a lot: the seeds are added
to those before, and the prompts are the same, so a look costs less than Bonferroni's correction would have it.

An estimate from more seeds is one from fewer plus independent news, so over looks the estimate has independent
increments in its information 1 / variance, whatever part of the variance is the prompts', which no look reduces.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
from scipy import optimize, special

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.evaluation.verdicts.estimate import Estimate

_GRID = 201  # points of the region where no look has ended it: at most half of the least news apart
_LEAST_NEWS = 0.05  # standard deviation of a look's news, of the whole estimate's: less is taken as this much
_SMALLEST_ALPHA = 1e-12


def information(estimate: Estimate, num_seeds: Sequence[int]) -> list[float]:
    """Give 1 / variance that the estimate would have with each number of seeds; relative, the last one is 1.

    Args:
        estimate: from as many seeds as it says; its variance over seeds falls with their number, that over prompts does
            not.
        num_seeds: of the looks, rising.
    """
    over_seeds, *over_prompts = [] if estimate.spread is None else list(estimate.spread.components)
    fixed = sum(component.variance for component in over_prompts)
    one_seed = over_seeds.variance * estimate.num_seeds if estimate.spread is not None else 1.0
    variances = [one_seed / number + fixed for number in num_seeds]
    return [variances[-1] / variance if variance > 0 else 1.0 for variance in variances]


def look_levels(alpha: float, shares: Sequence[float], information: Sequence[float]) -> list[float]:
    """Give each look's two-sided level: up to look i a true claim is rejected with probability alpha shares[i].

    Args:
        alpha: error rate of all looks together.
        shares: of alpha that may be spent up to each look, rising to at most 1: the share of the seeds
            (Kim and DeMets' spending function with exponent 1).
        information: of each look's estimate, not falling; only ratios matter.

    Raises:
        ConfigError: shares or information are not such sequences, of one length.
    Source:
        Lan and DeMets 1983, Discrete sequential boundaries for clinical trials, Biometrika 70(3); Kim and DeMets 1987,
        Biometrika 74(1); Armitage, McPherson and Rowe 1969, JRSS A 132(2) (the recursion).
    """
    return list(_levels(alpha, tuple(shares), tuple(information)))


@lru_cache(maxsize=10_000)  # each look asks for those before it again
def _levels(alpha: float, shares: tuple[float, ...], information: tuple[float, ...]) -> tuple[float, ...]:
    steps = np.diff([0.0, *shares])
    if len(shares) != len(information) or (steps <= 0).any() or shares[-1] > 1 or (np.diff(information) < 0).any():
        raise ConfigError(
            f"look_levels got shares {list(shares)} and information {list(information)}: each look spends more than "
            "the one before, at most 1 in all, and knows at least as much. Pass looks in their order."
        )
    levels = [alpha * float(steps[0])]
    reach = -float(special.ndtri(levels[0] / 2))
    places = np.linspace(-reach, reach, _GRID)  # of the score, in units of the first look's sqrt(information)
    density = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi)
    for step, before, now in zip(steps[1:], information, information[1:], strict=False):
        news = math.sqrt(max((now - before) / information[0], _LEAST_NEWS**2))
        scale = math.sqrt(now / information[0])
        weights = density * _trapezoid(places)

        crossing = partial(_crossing, places=places, weights=weights, scale=scale, news=news)
        wanted = alpha * float(step)
        # Where the looks before have spent nearly all that this one knows, nothing that remains is beyond.
        bound = 0.0
        if crossing(0.0) > wanted:
            bound = float(optimize.brentq(lambda bound, of=crossing, wanted=wanted: of(bound) - wanted, 0.0, 40.0))
        levels.append(2 * float(special.ndtr(-bound)))
        reached = np.linspace(-bound * scale, bound * scale, _GRID)
        apart = (reached[:, None] - places) / news  # (G, G)
        density = (np.exp(-(apart**2) / 2) @ weights) / (news * math.sqrt(2 * math.pi))
        places = reached
    return tuple(levels)


def sequential_p(p_values: Sequence[float], shares: Sequence[float], information: Sequence[float]) -> float:
    """The smallest error rate of all looks together at which one of those taken so far would have rejected.

    It is a valid p value at whatever look one stops, so Holm's correction may be applied to it.

    Args:
        p_values: two-sided, one a look taken.
        shares: as in `look_levels`, of the looks taken.
        information: of the looks taken.

    Source:
        Liu and Anderson 2008, On adaptive extensions of group sequential trials for clinical investigations, Journal of
        the American Statistical Association 103(484): sequential p values.
    """

    def rejects(alpha: float) -> bool:
        return any(p <= level for p, level in zip(p_values, look_levels(alpha, shares, information), strict=True))

    if not rejects(1 - 1e-9):
        return 1.0
    low, high = math.log(_SMALLEST_ALPHA), 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _crossing(bound: float, *, places: FloatArray, weights: FloatArray, scale: float, news: float) -> float:
    """Probability that no look before has rejected and this one lies beyond `bound` standard errors."""
    edge = bound * scale
    return float(weights @ (special.ndtr((places - edge) / news) + special.ndtr((-places - edge) / news)))


def _trapezoid(places: FloatArray) -> FloatArray:
    weights: FloatArray = np.full(len(places), places[1] - places[0])
    weights[[0, -1]] /= 2
    return weights
