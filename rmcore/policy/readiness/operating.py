"""Operating points of the gates: of the models that a threshold lets through, how many gained; of those that gained,
how many it refuses.

Over the reward models of the study, whose gains are known, with intervals over recipes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import metric_value
from rmcore.policy.readiness.clusters import Clusters
from rmcore.policy.readiness.readiness_v2 import Condition, is_on_side

QUANTILES = np.linspace(0.1, 0.9, 9)
"""Of a part over the models: other thresholds that it might have had."""


def operating_points(table: pd.DataFrame, conditions: Sequence[Condition], clusters: Clusters) -> list[dict[str, Any]]:
    """What each gate lets through, all together last.

    Args:
        table: models with the parts, the ends of their intervals (`PART_low`, `PART_high`) and `worthwhile`.
        conditions: the gates; one whose part no model has is left out.
        clusters: recipes of the rows.

    Returns:
        One record a gate: {"part", "side", "threshold", "by_end": as the gate asks, on an end of the interval,
        "by_value": on the value, "sweep": the value against other thresholds}; the first
        two {"num_ready", "ready_gained", "gained_refused"} with shares as values with intervals.
    """
    good = table["worthwhile"].to_numpy(dtype=bool)
    found: list[dict[str, Any]] = []
    every = {"by_end": np.ones(len(table), dtype=bool), "by_value": np.ones(len(table), dtype=bool)}
    for condition in conditions:
        if condition.part not in table or table[condition.part].isna().all():
            continue
        end = f"{condition.part}_{condition.end}"
        passes = {"by_value": passing(table[condition.part], condition.side, condition.threshold)}
        passes["by_end"] = (
            passing(table[end], condition.side, condition.threshold) if end in table else np.zeros_like(good)
        )
        record: dict[str, Any] = {"part": condition.part, "side": condition.side, "threshold": condition.threshold}
        for name, let_through in passes.items():
            every[name] = every[name] & let_through
            record[name] = _shares(let_through, good, clusters)
        found.append(record | {"sweep": _sweep(table[condition.part], condition, good)})
    together = {name: _shares(let_through, good, clusters) for name, let_through in every.items()}
    return [*found, {"part": "all of them", "side": None, "threshold": None} | together | {"sweep": []}]


def passing(values: "pd.Series[Any]", side: str, threshold: float) -> npt.NDArray[np.bool_]:
    """Which values are known and on the right side of the threshold, which is itself on it."""
    numbers = pd.to_numeric(values).to_numpy(dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isfinite(numbers) & is_on_side(numbers, side, threshold))


def _shares(ready: npt.NDArray[np.bool_], good: npt.NDArray[np.bool_], clusters: Clusters) -> dict[str, Any]:
    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "ready_gained": weights @ (ready & good) / (weights @ ready),
                "gained_refused": weights @ (~ready & good) / (weights @ good),
            }

    drawn = clusters.bootstrap(compute)
    found: dict[str, Any] = {"num_ready": int(ready.sum())}
    for name, among in (("ready_gained", ready), ("gained_refused", good)):
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


def _sweep(values: "pd.Series[Any]", condition: Condition, good: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    numbers = pd.to_numeric(values).dropna()
    swept = []
    for threshold in np.unique(np.quantile(numbers, QUANTILES)):
        ready = passing(values, condition.side, float(threshold))
        swept.append(
            {
                "threshold": float(threshold),
                "num_ready": int(ready.sum()),
                "ready_gained": float(good[ready].mean()) if ready.any() else None,
                "gained_refused": float((~ready)[good].mean()) if good.any() else None,
            }
        )
    return swept
