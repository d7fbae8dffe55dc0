"""Feature differences of pairs, computed once: what makes a round of active learning cost a matrix product."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import pair_features
from rmcore.models.reward_model import BradleyTerryRM


class CachedDifferences:
    """Features of the chosen side minus those of the rejected side, by pair.

    A pair that comes back with its sides exchanged, as a label may exchange them, has the negative difference.

    Args:
        rm: whose backbone computes what is not there yet; None: everything has to be there.
    """

    def __init__(self, rm: BradleyTerryRM | None) -> None:
        self.rm = rm
        self._rows: dict[str, tuple[str, FloatArray]] = {}

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair], differences: npt.ArrayLike) -> "CachedDifferences":
        """Differences (P, D) that were computed before, of P pairs as they are.

        Raises:
            DataError: there is not one row a pair.
        """
        cache = cls(None)
        cache._take(pairs, np.asarray(differences, dtype=np.float64))
        return cache

    def __call__(self, pairs: Sequence[PreferencePair], *, report: Report = silent) -> FloatArray:
        """Differences of P pairs, (P, D); the backbone is asked about those alone that it was not asked about yet.

        Args:
            pairs: P pairs.
            report: told of the sides done.

        Raises:
            DataError: there are no pairs, or there is no backbone and a pair is not there.
            ModelError: a difference is not finite.
        """
        if not pairs:
            raise DataError("there are no pairs to take features of; pass at least one.")
        missing = list({pair.pair_id: pair for pair in pairs if pair.pair_id not in self._rows}.values())
        if missing and self.rm is None:
            raise DataError(
                f"{len(missing)} of {len(pairs)} pairs have no stored features, the first is {missing[0].pair_id}, and "
                "there is no backbone to compute them; pass features of all pairs of the pool and the seed set."
            )
        if missing and self.rm is not None:
            first, second = pair_features(self.rm, missing, report=report)
            self._take(missing, first - second)
        rows = [self._rows[pair.pair_id] for pair in pairs]
        signs = np.array([1.0 if pair.chosen == first else -1.0 for pair, (first, _) in zip(pairs, rows, strict=True)])
        return np.asarray(np.stack([row for _, row in rows]) * signs[:, None])

    def _take(self, pairs: Sequence[PreferencePair], differences: FloatArray) -> None:
        if differences.ndim != 2 or len(differences) != len(pairs):
            raise DataError(f"features of shape {differences.shape} for {len(pairs)} pairs; pass (P, D), a row a pair.")
        broken = np.flatnonzero(~np.isfinite(differences).all(axis=1))
        if len(broken):
            raise ModelError(
                f"{len(broken)} pairs have features that are not finite, the first is {pairs[broken[0]].pair_id}: the "
                "backbone's weights are broken. Take another checkpoint."
            )
        for pair, row in zip(pairs, differences, strict=True):
            self._rows[pair.pair_id] = (pair.chosen, row)
