"""What a part of benchmarks/gpu.sh is given: which of its units are done, how much time is left, where results go."""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 12
"""Lines of an error that a record keeps."""


class NotHereError(Exception):
    """What is to be measured is not on this machine; the message says what."""


class UnitsFailedError(Exception):
    """Some units failed, each with a record of its own; the others are done."""


class TimeUpError(Exception):
    """Units are left for which there is no time."""


@dataclass
class Work:
    """One part's run. Units are its smallest pieces with a result each, so that a second run skips what is done."""

    smoke: bool
    out: Path
    before: Mapping[str, dict[str, Any]]
    """Units of earlier calls, with their last record."""
    deadline: float
    """In `time.monotonic()`."""
    emit: Callable[[dict[str, Any]], None]
    failed: list[str] = field(default_factory=list)

    @property
    def done(self) -> dict[str, dict[str, Any]]:
        """Those of before that are not to be tried again."""
        return {unit: record for unit, record in self.before.items() if record["status"] in ("done", "skipped")}

    @property
    def seconds_left(self) -> float:
        """Until the part is stopped."""
        return self.deadline - time.monotonic()

    def units(self, units: Iterable[tuple[str, float, Callable[[], dict[str, Any]]]]) -> None:
        """Run each (name, seconds that it is thought to take, what gives its values); one that fails stops no other.

        Raises:
            UnitsFailedError: some failed.
            TimeUpError: none failed, and for one at least there was no time.
        """
        late = []
        # What failed or never ended comes last: it may do so again.
        left = sorted((unit for unit in units if unit[0] not in self.done), key=lambda unit: unit[0] in self.before)
        for name, expected, call in left:
            if not self.smoke and self.seconds_left < expected:
                late.append(name)
                continue
            self.emit({"begun": name})
            started = time.monotonic()
            try:
                record = {"status": "done"} | call()
            except NotHereError as error:
                record = {"status": "skipped", "reason": str(error)}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a result, and the rest is still wanted
                self.failed.append(name)
                record = {"status": "failed", "reason": _first_line(error), "error": last_lines()}
            self.emit({"unit": name, "seconds": round(time.monotonic() - started, 2)} | record)
            free_memory()
        if self.failed:
            raise UnitsFailedError(f"failed: {', '.join(self.failed)}")
        if late:
            raise TimeUpError(f"no time for {', '.join(late)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:300]


def last_lines() -> str:
    """The end of the traceback of what is being handled."""
    return "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])


def free_memory() -> None:
    """Give what the last unit left behind back to the GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
