"""`rm-opt active study` as a user runs it: real Prefect and MLflow, a process a command."""

import html
import importlib.util
import json
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("commands", Path(__file__).with_name("commands.py"))
commands = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(commands)

pytestmark = pytest.mark.services
SMALL = ("--preset", "active-smoke", "--seeds", "2", "--set", "active.noise=[0.0]", "--set", "active.growth=3")


@pytest.fixture(scope="module")
def rm_opt(tmp_path_factory):
    """Runs a command and reads its summary."""
    home = commands.Home(tmp_path_factory.mktemp("active"))

    def run(*arguments):
        summary = home.folder / "summary.json"
        done = home.rm_opt(*arguments, "--summary", summary, check=False)
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
    report = Path(outcome["report"])
    assert report.parent == Path(outcome["folder"])
    page = html.unescape(report.read_text())
    assert all(claim["text"] in page for claim in found["claims"])
    assert "report      " in done.stdout
    assert "paired seeds" in report.with_name("summary.md").read_text()
    assert set(outcome["figures"]) == {"label_efficiency", "label_savings"}

    done, again = rm_opt("active", "study", *SMALL)
    assert "every stage was cached" in done.stdout
    assert again["results"]["registration"]["frozen_at"] == found["registration"]["frozen_at"]

    done, _ = rm_opt("active", "study", *SMALL, "--set", "active.acquisitions=[bald]")
    assert done.returncode != 0
    assert "add random" in done.stderr + done.stdout
