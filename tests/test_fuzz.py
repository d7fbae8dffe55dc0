"""`make fuzz` at a small size, and that it would see what it looks for."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("data", 25), ("configs", 15), ("checkpoints", 8), ("stores", 10), ("runs", 12)]
)
def test_a_few_cases_of_each_kind_give_no_finding(kind, count, tmp_path):
    """Runs are in three rounds of four, with a real MLflow on SQLite: none is lost and none stays RUNNING."""
    command = [sys.executable, FUZZ / "run.py", "--only", kind, "--count", str(count), "--keep", tmp_path]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # as in every process of a home
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 findings"
    assert done.stdout.splitlines()[1].split()[:2] == [kind, str(count)]


@pytest.fixture
def module(monkeypatch, request):
    monkeypatch.syspath_prepend(FUZZ)
    yield __import__(request.param)
    for name in ("data_files", "settings_files", "stored_artifacts"):
        sys.modules.pop(name, None)


def invent_a_pair(patch):
    from rmcore.data.readers import sources

    load = sources.load_pairs

    def loaded(*given):
        found = load(*given)
        found.pairs[:2] = [type(found.pairs[0])(found.pairs[0].prompt, found.pairs[1].chosen, found.pairs[0].rejected)]
        return found

    patch.setattr(sources, "load_pairs", loaded)


def take_all_for_valid(patch):
    from rmcore.core import store

    patch.setattr(store.Store, "status", lambda *_: store.ArtifactStatus("valid"))


def leave_out_what_is_wrong(patch):
    from flows import settings

    patch.setattr(settings, "load_config", lambda preset, *_: settings.PRESETS[preset or "smoke"])


@pytest.mark.parametrize(
    ("module", "defect"),
    [
        ("data_files", invent_a_pair),
        ("stored_artifacts", take_all_for_valid),
        ("settings_files", leave_out_what_is_wrong),
    ],
    indirect=["module"],
)
@pytest.mark.slow
def test_a_defect_is_found_within_thirty_cases(module, defect, monkeypatch, tmp_path):
    defect(monkeypatch)
    places = [tmp_path / str(number) for number in range(30)]

    def try_all():
        for place in places:
            place.mkdir()
            module.one(random.Random(f"defect {place.name}"), place)  # noqa: S311 - to be repeated

    with pytest.raises(sys.modules["data_files"].SilentDifference):
        try_all()
