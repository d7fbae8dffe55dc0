"""`rm-opt active study` as a user runs it: real Prefect and MLflow, a process a command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--preset", "active-smoke", "--seeds", "2", "--set", "active.noise=[0.0]", "--set", "active.growth=3")


@pytest.fixture(scope="module")
def rm_opt(tmp_path_factory):
    """Runs a command in a home of its own, on a copy of the packages: a key digests the code."""
    root = tmp_path_factory.mktemp("active")
    home, code = root / "home", root / "code"
    home.mkdir()
    for package in ("rmcore", "tasks", "flows", "experiments"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}

    def run(*arguments):
        summary = home / "summary.json"
        done = subprocess.run(
            [sys.executable, "-c", "from flows.cli import main; main()", *arguments, "--summary", str(summary)],
            cwd=home, env=kept | {"RM_OPT_HOME": str(home), "PYTHONPATH": str(code)},
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        return done, json.loads(summary.read_text() or "{}") if summary.exists() else {}

    return run


def test_the_study_says_what_was_saved_and_is_not_run_twice(rm_opt):
    done, outcome = rm_opt("active", "study", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert outcome["executed"] == ["prepare", "features", "active"]
    found = outcome["results"]
    assert found["headline"] in " ".join(done.stdout.split())
    assert "d-optimal > 40%" in done.stdout
    assert "inconclusive" in done.stdout  # two seeds claim nothing
    assert found["registration"]["number"] == 1
    assert "paired seeds" in (Path(outcome["folder"]) / "summary.md").read_text()
    assert set(outcome["figures"]) == {"label_efficiency", "label_savings"}

    done, again = rm_opt("active", "study", *SMALL)
    assert "every stage was cached" in done.stdout
    assert again["results"]["registration"]["frozen_at"] == found["registration"]["frozen_at"]

    done, _ = rm_opt("active", "study", *SMALL, "--set", "active.acquisitions=[bald]")
    assert done.returncode != 0
    assert "add random" in done.stderr + done.stdout
