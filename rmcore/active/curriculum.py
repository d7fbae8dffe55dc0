"""The order in which pairs are trained on: more easy ones early, more hard ones late.

How easy a pair is, is its margin: annotated, or predicted by a model that was not fitted on the pair. `WEIGHTS`
say with what chance the next pair comes from the easy, medium and hard ones as training continues; every pair still
comes once in an epoch.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError

Bucket = Literal["easy", "medium", "hard"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)

EASY_ABOVE, HARD_BELOW = 0.7, 0.2
"""Margins in [0, 1], else ranks among the pairs as shares."""
WEIGHTS = ((0.3, (0.5, 0.4, 0.1)), (0.7, (0.2, 0.6, 0.2)), (float("inf"), (0.1, 0.5, 0.4)))
"""(progress below which they hold, weights of easy, medium and hard)."""
WITHOUT_PROGRESS = (0.2, 0.6, 0.2)


def weights_at(progress: float | None) -> FloatArray:
    """Weights of easy, medium and hard, (3,), at a progress in [0, 1].

    >>> weights_at(0.1)
    array([0.5, 0.4, 0.1])
    """
    if progress is None:
        return np.array(WITHOUT_PROGRESS)
    return np.array(next(weights for below, weights in WEIGHTS if progress < below))


class CurriculumSampler:
    """Draws pairs by difficulty.

    Args:
        margins: (P,) one a pair, higher is easier. If all lie in [0, 1] the thresholds are 0.7 and 0.2 (easy above,
            hard below); otherwise the same shares of the pairs by rank, equal margins together.
        seed: the same seed gives the same order.

    Raises:
        DataError: there are no margins, or one is not finite.

    Example:
        >>> sampler = CurriculumSampler([0.9, 0.5, 0.1, 0.8], seed=0)
        >>> sorted(sampler.sample(4, epoch=0, total_epochs=3))
        [0, 1, 2, 3]
    """

    def __init__(self, margins: npt.ArrayLike, *, seed: int = 0) -> None:
        values = np.asarray(margins, dtype=np.float64)
        broken = int((~np.isfinite(values)).sum())
        if values.ndim != 1 or len(values) == 0 or broken:
            raise DataError(
                f"margins of shape {values.shape} with {broken} values not finite say nothing of how easy pairs are; "
                "pass (P,) numbers, one a pair, or leave pairs without a margin out."
            )
        self.seed = seed
        from scipy.stats import rankdata  # here: scipy.stats takes a second to import, and few commands need it

        bounded = values.min() >= 0 and values.max() <= 1
        # Mid-ranks in (0, 1): equal margins have one rank, so they are in one bucket.
        level = values if bounded else (rankdata(values) - 0.5) / len(values)
        names: npt.NDArray[np.str_] = np.select([level > EASY_ABOVE, level < HARD_BELOW], ["easy", "hard"], "medium")
        self.buckets: dict[Bucket, list[int]] = {name: np.flatnonzero(names == name).tolist() for name in BUCKETS}
        """Positions by bucket; some may be empty, and the others then share its weight."""
        self._num_pairs = len(values)

    def __len__(self) -> int:
        """P."""
        return self._num_pairs

    def sample(self, n: int, epoch: int | None = None, total_epochs: int | None = None) -> list[int]:
        """Positions of n pairs of one epoch, in the order in which they come.

        The same arguments give the same pairs; n = P is the whole epoch, a smaller n its beginning.

        Args:
            n: how many, at most P.
            epoch: from 0; with `total_epochs` it gives the progress, epoch / total_epochs.
            total_epochs: epochs in all; without it the weights are those without progress.

        Raises:
            ConfigError: n is negative or above P, or the epoch is not one of the epochs.
        """
        if not 0 <= n <= len(self):
            raise ConfigError(f"{n} pairs of {len(self)} are requested in one epoch; request fewer.")
        progress = None
        if total_epochs is not None:
            if epoch is None or not 0 <= epoch < total_epochs:
                raise ConfigError(f"epoch={epoch} is none of {total_epochs} epochs; they are counted from 0.")
            progress = epoch / total_epochs
        rng, weights = np.random.default_rng((self.seed, epoch or 0)), weights_at(progress)
        left = [rng.permutation(self.buckets[name]).astype(int).tolist()[::-1] for name in BUCKETS]
        taken = []
        for chance in rng.random(n):  # an empty bucket's weight goes to the others in proportion
            open_weights = np.where([bool(places) for places in left], weights, 0)
            shares = np.cumsum(open_weights) / open_weights.sum()
            taken.append(left[int(np.searchsorted(shares, chance, side="right"))].pop())
        return taken
