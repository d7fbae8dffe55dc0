"""The size of an experiment that would decide a claim, from one that did not: how many seeds, or how many prompts."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import special

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.verdicts.estimate import Estimate
from rmcore.evaluation.verdicts.intervals import Component, Components, half_widths_to_come

POWER = 0.8
MOST_SEEDS = 1000
"""Nobody trains more, and what is left is the prompts' error. Reports call it a thousand."""
_MOST_PROMPTS = 10**9
_FEWEST_SEEDS = 2


class DecidingSize(NamedTuple):
    """Seeds that would decide a claim, or prompts where seeds alone would not."""

    seeds: int | None
    """Of each arm, on as many prompts as there are; None: no number of them up to MOST_SEEDS."""
    prompts: int | None
    """Prompts that at least are needed, with MOST_SEEDS seeds; None where seeds are enough, or prompts are not known to
    be what it lacks."""


def deciding_size(estimate: Estimate, borders: Sequence[float], *, alpha: float) -> DecidingSize | None:
    """Give the size at which a claim is decided with 80 % power, were the truth exactly what was measured.

    The variance over seeds falls with their number, that over prompts with theirs; how both will be estimated then is
    integrated over. The truth is not what was measured: a value that came out near the threshold by luck makes the
    size too large, one that came out far from it too small.

    Args:
        estimate: of a claim that is undecided.
        borders: where what is claimed ends: the threshold, or both ends, rising.
        alpha: level of the test that has to decide it.

    Returns:
        None where nothing is known of the spread over seeds: one seed, or no interval.
    """
    if estimate.spread is None or estimate.num_seeds < _FEWEST_SEEDS:
        return None
    over_seeds, *over_prompts = estimate.spread.components

    def power(num_seeds: int, num_prompts: int | None) -> float:
        one_seed = over_seeds.variance * estimate.num_seeds
        parts = [Component(one_seed / num_seeds, num_seeds - 1)]
        if over_prompts and num_prompts is not None and estimate.num_prompts is not None:
            one_prompt = over_prompts[0].variance * estimate.num_prompts
            parts.append(Component(one_prompt / num_prompts, num_prompts - 1))
        return power_to_decide(estimate.value, borders, parts, alpha=alpha)

    here = estimate.num_prompts
    # These data did not decide it, so fewer or as many do not, whatever luck their own spread had.
    seeds = _fewest(lambda num_seeds: power(num_seeds, here) >= POWER, estimate.num_seeds + 1, MOST_SEEDS)
    if seeds is not None or not over_prompts or here is None:
        return DecidingSize(seeds, None)
    return DecidingSize(None, _fewest(lambda prompts: power(MOST_SEEDS, prompts) >= POWER, here + 1, _MOST_PROMPTS))


def power_to_decide(truth: float, borders: Sequence[float], components: Components, *, alpha: float) -> float:
    """Probability that an experiment puts its whole interval on the truth's side of the border, or between the two.

    Args:
        truth: of the quantity; on a border, nothing can be decided and the power is 0.
        borders: one, or two rising.
        components: the error that the experiment will have.
        alpha: level of its interval.
    """
    if truth in borders:
        return 0.0
    deviation = math.sqrt(sum(component.variance for component in components))
    if deviation == 0:
        return 1.0
    halves = half_widths_to_come(components, alpha=alpha)

    def clears(distance: float) -> FloatArray:
        """Chance, by half-width, that the interval ends before a border at this distance from the truth."""
        chances: FloatArray = special.ndtr((distance - halves) / deviation)
        return chances

    low, high = borders[0], borders[-1]
    if low < truth < high:
        return float((clears(truth - low) + clears(high - truth) - 1.0).clip(min=0.0).mean())
    return float(clears(max(truth - high, low - truth)).mean())


def _fewest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The fewest from `low` on that are enough, where more are, too; None where `high` are not."""
    if low > high or not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
