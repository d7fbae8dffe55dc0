"""How many judged prompts show a gain: the power of the interval that verdicts on samples rest on.

The lower end of that interval (`rmcore.evaluation.uncertainty.bounded_means`) is the 2.5 % quantile of a mean in which
N prompts, and one more that loses as much as the worst judged sample, have random weights. The N prompts add a normal
error of s / sqrt(N), the unseen one an exponential one of (worst + gain) / N. A gain is shown in 80 % of the
evaluations if both together stay below it in 97.5 % of the draws after 0.84 standard errors are taken off it.
"""

import math
from bisect import bisect_left
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from rmcore.policy.sampling.best_of_n import best_of_n_weights

GAIN_TO_SHOW = 0.2
"""Gain in sd for which a plan and the next step say how many prompts show it."""
POWER = 0.8
"""Share of the evaluations, "4 of 5", in which the lower end of the interval is above 0."""
FARTHER_OUT = 1.6
"""Times as far as of normal samples the worst one is out: 1.4 to 1.7 on judged samples of a real policy, whose prompts
differ in their spread (experiments/log/one-policy.md). A longer tail takes more prompts than is said before one is
judged."""
CAUTION = 1.2
"""Times as large as the formula has them both errors are taken: prompts differ in how well a reward model sees them,
and in tails the worst sample and the spread differ between evaluations. Set on other worlds than those of
`benchmarks/verdict_power.py`."""
CHOSEN_ALIKE = 0.7
"""Share of the variance over prompts that a perfect choice loses: the best of n normal samples differ less than one."""
MOST_PROMPTS = 1_000_000
_STEPS = range(1, 100_000)
"""Gains that are tried, in thousandths of a standard deviation."""


@lru_cache(maxsize=64)
def blind_spread(n: int, size: int) -> float:
    """Standard deviation over prompts of the gain of best-of-n among `size` samples, for a choice that knows nothing.

    In that of the true reward within prompts: sqrt(sum v^2 - 1 / size) for weights v of the samples.
    """
    if n == size:  # the best one has all the weight, however many there are
        return math.sqrt(1 - 1 / size)
    return math.sqrt(float((best_of_n_weights(np.arange(size, dtype=np.float64), n) ** 2).sum()) - 1 / size)


def perfect_gain(n: int) -> float:
    """Gain in sd of a choice of the best of n normal samples that knows the true reward.

    Source:
        Blom 1958, Statistical Estimates and Transformed Beta-Variables.
    """
    return float(ndtri((n - 0.375) / (n + 0.25)))


def usual_worst(num_prompts: int, size: int) -> float:
    """Deviations that the worst of all judged samples is below the mean of its prompt, before one is judged."""
    normal = -float(ndtri(1 / (num_prompts * size + 1))) * math.sqrt((size - 1) / size)
    return FARTHER_OUT * normal


def detectable_gain(num_prompts: int, n: int, size: int, worst: float | None = None) -> float:
    """Smallest gain of best-of-n, in sd, that prompts of `size` judged samples each show in 80 % of the evaluations.

    Args:
        num_prompts: independent ones, that are judged.
        n: of best-of-n.
        size: judged samples of each prompt, at least n.
        worst: standard deviations that the worst of all judged samples is below the mean of its prompt; None:
            `usual_worst`.
    """
    place = bisect_left(_STEPS, True, key=lambda step: _is_shown(step / 1000, num_prompts, n, size, worst))
    return (1 + place) / 1000


def prompts_to_detect(gain: float, n: int, size: int, worst: float | None = None) -> int:
    """Fewest prompts of `size` judged samples that show a gain in 80 % of the evaluations; see `detectable_gain`."""
    return 2 + bisect_left(range(2, MOST_PROMPTS), True, key=lambda number: _is_shown(gain, number, n, size, worst))


def _is_shown(gain: float, num_prompts: int, n: int, size: int, worst: float | None) -> bool:
    seen = min(1.0, gain / perfect_gain(n))
    error = CAUTION * blind_spread(n, size) * math.sqrt((1 - CHOSEN_ALIKE * seen**2) / num_prompts)
    worst = usual_worst(num_prompts, size) if worst is None else worst
    unseen = CAUTION * (worst + gain) / num_prompts
    left = gain - float(ndtri(POWER)) * error
    normal, ratio = left / error, error / unseen
    # P(normal + exponential error <= left), of an exponentially modified normal distribution.
    beyond = math.exp(min(0.0, -left / unseen + ratio**2 / 2 + float(log_ndtr(normal - ratio))))
    return bool(ndtr(normal) - beyond >= 0.975)
