"""The list of mutants follows the code, and of several mutants one whose tests never end does not stop the others."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def program(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_run", program)  # dataclasses look their module up
    spec.loader.exec_module(program)
    return program


def test_every_mutant_can_be_applied_and_names_tests_that_are_there(program):
    mutants = program.read_mutants()
    assert len(mutants) >= 40
    assert [f"{one.name}: {problem}" for one in mutants if (problem := one.problem()) is not None] == []


@pytest.mark.slow
def test_what_is_killed_survives_or_never_ends_is_said_of_each(program, monkeypatch, tmp_path):
    (tmp_path / "rmcore").mkdir()
    (tmp_path / "rmcore" / "__init__.py").write_text("number = 1\n")
    check = "import rmcore\ndef test_it():\n    while rmcore.number == 2: pass\n    assert rmcore.number != 3\n"
    (tmp_path / "test_number.py").write_text(check)
    for words in (("init", "--quiet"), ("add", "--all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    mutants = [
        program.Mutant(
            str(new), "rmcore/__init__.py", "1", str(new), ("test_number.py",), "", 3.0 if new == 2 else 900.0
        )
        for new in (2, 3, 4)
    ]
    results = [program.judge(one) for one in mutants]
    assert [one.outcome for one in results] == ["timed out", "killed", "survived"]
    assert program.without_mutants(results) == results
    (tmp_path / "test_number.py").write_text(check + "    assert False\n")
    assert [one.outcome for one in program.without_mutants(results)] == ["timed out", "error", "survived"]
