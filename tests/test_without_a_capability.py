"""A capability is its two folders and at most three lines elsewhere: without them everything else is as it was."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from machine import PATIENCE_S
from rmcore.core.capabilities import NAMES

ROOT = Path(__file__).resolve().parents[1]
CODE = ("rmcore", "flows", "tasks", "experiments", "tests", "docs", "benchmarks")
MEASURING = [name for name in NAMES if (ROOT / "rmcore" / name / "stage.py").is_file()]
BY_DAY = "landscape"
"""The one that others know most of: its number is part of the original score."""
PROGRAM = """
import os, sys, pytest
from pathlib import Path
from experiments.presets import PRESETS
from flows.cli import app
from rmcore.core.files import write_json
from rmcore.study.estimates import SpeedProbe, probe_kind
speed = {"kind": probe_kind(PRESETS["smoke"]), "probe": dict.fromkeys(SpeedProbe.__slots__, 10.0)}
write_json(Path(os.environ["RM_OPT_HOME"]) / "throughput" / "known.json", speed)  # else the plan would measure it
app(["run", "--preset", "smoke", "--plan"], standalone_mode=False)
sys.exit(pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not slow and not services", *sys.argv[1:]]))
"""
TESTS = (
    *("tests/rmcore/config", "tests/rmcore/stages/test_optional_stages.py"),
    *("tests/rmcore/stages/test_readiness_stage.py", "tests/rmcore/reporting/test_report.py"),
    *("tests/experiments/test_schema.py", "tests/rmcore/study/test_estimates.py"),
)


def without(text: str, name: str) -> str:
    """A file without the lines that name a capability or the class of its section; of `NAMES` without its word."""
    text = text.replace(f'"{name}", ', "")
    imported = re.search(rf"^from rmcore\.{name}\.settings import (\w+)$", text, flags=re.MULTILINE)
    words = [f"rmcore.{name}.", *([] if imported is None else [f": {imported[1]} "])]
    return "".join(line for line in text.splitlines(keepends=True) if not any(word in line for word in words))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == BY_DAY else pytest.param(name, marks=pytest.mark.night) for name in MEASURING]
)
def test_without_its_folders_and_three_lines_a_run_is_planned_and_tests_pass(name, tmp_path):
    for folder in ("rmcore", "tests"):
        skipped = shutil.ignore_patterns("__pycache__", name)
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    for other in ("flows", "tasks", "experiments", "pyproject.toml"):
        (tmp_path / other).symlink_to(ROOT / other)
    changed = 0
    for file in (tmp_path / "rmcore/core/capabilities.py", tmp_path / "rmcore/config/pipeline.py"):
        before = file.read_text()
        file.write_text(without(before, name))
        after = file.read_text().splitlines()
        changed += sum(line not in after for line in before.splitlines())
    assert changed <= 3
    own = [tmp_path, tmp_path / "tests" / "support", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, own)), "RM_OPT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *TESTS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was run." in done.stdout


@pytest.mark.parametrize("name", MEASURING)
def test_nothing_else_imports_it(name):
    own = {"rmcore/config/pipeline.py", "tests/rmcore/test_tutorial.py"}  # the latter where it is there
    importing = set()
    for folder in CODE:
        for file in (ROOT / folder).rglob("*.py"):
            place = file.relative_to(ROOT).as_posix()
            if not place.startswith((f"rmcore/{name}/", f"tests/rmcore/{name}/")):
                importing |= {place} if re.search(rf"\brmcore\.{name}\b", file.read_text(encoding="utf-8")) else set()
    assert importing <= own
