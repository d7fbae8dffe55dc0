"""The list of mutants follows the code: each can be applied, and the tests that it names are there."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_mutant_can_be_applied_and_names_tests_that_are_there(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_run", program)  # dataclasses look their module up
    spec.loader.exec_module(program)
    mutants = program.read_mutants()
    assert len(mutants) >= 40
    assert [f"{one.name}: {problem}" for one in mutants if (problem := one.problem()) is not None] == []
