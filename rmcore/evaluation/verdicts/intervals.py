"""The two kinds of interval of an estimate, at any level, with the p values that invert them.

A `TInterval` is what seeds give: a sum of independent errors, each with a variance that was estimated. A
`PercentileInterval` is what one seed gives: bootstrap replicates over prompts.

Verdicts need more than one level: Holm's correction compares p values with alpha / k. An interval is therefore kept as
what it is made of, and `bounds(alpha)` and `p_value(threshold)` are two readings of the same thing: the threshold is
outside the 1 - alpha interval exactly where p < alpha.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import percentile_interval

_LOG_SMALLEST_P = -230.0  # p below 1e-100 is given as 0; beyond it t quantiles of one degree of freedom overflow
POWER = 0.8
"""Chance to see an effect that studies are planned for."""
_POWER_GRID = 100  # midpoints a component: power is then known to about 0.001


class Component(NamedTuple):
    """One estimated variance of a sum of independent errors."""

    variance: float
    df: float
    """Degrees of freedom of the variance's estimate."""

    def half(self, alpha: float) -> float:
        """Half of the width of the 1 - alpha interval of this error alone."""
        return -float(special.stdtrit(self.df, alpha / 2)) * math.sqrt(self.variance)


Components = Sequence[Component]
"""Independent errors whose sum is that of a value."""


@dataclass(frozen=True, slots=True)
class TInterval:
    """Student t interval of a value whose error is the sum of independent components.

    With one component this is the textbook t interval. Several are combined by their squared half-widths, each with its
    own degrees of freedom (MOVER): half^2 = sum_i t_{df_i}^2 variance_i. Variance components of exactly zero give an
    interval of width zero, whose p is 1 at the value and 0 elsewhere.

    Source:
        Zou and Donner 2008, Construction of confidence limits about effect measures: a general approach,
        Statistics in Medicine 27(10): method of variance estimates recovery.
    """

    centre: float
    components: Components

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Ends of the 1 - alpha interval."""
        half = half_width(self.components, alpha)
        return self.centre - half, self.centre + half

    def p_value(self, threshold: float) -> float:
        """Two-sided: the alpha at which the interval ends at the threshold; 0 below 1e-100."""
        distance = abs(self.centre - threshold)
        if distance == 0:
            return 1.0

        def excess(log_alpha: float) -> float:
            return half_width(self.components, math.exp(log_alpha)) - distance

        if excess(_LOG_SMALLEST_P) < 0:
            return 0.0
        return math.exp(_falling_root(excess, _LOG_SMALLEST_P, 0.0))


@dataclass(frozen=True, slots=True)
class PercentileInterval:
    """Expanded percentile interval of bootstrap replicates, as `rmcore.evaluation.uncertainty.percentile_interval`.

    Order statistics end at the most extreme replicate. Beyond it the interval is the t interval with the bootstrap's
    standard error, and at least the range of the replicates. Without this p would be 0 wherever all replicates are on
    one side of the threshold, or nothing would ever pass Holm's correction.

    Args:
        centre: the estimate.
        replicates: (B,) of the bootstrap over prompts, at least two, none of them NaN.
        num_clusters: the prompts that were drawn. It sets the expansion.

    Source:
        Hesterberg 2015, arXiv:1411.5279: "expanded percentile interval", and "t interval with bootstrap standard error"
        for the far tails.
    """

    centre: float
    replicates: FloatArray
    num_clusters: float

    @property
    def components(self) -> Sequence[Component]:
        """The bootstrap variance with its correction for few clusters."""
        return (Component(spread_variance(self.replicates) * self._expansion() ** 2, self.num_clusters - 1),)

    def bounds(self, alpha: float) -> tuple[float, float] | None:
        """Ends of the 1 - alpha interval; None where it has no bound."""
        inner = percentile_interval(self.replicates, self.num_clusters, level=1 - alpha)
        if inner is None or alpha >= self._resolution():
            return inner
        half = half_width(self.components, alpha)
        return (min(inner[0], self.centre - half), max(inner[1], self.centre + half)) if math.isfinite(half) else None

    def p_value(self, threshold: float) -> float:
        """Two-sided: the largest alpha whose 1 - alpha interval holds the threshold."""
        beyond = min(int((self.replicates <= threshold).sum()), int((self.replicates >= threshold).sum()))
        if beyond == 0:
            far = TInterval(self.centre, self.components)
            bounded = all(math.isfinite(component.variance) for component in far.components)
            return min(self._resolution(), far.p_value(threshold)) if bounded else self._resolution()
        return self._alpha_of_tail(beyond / (len(self.replicates) - 1))

    def _expansion(self) -> float:
        return math.sqrt(self.num_clusters / (self.num_clusters - 1))

    def _resolution(self) -> float:
        """The alpha whose interval ends at the second most extreme replicates: a smaller one needs more of them."""
        return self._alpha_of_tail(1 / (len(self.replicates) - 1))

    def _alpha_of_tail(self, tail: float) -> float:
        """The alpha for which `percentile_interval` cuts off this share of the replicates at each end."""
        if tail >= 0.5:
            return 1.0
        return float(2 * special.stdtr(self.num_clusters - 1, special.ndtri(tail) / self._expansion()))


def spread_variance(values: FloatArray) -> float:
    """Unbiased variance: exactly 0 where all values are equal, infinite where one of them is."""
    if not np.isfinite(values).all():
        return math.inf
    return float(values.var(ddof=1)) if np.ptp(values) else 0.0  # a rounded mean would leave 1e-34


def half_width(components: Components, alpha: float) -> float:
    """Half of the width of the 1 - alpha interval of the sum of the components' errors."""
    return math.hypot(*(component.half(alpha) for component in components))


def _falling_root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is 0, between ends that enclose the root but for rounding: then it is that end.

    Near alpha = 1 every half-width is close to 0, and a rounded tail may lie on the same side of alpha at both ends.
    """
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    return float(optimize.brentq(falling, low, high, xtol=1e-12 * max(abs(low), abs(high))))


def smallest_detectable(components: Components, alpha: float) -> float | None:
    """Distance from the threshold at which the two-sided test of level `alpha` rejects on the true side with `POWER`.

    The components are taken as the true variances; that the next experiment estimates each of them again is integrated
    over (for one component this is the non-central t distribution). None where a variance is infinite.
    """
    deviation = math.sqrt(sum(component.variance for component in components))
    if deviation == 0 or math.isinf(deviation):
        return 0.0 if deviation == 0 else None
    squares = np.zeros(1)  # of half-widths that the next experiment may have, equally likely
    for component in components:
        variance, df = component.variance, component.df
        seen = variance * 2 * special.gammaincinv(df / 2, (np.arange(_POWER_GRID) + 0.5) / _POWER_GRID) / df
        squares = np.add.outer(squares, special.stdtrit(df, alpha / 2) ** 2 * seen).ravel()
    halves = np.sqrt(squares)

    def missing_power(distance: float) -> float:
        return float(special.ndtr((distance - halves) / deviation).mean()) - POWER

    return float(optimize.brentq(missing_power, 0.0, halves.max() + 10 * deviation))
