"""`make fuzz` and `make faults` at a small size."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from machine import PATIENCE_S

FUZZ = Path(__file__).parent / "fuzz"


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="faults are injected by a library for Linux"
)
def test_a_few_cases_of_each_kind_give_no_finding(tmp_path):
    command = [sys.executable, FUZZ / "run.py", "--count", "20", "--keep", tmp_path]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # as in every process of a home
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *kinds, findings = done.stdout.splitlines()
    assert [line.split()[:2] for line in kinds] == [["data", "20"], ["faults", "20"]]
    assert findings == "0 findings"
