"""tests/gpu, one result a test. Without a GPU they are collected and skip themselves."""

from typing import Any

import pytest
import torch
from gpu_work import NotHereError, UnitsFailedError, Work

FOLDER = "tests/gpu"
LONGEST_S = 120
"""Seconds of one test: two of them compile."""


class Results:
    """Hears of each test as pytest ends it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.num_skipped = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call; or its set-up, where it did not come to a call."""
        if report.when != "call" and report.passed:
            return
        record: dict[str, Any] = {"unit": report.nodeid.removeprefix("tests/"), "seconds": round(report.duration, 2)}
        if report.skipped:
            self.num_skipped += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            record |= {"status": "skipped", "reason": reason.removeprefix("Skipped: ")}
        elif report.failed:
            self.failed.append(record["unit"])
            record |= {"status": "failed", "reason": "", "error": "\n".join(report.longreprtext.splitlines()[-25:])}
        else:
            record["status"] = "done"
        self.work.emit(record)


def run(work: Work) -> None:
    """Run what has not passed before."""
    results = Results(work)
    given = [argument for unit in sorted(work.done) for argument in ("--deselect", f"tests/{unit}")]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={LONGEST_S}", "-q"]
    status = pytest.main([FOLDER, *options, *given], plugins=[results])
    if results.failed:
        raise UnitsFailedError(f"{len(results.failed)} failed: {', '.join(results.failed)}")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise UnitsFailedError(f"pytest ended with {status!r} before its tests; see gpu.log")
    if not torch.cuda.is_available():
        raise NotHereError(f"no CUDA: {results.num_skipped} tests collected, and skipped by themselves")
