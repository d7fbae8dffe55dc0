"""The size of a study that would decide a claim, from one that did not: how many seeds, or how many prompts."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import special

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.verdicts.estimate import Estimate
from rmcore.evaluation.verdicts.intervals import POWER, Component, Components, TInterval, half_widths_to_come

MOST_SEEDS = 1000
"""Nobody trains more. Reports call it a thousand."""
FEWEST_SEEDS = 5
"""Fewer know their variance too badly to plan by, and their intervals may borrow from other arms."""
_MOST_PROMPTS = 10**9


class DecidingSize(NamedTuple):
    """Two studies, either of which would decide a claim."""

    seeds: int | None
    """Seeds of each arm on the same prompts; None: not even MOST_SEEDS."""
    prompts: int | None
    """Other prompts with as many seeds as there were; None: no number of them, or the quantity has none."""


def deciding_size(estimate: Estimate, borders: Sequence[float], *, alpha: float = 0.05) -> DecidingSize | None:
    """Give the sizes at which a new study, judged once, decides a claim with 80 % power, were it as measured.

    More seeds: these prompts stay, and with them what they do to the value. The news is of seeds alone, but the
    interval holds the prompts' part, and no number of seeds comes nearer to a border than its half-width. More prompts:
    their part shrinks, and so does that of seed and prompt together within the seeds' part; all of it is drawn again.
    How each variance will be estimated then is integrated over.

    It is a plan by what was measured, no more: a value that lies near the border by luck asks for too much, one that
    lies far from it for too little.

    Args:
        estimate: of a claim that is undecided.
        borders: where what is claimed ends: the threshold, or both ends, rising.
        alpha: level of the interval that has to lie on one side.

    Returns:
        None where the spread over seeds is not known well enough: fewer than FEWEST_SEEDS, or no interval.
    """
    spread = estimate.spread
    if not isinstance(spread, TInterval) or estimate.num_seeds < FEWEST_SEEDS:
        return None
    over_seeds, *over_prompts = spread.components

    def decides_by_seeds(num_seeds: int) -> bool:
        seeds = Component(over_seeds.variance * estimate.num_seeds / num_seeds, num_seeds - 1)
        halves = half_widths_to_come((seeds, *over_prompts), alpha=alpha)
        return power_to_decide(estimate.value, borders, halves, math.sqrt(seeds.variance)) >= POWER

    def decides_by_prompts(num_prompts: int) -> bool:
        times = (estimate.num_prompts or 0) / num_prompts
        alone = over_seeds.variance - spread.together
        seeds = Component(max(alone, 0.0) + spread.together * times, estimate.num_seeds - 1)
        parts: Components = (seeds, Component(over_prompts[0].variance * times, num_prompts - 1))
        halves = half_widths_to_come(parts, alpha=alpha)
        deviation = math.sqrt(sum(part.variance for part in parts))
        return power_to_decide(estimate.value, borders, halves, deviation) >= POWER

    seeds = _fewest(decides_by_seeds, FEWEST_SEEDS, MOST_SEEDS)
    return DecidingSize(seeds, _fewest(decides_by_prompts, 2, _MOST_PROMPTS) if over_prompts else None)


def power_to_decide(truth: float, borders: Sequence[float], halves: FloatArray, deviation: float) -> float:
    """Probability that an interval lies wholly on the truth's side of the border, or between the two.

    Args:
        truth: the mean of the estimates to come; on a border, nothing can be decided and the power is 0.
        borders: one, or two rising.
        halves: half-widths that the interval may have, equally likely.
        deviation: standard deviation of the estimates to come.
    """
    if truth in borders:
        return 0.0

    def clears(distance: float) -> FloatArray:
        """Chance, by half-width, that the interval ends before a border at this distance from the truth."""
        room = distance - halves
        chances: FloatArray = special.ndtr(room / deviation) if deviation else (room > 0).astype(float)
        return chances

    low, high = borders[0], borders[-1]
    if low < truth < high:
        return float((clears(truth - low) + clears(high - truth) - 1.0).clip(min=0.0).mean())
    return float(clears(max(truth - high, low - truth)).mean())


def _fewest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The fewest from `low` on that are enough, where more are, too; None where `high` are not."""
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
