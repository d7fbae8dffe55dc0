"""`make fuzz` and `make faults` at a small size."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from machine import PATIENCE_S

FUZZ = Path(__file__).parent / "fuzz"
NEEDS_COMPILER = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="faults are injected by a library for Linux"
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("data", 25), pytest.param("faults", 40, marks=NEEDS_COMPILER)])
def test_a_few_cases_of_each_kind_give_no_finding(kind, count, tmp_path):
    command = [sys.executable, FUZZ / "run.py", "--only", kind, "--count", str(count), "--keep", tmp_path]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # as in every process of a home
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 findings"
    assert done.stdout.splitlines()[1].split()[:2] == [kind, str(count)]
