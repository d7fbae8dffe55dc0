"""Operating points of the gates: of the models that a threshold lets through, how many were worth while and how many
gained nothing; of those that were worth while, how many it refuses.

Over the reward models of the study, whose gains are known, with intervals over recipes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.progress import Report, silent
from rmcore.evaluation.uncertainty import Resampled, cluster_bootstrap, metric_value
from rmcore.policy.readiness.claims import NUM_RESAMPLES
from rmcore.policy.readiness.readiness_v2 import Condition

QUANTILES = np.linspace(0.05, 0.95, 19)
"""Quantiles of a part over the models, tried as other thresholds that it might have had."""
COST_OF_FALSE_READY = 4
"""In refusals of a worthwhile model. A refusal costs another round of labels; a model that is called ready and gains
nothing costs the training of a policy, and its discovery."""


class Clusters:
    """Recipes of a table's rows, drawn together, and the resamples that all intervals of the study are from."""

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


def operating_points(table: pd.DataFrame, conditions: Sequence[Condition], clusters: Clusters) -> list[dict[str, Any]]:
    """Count the models that each gate lets through, and those that all together do, last.

    Args:
        table: models with the parts, the ends of their intervals (`PART_low`, `PART_high`), `worthwhile` and `lost`.
        conditions: the gates; one whose part no model has is left out.
        clusters: recipes of the rows.

    Returns:
        One record a gate: {"name", "part", "end", "threshold", "by_end": as the gate asks, on that end of the
        interval, "by_value": on the value, "sweep": that end against other thresholds}; the first
        two {"num_ready", "cost", "ready_gained", "ready_lost", "gained_refused"} with shares as values with intervals.
    """
    good, lost = (table[name].to_numpy(dtype=bool) for name in ("worthwhile", "lost"))
    found: list[dict[str, Any]] = []
    every = {"by_end": np.ones(len(table), dtype=bool), "by_value": np.ones(len(table), dtype=bool)}
    for condition in conditions:
        if condition.part not in table or table[condition.part].isna().all():
            continue
        end = f"{condition.part}_{condition.end}"
        passes = {"by_value": passing(table[condition.part], condition.threshold)}
        passes["by_end"] = passing(table[end], condition.threshold) if end in table else np.zeros_like(good)
        record: dict[str, Any] = {name: getattr(condition, name) for name in ("name", "part", "end", "threshold")}
        for name, let_through in passes.items():
            every[name] = every[name] & let_through
            record[name] = _shares(let_through, good, lost, clusters)
        found.append(record | {"sweep": _sweep(table[end], condition, good, lost) if end in table else []})
    together = {name: _shares(let_through, good, lost, clusters) for name, let_through in every.items()}
    nothing = dict.fromkeys(("part", "end", "threshold"))
    return [*found, {"name": "all of them"} | nothing | together | {"sweep": []}]


def passing(values: "pd.Series[Any]", threshold: float) -> npt.NDArray[np.bool_]:
    """Which values are known and reach the threshold."""
    numbers = pd.to_numeric(values).to_numpy(dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isfinite(numbers) & (numbers >= threshold))


def cost(ready: npt.NDArray[np.bool_], good: npt.NDArray[np.bool_], lost: npt.NDArray[np.bool_]) -> int:
    """Add up what the two errors cost: a worthwhile model that is refused 1, one that is called ready and gains nothing
    `COST_OF_FALSE_READY`. Each array is (N,), one element a reward model.
    """
    return int((good & ~ready).sum() + COST_OF_FALSE_READY * (lost & ready).sum())


def _shares(
    ready: npt.NDArray[np.bool_], good: npt.NDArray[np.bool_], lost: npt.NDArray[np.bool_], clusters: Clusters
) -> dict[str, Any]:
    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "ready_gained": weights @ (ready & good) / (weights @ ready),
                "ready_lost": weights @ (ready & lost) / (weights @ ready),
                "gained_refused": weights @ (~ready & good) / (weights @ good),
            }

    drawn = clusters.bootstrap(compute)
    found: dict[str, Any] = {"num_ready": int(ready.sum()), "cost": cost(ready, good, lost)}
    for name, among in (("ready_gained", ready), ("ready_lost", ready), ("gained_refused", good)):
        if not among.any():
            found[name] = None
            continue
        found[name] = metric_value(
            drawn.point[name],
            drawn.replicates.get(name),
            num_prompts=clusters.carrying(among),
            num_pairs=int(among.sum()),
            is_share=True,
        ).to_dict()
    return found


def _sweep(
    values: "pd.Series[Any]", condition: Condition, good: npt.NDArray[np.bool_], lost: npt.NDArray[np.bool_]
) -> list[dict[str, Any]]:
    numbers = pd.to_numeric(values).dropna()
    swept = []
    for threshold in np.unique(np.quantile(numbers, QUANTILES)):
        ready = passing(values, float(threshold))
        swept.append(
            {
                "threshold": float(threshold),
                "num_ready": int(ready.sum()),
                "cost": cost(ready, good, lost),
                "ready_gained": float(good[ready].mean()) if ready.any() else None,
                "ready_lost": float(lost[ready].mean()) if ready.any() else None,
                "gained_refused": float((~ready)[good].mean()) if good.any() else None,
            }
        )
    return swept
