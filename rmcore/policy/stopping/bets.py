"""Bets against a hypothesis about a mean: evidence that may be looked at after every value.

A gambler starts with 1 and stakes a share of it on each value before it is seen. Where the hypothesis holds no stake
gains on average, so the chance that the wealth ever reaches 1/level is at most level (Ville's inequality), however
often one looks, whenever one stops, and whatever the stakes were learned from. How fast it grows where the hypothesis
is wrong is all that a stake decides.

Source:
    Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting, JRSS-B 86,
    arXiv:2010.09686; Ramdas, Gruenwald, Vovk and Shafer 2023, Game-theoretic statistics and safe anytime-valid
    inference, arXiv:2210.01948.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import bounded_mean

MOST = 0.9
"""Share of the wealth that the worst possible value may take: all of it would end the game."""
FEWEST_TO_SHOW = 128
"""Differences from which something is claimed where they are clipped, so that few prompts far out could turn the mean:
they leave room for these on 2.3 % of all prompts (`rmcore.evaluation.uncertainty.unseen_share`)."""
AGREES = 1 - 0.05 / 3
"""Level of the interval of differences as they are: 5 % shared among three sizes, those of `policy.confirmation.LOOKS`
and the end."""
GRID = 801
"""Means that a confidence sequence tries."""


def unclipped_interval(differences: Sequence[float], limit: float, *, num_resamples: int) -> tuple[float, float]:
    """The interval of the mean of differences as they are: where it does not agree, clipped ones claim nothing.

    It counts with one more prompt that was not seen, as far out as the largest difference that was seen, and as the
    limit at least (`bounded_mean`).

    Args:
        differences: as judged, one a prompt.
        limit: size at which a bet on them clips them.
        num_resamples: of the bootstrap.
    """
    values = np.array(differences, dtype=np.float64)
    lowest, highest = min(-limit, float(values.min())), max(limit, float(values.max()))
    return bounded_mean(values, lowest, highest, num_resamples=num_resamples, seed=0, level=AGREES)


@dataclass
class Bet:
    """A bet that the mean of what is coming lies beyond `null`.

    null: the hypothesis is that each value, given those before it, has a mean of at least `null` (side `below`), or of
        at most `null` (side `above`).
    side: where the bettor says the mean is.
    level: chance of ever being convinced wrongly, at most.
    log_wealth: in nats; evidence of log(1/level) convinces.
    won: whether it ever was that much: what came after changes nothing.
    """

    null: float
    side: Literal["below", "above"]
    level: float
    log_wealth: float = 0.0
    won: bool = False

    @property
    def needed(self) -> float:
        """Nats of evidence that convince."""
        return math.log(1 / self.level)

    def settle(self, value: float, *, expected: float, spread: float, low: float, high: float) -> None:
        """Stake by what was expected, then see the value.

        Args:
            value: what came, within `low` and `high`.
            expected: mean that was expected of it before.
            spread: mean square of its distance from `expected`, as expected before.
            low: least that could have come, known before.
            high: most that could have come, known before.

        Raises:
            ValueError: the value lies outside its ends, so the wealth would mean nothing.
        """
        if not low <= value <= high:
            raise ValueError(f"{value} was promised to lie between {low} and {high}")
        toward, worst = (value - self.null, low - self.null) if self.side == "above" else (
            self.null - value, self.null - high
        )  # fmt: skip
        hoped = expected - self.null if self.side == "above" else self.null - expected
        if hoped <= 0 or worst >= 0:
            return
        # Kelly's stake for small bets (aGRAPA, Waudby-Smith and Ramdas 2024, eq. 26), never more than `MOST` to lose.
        stake = min(hoped / (spread + hoped * hoped), MOST / -worst)
        self.log_wealth += math.log1p(stake * toward)
        self.won = self.won or self.log_wealth >= self.needed


class ConfidenceSequence:
    """An interval for a mean that narrows with every value; it holds after all of them together, with chance 1 - level.

    Each interval lies within those before it. Where none is left, because later values contradict earlier ones, it
    stays as it was; the mean of the values may lie outside.

    Args:
        low: least that a value can be.
        high: most that a value can be.
        level: chance that the mean is ever outside, at most.
    """

    def __init__(self, low: float, high: float, level: float) -> None:
        self.low, self.high, self.needed = low, high, math.log(1 / level)
        self.interval = (low, high)
        self.values: list[float] = []
        """All that were seen, in their order."""
        self.path: list[tuple[float, float]] = []
        """The interval after each of them."""
        self._means = means = np.linspace(low, high, GRID)[1:-1]  # (M,); those that are left, and so below
        self._least, self._most = -MOST / (high - means), MOST / (means - low)  # of a stake
        # The bettor against each mean stakes on the side where the values so far lie; half a value of a quarter of the
        # range's square is what he starts from (ibid., eq. 15).
        self._log_wealth = np.zeros(len(means))
        self._total, self._squares, self._count = (low + high) / 2, ((high - low) / 2) ** 2, 1.0

    def see(self, value: float) -> tuple[float, float]:
        """Take up a value, which is independent of those before it and of the same mean; the interval then.

        Raises:
            ValueError: it lies outside its ends.
        """
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} was promised to lie between {self.low} and {self.high}")
        mean, variance = self._total / self._count, self._squares / self._count
        edge = mean - self._means
        stake = np.clip(edge / (variance + edge * edge), self._least, self._most)
        self._log_wealth += np.log1p(stake * (value - self._means))
        alive = self._log_wealth < self.needed
        self._means, self._log_wealth = self._means[alive], self._log_wealth[alive]
        self._least, self._most = self._least[alive], self._most[alive]
        self._total, self._count = self._total + value, self._count + 1
        self._squares += (value - self._total / self._count) ** 2
        step = (self.high - self.low) / (GRID - 1)  # a mean between two that are tried: the wider end
        if len(self._means):
            first, last = float(self._means[0]), float(self._means[-1])
            self.interval = (max(self.low, first - step), min(self.high, last + step))
        self.values.append(value)
        self.path.append(self.interval)
        return self.interval

    @property
    def mean(self) -> float:
        """The mean of the values; or the end of the interval that it lies beyond, as that of unlike values may.

        Raises:
            DataError: there is no value.
        """
        if not self.values:
            raise DataError("no pair was judged, so nothing is known of a gain.")
        return float(np.clip(np.mean(self.values), *self.interval))
