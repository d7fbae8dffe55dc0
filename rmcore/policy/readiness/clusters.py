"""Recipes as the unit of the study of readiness: what shares one is drawn together in every interval."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.progress import Report, silent
from rmcore.evaluation.uncertainty import Resampled, cluster_bootstrap
from rmcore.policy.readiness.claims import NUM_RESAMPLES


class Clusters:
    """Recipes of a table's rows, and the resamples that all intervals of the study are from."""

    def __init__(self, table: pd.DataFrame, seed: int, report: Report = silent) -> None:
        codes, names = pd.factorize(table["recipe"])
        self.names: list[str] = list(names)
        self.of_row: npt.NDArray[np.intp] = codes
        self._seed = seed
        self._report = report

    def bootstrap(self, compute: Callable[[FloatArray], dict[str, FloatArray]]) -> Resampled:
        """Statistics of row weights (B, N), drawn by recipe."""
        return cluster_bootstrap(
            lambda weights: compute(weights[:, self.of_row]),
            len(self.names),
            num_resamples=NUM_RESAMPLES,
            seed=self._seed,
            row_size=len(self.of_row),
            report=self._report,
        )

    def carrying(self, rows: npt.NDArray[np.bool_]) -> int:
        """Recipes among some rows."""
        return len(np.unique(self.of_row[rows]))
