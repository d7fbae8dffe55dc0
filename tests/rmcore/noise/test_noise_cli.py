"""`rm-opt data noise` from a file of pairs to ledger, review sheet and cleaned file."""

import json

import pandas as pd
import pytest

from label_sheets import fill, rows_of
from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.config.data import GoldConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import read_pairs, write_pairs

pytestmark = pytest.mark.slow


def run(*arguments):
    return guard(lambda: app([str(argument) for argument in arguments], standalone_mode=False))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    place = tmp_path_factory.mktemp("noise") / "pairs.parquet"
    write_pairs(generate_pairs(GoldConfig(num_prompts=40, pairs_per_prompt=2), 3).pairs, place)
    return place


def test_a_ledger_a_review_and_a_cleaned_file(pairs, tiny_folder, tmp_path, capsys):
    out, before = tmp_path / "ledger", pairs.read_bytes()
    asked = ("data", "noise", pairs, "--model", tiny_folder, "--folds", 2, "--out", out)
    to = ("--apply", "drop", "--to", tmp_path / "cleaned.parquet")
    assert run(*asked, "--review", 6, *to) == 0
    said = capsys.readouterr().out
    assert "80 pairs of 40 prompts" in said
    assert "most doubtful:" in said
    table, record = pd.read_parquet(out / "ledger.parquet"), json.loads((out / "noise.json").read_text())
    known = {pair.pair_id: pair for pair in read_pairs(pairs)}
    assert set(table["pair_id"]) == known.keys()
    assert record["flags"]["called"] == table["called"].sum()
    assert len(load_pairs(str(tmp_path / "cleaned.parquet")).pairs) == 80 - table["called"].sum()
    assert pairs.read_bytes() == before

    sheet = out / "review.csv"
    assert len(rows := rows_of(sheet)) == 6
    fill(sheet, lambda row: "a")
    reviewed = tmp_path / "reviewed.jsonl"
    assert run("data", "ingest", "--labels", sheet, "--pool", pairs, "--out", reviewed) == 0
    assert {pair.pair_id: pair.chosen for pair in load_pairs(str(reviewed)).pairs} == {
        row["pair_id"]: row["response_a"] for row in rows
    }

    computed = (out / "features.npy").stat().st_mtime_ns
    assert run(*asked) == 0
    assert (out / "features.npy").stat().st_mtime_ns == computed
    pd.testing.assert_frame_equal(pd.read_parquet(out / "ledger.parquet"), table)


def test_what_cannot_be_is_refused_before_anything_is_computed(pairs, tmp_path, capsys):
    asked = ("data", "noise", pairs, "--model", "tiny", "--out", tmp_path / "ledger")
    assert run(*asked, "--apply", "drop") == 2
    assert "--apply drop|weight and --to FILE go together" in capsys.readouterr().err
    assert run(*asked, "--apply", "drop", "--to", pairs) == 2
    assert "is the source itself" in capsys.readouterr().err
    to = ("--apply", "drop", "--to", tmp_path / "new.parquet")
    assert run(*asked, *to, "--limit", 60) == 2
    assert "--limit reads a part of it" in capsys.readouterr().err
    tied = tmp_path / "tied.jsonl"
    rows = [{"prompt": "Hi", "responses": ["a", "b", "c"], "ranks": [1, 2, 2]}]
    tied.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("data", "noise", tied, "--model", "tiny", "--out", tmp_path / "ledger", *to) == 2
    assert "says more than pairs" in capsys.readouterr().err
    few = tmp_path / "few.parquet"
    write_pairs(read_pairs(pairs, 40), few)
    assert run("data", "noise", few, "--model", "tiny", "--out", tmp_path / "ledger") == 2
    assert "40 pairs of 20 prompts" in capsys.readouterr().err
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "review.csv").write_text("pair_id\n")
    assert run(*asked, "--review", 3) == 2
    assert "may hold labels" in capsys.readouterr().err
    assert not (tmp_path / "ledger" / "features.npy").exists()
