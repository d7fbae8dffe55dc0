"""The specification's bands: in words, where a trained model stands."""

import math
from collections.abc import Mapping

from rmcore.core.errors import ConfigError

BANDS: dict[str, tuple[tuple[float, float, str], ...]] = {
    "eval accuracy": ((0.58, 0.63, "acceptable"), (-math.inf, 0.58, "failure"), (0.63, math.inf, "success")),
    "train-test gap": ((0.10, 0.15, "acceptable"), (-math.inf, 0.10, "success"), (0.15, math.inf, "failure")),
    "stopped after": (
        (0.40, 0.60, "success"),
        (0.60, 0.90, "acceptable"),
        (-math.inf, 0.40, "early"),
        (0.90, math.inf, "failure"),
    ),
}
"""Both ends of each band; the first one that holds a value counts: failure is only what lies beyond an end (gap > 15
points). Accuracy and gap are shares; stopping is a share of the planned steps, which the specification gives in steps
of 1000 and leaves open below 400."""
METRICS = {
    "eval accuracy": "eval/test_pairwise_accuracy",
    "train-test gap": "eval/train_test_gap",
    "stopped after": "train/stop_share",
}
"""The metric that each is about."""


def band(name: str, value: float) -> str:
    """The band of one value.

    Raises:
        ConfigError: there are no bands of that name, or the value is not finite.
    """
    if name not in BANDS:
        raise ConfigError(f"no bands for {name!r}; there are {', '.join(BANDS)}.")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value:g} lies in no band; leave out what was not measured.")
    return next(word for low, high, word in BANDS[name] if low <= value <= high)


def bands(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The band of every metric that has bands and a value."""
    found = {}
    for name, metric in METRICS.items():
        value = metrics.get(metric)
        if value is not None:
            found[name] = band(name, value)
    return found
