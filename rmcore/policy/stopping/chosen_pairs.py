"""Which prompts are judged, and what a judged pair says of all prompts.

Each judged pair comes from a group of G fresh prompts, all answered by both policies. One of them is drawn, each as
likely, and what the reward model says of the other G - 1 is used too: the value of the group is the mean of the
expected differences, plus the drawn one's error. Its mean is the gain over all prompts whatever was expected (augmented
inverse probability weighting: Robins, Rotnitzky and Zhao 1994). A group's values are independent of all others',
because its prompts are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray, IntArray

MOST_EXPECTED = 1 / 2
"""Share of the limit that is expected of a pair at most, which keeps the value of a group within a narrow bound."""
FEWEST_TO_FIT = 16
"""Judged pairs before the reward model's differences are believed to say anything."""
REMEMBERED = 200
"""Judged pairs that the expectation is fitted on, the newest: what the reward model is worth changes on the way."""
RIDGE = 4.0
"""Pairs of no relation that the fit begins with."""


@dataclass(frozen=True)
class Chosen:
    """One prompt of each of M groups, to be judged.

    places: (M,) within the groups.
    proxy: (M,) difference of the reward at that place.
    expected: (M,) difference that the judge is expected to find there.
    baseline: (M,) mean of what is expected over the group.
    """

    places: IntArray
    proxy: FloatArray
    expected: FloatArray
    baseline: FloatArray

    def value(self, number: int, difference: float) -> float:
        """Give what a judged difference says of all prompts, for group `number`."""
        return float(self.baseline[number] + difference - self.expected[number])


class PairChooser:
    """Draws prompts, and learns what the reward model's differences are worth.

    Args:
        limit: differences are clipped to this size: the value of a group is bounded then, as a bet needs it.
        size: G.
    """

    def __init__(self, limit: float, size: int) -> None:
        self.limit, self.size = limit, size
        self._proxy: list[float] = []
        self._judged: list[float] = []

    @property
    def bound(self) -> float:
        """Size that no group's value exceeds. It is known before any response is: a stake that were made smaller where
        the drawn responses allow for a larger value would be a stake on what they say of the judge.
        """
        return self.limit + MOST_EXPECTED * self.limit * (2 - 2 / self.size)

    def choose(self, proxy: FloatArray, rng: np.random.Generator) -> Chosen:
        """Draw one of each group.

        Args:
            proxy: (M, G) reward of the later policy's response less that of the earlier one's.
            rng: source of the choice.
        """
        intercept, slope = self._fit()
        most = MOST_EXPECTED * self.limit
        expected = np.clip(intercept + slope * proxy, -most, most)  # (M, G)
        places, rows = rng.integers(proxy.shape[1], size=proxy.shape[:1]), np.arange(len(proxy))
        return Chosen(places, proxy[rows, places], expected[rows, places], expected.mean(axis=1))

    def learn(self, proxy: float, difference: float) -> None:
        """Take up one judged pair."""
        self._proxy.append(proxy)
        self._judged.append(difference)

    def to_dict(self) -> dict[str, Any]:
        """Give all that it has learned, JSON-ready, for `restore`."""
        return {"proxy": self._proxy, "judged": self._judged}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `to_dict` gave."""
        self._proxy, self._judged = list(state["proxy"]), list(state["judged"])

    def _fit(self) -> tuple[float, float]:
        """Intercept and slope of the judge's difference on the reward's."""
        if len(self._judged) < FEWEST_TO_FIT:
            return 0.0, 0.0
        proxy, judged = np.array(self._proxy[-REMEMBERED:]), np.array(self._judged[-REMEMBERED:])
        apart = proxy - proxy.mean()
        slope = float(apart @ judged / (apart @ apart + RIDGE * max(proxy.var(), 1e-12)))
        return float(judged.mean() - slope * proxy.mean()), slope
