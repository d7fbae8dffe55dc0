"""The gain of a policy along its training, from comparisons of its checkpoints: a smooth curve with its uncertainty.

No decision's level rests on this curve. It says which checkpoint a look should compare with, what a bet may expect,
and which checkpoint to keep; a wrong curve makes these worse, and no false alarm.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import norm

from rmcore.core.arrays import FloatArray

SLOPE, BEND, ROUGHNESS, OWN = 1.0, 0.5, 0.4, 0.05
"""Standard deviations expected before anything is judged: of the gain per root of a nat, of its bend per nat, of what
a curve of the two leaves out (an integrated random walk), and of a checkpoint by itself. In units of the start
samples within prompts. Best-of-n and RL follow slope and bend closely: Gao, Schulman and Hilton 2023,
arXiv:2210.10760, eq. 1."""


class GainCurve:
    """Checkpoints 0 (the start), 1, 2, ..., each with its distance, and what comparisons say of their gains."""

    def __init__(self) -> None:
        self._along: list[float] = [0.0]
        """Way of each checkpoint, in roots of nats."""
        self._roots: list[float] = [0.0]
        self._seen: list[tuple[int, int, float, float]] = []

    def __len__(self) -> int:
        """Checkpoints, with the start."""
        return len(self._along)

    def add_checkpoint(self, kl: float) -> int:
        """Take up the next checkpoint; its number.

        Args:
            kl: nats from the start policy. Where it comes back the path still continues: another policy at the same
                distance need not be as good.
        """
        root = max(kl, 0.0) ** 0.5
        self._along.append(self._along[-1] + abs(root - self._roots[-1]))
        self._roots.append(root)
        return len(self) - 1

    def compare(self, later: int, earlier: int, difference: float, variance: float) -> None:
        """Take up that checkpoint `later` was judged better than `earlier` by `difference`, give or take."""
        self._seen.append((later, earlier, difference, variance))

    def posterior(self) -> tuple[FloatArray, FloatArray]:
        """Mean (K,) and covariance (K, K) of the gains of all checkpoints over the start, whose gain is 0."""
        prior = self._prior()
        mean, covariance = np.zeros(len(self)), np.zeros((len(self), len(self)))
        if not self._seen:
            covariance[1:, 1:] = prior
            return mean, covariance
        later, earlier, difference, noise = (np.array(column) for column in zip(*self._seen, strict=True))
        contrast = np.zeros((len(self._seen), len(self)))
        contrast[np.arange(len(self._seen)), later] += 1
        contrast[np.arange(len(self._seen)), earlier] -= 1
        contrast = contrast[:, 1:]
        gain = prior @ contrast.T @ np.linalg.inv(contrast @ prior @ contrast.T + np.diag(noise))  # (K - 1, looks)
        mean[1:] = gain @ difference
        covariance[1:, 1:] = prior - gain @ contrast @ prior
        return mean, covariance

    def _prior(self) -> FloatArray:
        """Covariance (K - 1, K - 1) of the gains of all checkpoints but the start before anything was judged."""
        along = np.array(self._along)[1:]  # (K - 1,)
        near, far = np.minimum.outer(along, along), np.maximum.outer(along, along)
        return (
            SLOPE**2 * np.outer(along, along)
            + BEND**2 * np.outer(along**2, along**2)
            + ROUGHNESS**2 * (near**2 * far / 2 - near**3 / 6)
            + OWN**2 * np.eye(len(along))
        )

    def difference(self, later: int, earlier: int) -> tuple[float, float]:
        """Mean and variance of the gain of one checkpoint over another, as far as is known."""
        mean, covariance = self.posterior()
        spread = covariance[later, later] + covariance[earlier, earlier] - 2 * covariance[later, earlier]
        return float(mean[later] - mean[earlier]), float(max(spread, 0.0))

    def informative_reference(self, among: list[int]) -> int:
        """The checkpoint that a comparison with the newest one would tell most of, if the true reward has fallen.

        The one with the largest mean square of a fall since it: near neighbours hardly differ, and those that the
        newest is surely above cannot show a fall. (Comparing with the best one so far instead, which is near while
        the true reward still rises, left 10 times the regret in the choice of what to keep:
        benchmarks/results/watch.md.)

        Args:
            among: checkpoints whose weights are still there.
        """
        mean, covariance = self.posterior()
        newest = len(self) - 1
        places = np.array(among)
        rise = mean[newest] - mean[places]
        variance = covariance[newest, newest] + covariance[places, places] - 2 * covariance[newest, places]
        spread = np.sqrt(np.maximum(variance, 1e-12))
        fall = (rise**2 + spread**2) * norm.cdf(-rise / spread) - rise * spread * norm.pdf(rise / spread)
        return int(places[int(np.argmax(fall))])

    def to_dict(self) -> dict[str, Any]:
        """Its whole state, JSON-ready, for `restore`."""
        return {"along": self._along, "roots": self._roots, "compared": self._seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state that `to_dict` gave."""
        self._along, self._roots = list(state["along"]), list(state["roots"])
        self._seen = [tuple(one) for one in state["compared"]]

    def best(self, among: list[int], cautious: float) -> int:
        """The checkpoint with the largest lower bound of its gain over the start.

        Args:
            among: checkpoints whose weights are still there.
            cautious: standard deviations below the mean that the bound lies.
        """
        mean, covariance = self.posterior()
        bound = mean - cautious * np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return among[int(np.argmax(bound[among]))]
