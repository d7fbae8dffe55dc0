"""What `rm-opt data convert` writes reads again to the same pairs, and it overwrites nothing unasked."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_converted
from tests.support.turn_fields import PAIRS

FIXTURES = Path(__file__).with_name("fixtures")


def rm_opt(*arguments):
    return guard(lambda: app([*map(str, arguments)], standalone_mode=False))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(PAIRS, min_size=1, max_size=6), st.sampled_from([".parquet", ".jsonl"]))
def test_any_pairs_read_again_as_they_were(tmp_path_factory, written, form):
    path = tmp_path_factory.mktemp("convert") / f"pairs{form}"
    write_converted(written, path)
    loaded = load_pairs(str(path))
    assert loaded.pairs == written
    assert [pair.pair_id for pair in loaded.pairs] == [pair.pair_id for pair in written]
    assert loaded.rejected == []


def test_it_says_what_was_read_written_and_left_out_and_why(tmp_path, capsys):
    out = tmp_path / "pairs.parquet"
    assert rm_opt("data", "convert", FIXTURES / "a_b.csv", out, "--rejected-rows", tmp_path / "left_out.jsonl") == 0
    shown = capsys.readouterr().out
    for line in ("two answers and a winner", "rows read                               7",
                 "pairs written                           2", "rows left out                           4",
                 "ties, which are no pairs                1", "    winner not understood               1",
                 "1 of 7 rows", f"rm-opt data check {out}"):  # fmt: skip
        assert line in shown
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    assert reasons == ["winner not understood", "not labelled", "empty rejected", "identical sides"]


def test_named_columns_and_a_limit(tmp_path):
    out = tmp_path / "pairs.jsonl"
    names = ["--prompt-column", "question", "--chosen-column", "good", "--rejected-column", "bad", "--limit", 1]
    assert rm_opt("data", "convert", FIXTURES / "other_names.csv", out, *names) == 0
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["prompt"] == "Name a fruit."


def test_it_overwrites_nothing_unasked_and_never_its_source(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    out.write_text("mine")
    assert rm_opt("data", "convert", source, out) == 2
    assert "is there already: name another file, or give --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert rm_opt("data", "convert", source, out, "--force") == 0
    assert len(load_pairs(str(out)).pairs) == 1
    before = source.read_bytes()
    assert rm_opt("data", "convert", source, source, "--force") == 2
    assert "is the source itself" in capsys.readouterr().err
    assert source.read_bytes() == before
    for wrong, word in ((tmp_path / "out.csv", "neither in .parquet nor in .jsonl"), (tmp_path / "x.jsonl", "folder")):
        (tmp_path / "x.jsonl").mkdir(exist_ok=True)
        assert rm_opt("data", "convert", source, wrong, "--force") == 2
        assert word in capsys.readouterr().err
