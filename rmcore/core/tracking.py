"""Where a stage reports to while it runs: JSON lines in its own artifact.

Readers elsewhere (MLflow) take the lines from there, live or later. So a tracker outage never stops a training, and a
cached artifact can fill a fresh run.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Receives numbers by step. Metric names have exactly one slash, for example `train/loss`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at optimizer step `step`."""


class NullTracker:
    """Forgets everything."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""


class MemoryTracker:
    """Keeps every row as (step, values), for tests and notebooks."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row."""
        self.rows.append((step, dict(values)))


class JsonlTracker:
    """Appends one JSON object a call, `{"step": 10, "metrics": {"train/loss": 0.69}}`, flushed so it can be followed.

    Non-finite numbers become null: JSON has no NaN.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        finite = {name: (float(value) if math.isfinite(value) else None) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "metrics": finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
