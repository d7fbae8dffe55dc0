"""The specification's bands: in words, where a trained model stands."""

import math
from collections.abc import Mapping

from rmcore.core.errors import ConfigError
from rmcore.core.metrics import CELL_METRICS, Bands

BANDS: dict[str, Bands] = {spec.bands.about: spec.bands for spec in CELL_METRICS.values() if spec.bands is not None}


def band(name: str, value: float) -> str:
    """The band of one value.

    Raises:
        ConfigError: there are no bands of that name, or the value is not finite.
    """
    if name not in BANDS:
        raise ConfigError(f"no bands for {name!r}; there are {', '.join(BANDS)}.")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value:g} lies in no band; leave out what was not measured.")
    return next(word for low, high, word in BANDS[name].words if low <= value <= high)


def bands(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The band of every metric of a cell, by its name in the registry, that has bands and a value."""
    found = {}
    for name, spec in CELL_METRICS.items():
        value = metrics.get(name)
        if spec.bands is not None and value is not None:
            found[spec.bands.about] = band(spec.bands.about, value)
    return found
