"""benchmarks/accuracy_vs_trl.py: what is done is told again without the data and the library that it was made with."""

import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def test_finished_cells_need_neither_their_sources_nor_trl(tmp_path, monkeypatch):
    trl = importlib.import_module("accuracy_vs_trl")
    first = trl.Cell("tiny", "", 0, 16, 4, 64, 1)
    for side in trl.SIDES:
        cell = replace(first, side=side)
        cell.file(tmp_path).write_text(json.dumps({"cell": asdict(cell), "wall_seconds": 1.0}))
    monkeypatch.setattr(trl, "find_spec", lambda name: None)
    nowhere = (tmp_path / "train.parquet", tmp_path / "test.parquet")
    found = trl.run_model(first, 1, nowhere, tmp_path)
    assert [one["cell"]["side"] for one in found] == list(trl.SIDES)
    with pytest.raises(SystemExit, match="TRL is not installed"):  # of a second seed no cell is there
        trl.run_model(first, 2, nowhere, tmp_path)
