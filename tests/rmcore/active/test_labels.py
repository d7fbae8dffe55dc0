"""A CSV of pairs to label goes out blind and comes back checked, whole or not at all."""

import json

import pandas as pd
import pytest

from label_sheets import fill, rows_of, write_rows
from rmcore.active.labels import ingest, plain, read_proposal, same_texts, write_proposal
from rmcore.config.data import GoldConfig
from rmcore.core.errors import DataError
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.sources import load_pairs


@pytest.fixture
def pool():
    return generate_pairs(GoldConfig(num_prompts=40, pairs_per_prompt=3), seed=5).pairs


def truth(pool):
    chosen = {pair.pair_id: pair.chosen for pair in pool}
    return lambda row: "a" if row["response_a"] == chosen[row["pair_id"]] else "b"


def test_labels_come_back_as_the_pairs_that_were_meant(pool, tmp_path):
    dialogue = (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "2 + 2?"))
    pool = [*pool, PreferencePair(dialogue, "4,\nof course", "5")]
    write_proposal(pool, tmp_path / "to_label.csv", seed=0)
    fill(tmp_path / "to_label.csv", truth(pool))
    found = ingest(tmp_path / "to_label.csv", pool, tmp_path / "labelled.jsonl")
    assert (found.num_new, found.num_empty, found.num_labelled) == (len(pool), 0, len(pool))
    back = {pair.pair_id: pair for pair in load_pairs(str(tmp_path / "labelled.jsonl")).pairs}
    for pair in pool:
        assert (back[pair.pair_id].prompt, back[pair.pair_id].chosen) == (pair.prompt, pair.chosen)
        assert back[pair.pair_id].rejected == pair.rejected


def test_the_order_of_a_row_is_a_coin_and_not_the_pools_order(pool, tmp_path):
    turned = [PreferencePair(p.prompt, p.rejected, p.chosen, pair_id=p.pair_id) for p in pool]
    first = rows_of(write_proposal(pool, tmp_path / "a.csv", seed=0))
    second = rows_of(write_proposal(turned, tmp_path / "b.csv", seed=0))
    assert first == second  # labels, should the pool have any, show nowhere
    is_first = truth(pool)
    share = sum(is_first(row) == "a" for row in first) / len(pool)
    assert 0.3 < share < 0.7
    assert rows_of(write_proposal(pool, tmp_path / "c.csv", seed=1)) != first
    with pytest.raises(DataError, match="is there already"):  # and may hold labels
        write_proposal(pool, tmp_path / "c.csv", seed=1)


def test_undecided_rows_may_come_later(pool, tmp_path):
    few, out = pool[:6], tmp_path / "labelled.jsonl"
    path = write_proposal(few, tmp_path / "to_label.csv", seed=0)
    later = {pair.pair_id for pair in few[:2]}
    fill(path, lambda row: "" if row["pair_id"] in later else " A ")
    assert ingest(path, pool, out).num_empty == 2
    fill(path, lambda row: "b" if row["pair_id"] in later else "")
    found = ingest(path, pool, out)
    assert (found.num_new, found.num_labelled) == (2, 6)


CALL = '=HYPERLINK("http://x.example","y")'
FORMULAS = (CALL, "=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "'=1", "''-", "\uff1d1")


@pytest.mark.parametrize("saved_again", [False, True], ids=["as it was", "saved by another program"])
def test_no_cell_is_a_formula_and_every_text_comes_back(tmp_path, saved_again):
    texts = [*FORMULAS, "'tis", "1 = 1", "''", "plain", "p\rq", "three\r\nfour"]
    pool = [PreferencePair(text, f"{text} a", f"{text} b", pair_id=text.replace("\r", "")) for text in texts]
    path = write_proposal(pool, tmp_path / "to_label.csv", seed=0)
    assert not [cell for row in rows_of(path) for cell in row.values() if cell[:1] in tuple("=+-@\t\r\uff1d")]
    if saved_again:
        pd.read_csv(path, dtype=str, keep_default_na=False).to_csv(path, index=False)
    for row, pair in zip(read_proposal(path), pool, strict=True):
        assert (row["pair_id"], row["prompt"]) == (pair.pair_id, plain(pair.prompt))
        assert same_texts(row, pair)
    fill(path, lambda row: "a")
    assert ingest(path, pool, tmp_path / "labelled.jsonl").num_new == len(pool)


LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"
"""What `str.splitlines` splits at; only a line break ends a line of JSONL."""


def test_labels_may_hold_any_character_that_ends_a_line_elsewhere(tmp_path):
    pool = [PreferencePair(f"q{i}{LINE_ENDS}?", f"yes{LINE_ENDS}{i}", f"no{LINE_ENDS}{i}") for i in range(4)]
    out = tmp_path / "labelled.jsonl"
    for number, part in enumerate((pool[:2], pool[2:]), start=1):
        path = write_proposal(part, tmp_path / f"{number}.csv", seed=0)
        fill(path, lambda row: "a")
        assert ingest(path, pool, out).num_labelled == 2 * number
    out.write_bytes(out.read_bytes().removesuffix(b"\n"))  # an editor that leaves the last line break out
    assert len(load_pairs(str(out)).pairs) == 4
    with pytest.raises(DataError, match=r"labelled in .* already"):
        ingest(path, pool, out)
    out.write_text("[1]\n")
    with pytest.raises(DataError, match="a line that is no label"):
        ingest(path, pool, out)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [*rows, rows[0] | {"pair_id": "stranger"}], "no pair that was proposed: stranger"),
        (lambda rows: [*rows, rows[1]], "more than once"),
        (lambda rows: [rows[0] | {"preferred": "both"}, *rows[1:]], "another answer than a or b"),
        (lambda rows: [rows[0] | {"response_a": "other"}, *rows[1:]], "other responses than the pairs"),
        (lambda rows: [{name: row[name] for name in row if name != "preferred"} for row in rows], "lacks the columns"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_taken_over(pool, tmp_path, change, words):
    out = tmp_path / "labelled.jsonl"
    good = write_proposal(pool[4:6], tmp_path / "good.csv", seed=0)
    fill(good, truth(pool))
    ingest(good, pool, out)
    before = out.read_bytes()
    rows = change(
        [
            {"pair_id": p.pair_id, "prompt": "", "response_a": p.chosen, "response_b": p.rejected, "preferred": "a"}
            for p in pool[:4]
        ]
    )
    write_rows(tmp_path / "bad.csv", rows)
    with pytest.raises(DataError, match=words):
        ingest(tmp_path / "bad.csv", pool, out)
    assert out.read_bytes() == before
    with pytest.raises(DataError, match=r"labelled in .* already"):
        ingest(good, pool, out)
    assert out.read_bytes() == before
    assert [json.loads(line)["pair_id"] for line in before.decode().splitlines()] == [p.pair_id for p in pool[4:6]]


def test_a_column_that_is_there_twice_is_refused(pool, tmp_path):
    """A spreadsheet in which somebody has copied a column holds two answers, and which one counts is unknown."""
    path = write_proposal(pool, tmp_path / "a.csv", seed=0)
    path.write_text(path.read_text().replace("preferred", "preferred,preferred", 1))
    with pytest.raises(DataError, match=r"has the column 'preferred' twice"):
        ingest(path, pool, tmp_path / "out.jsonl")
