"""Pairs come back from a Parquet table exactly as they went in, through both readers."""

import json

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import SCHEMA, read_pairs, write_pairs
from tests.support.turn_fields import PAIRS


@settings(max_examples=25, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=5))
def test_round_trip_is_exact_through_both_readers(tmp_path_factory, some_pairs):
    path = tmp_path_factory.mktemp("table") / "pairs.parquet"
    write_pairs(iter(some_pairs), path)
    assert read_pairs(path) == some_pairs
    assert load_pairs(str(path)).pairs == some_pairs


def test_many_batches_and_none(tmp_path):
    many = [PreferencePair(f"p{i}", "a", "b") for i in range(1500)]
    for expected in (many, []):
        write_pairs(expected, tmp_path / "pairs.parquet")
        assert read_pairs(tmp_path / "pairs.parquet") == expected


def test_a_single_user_turn_and_its_text_are_one_prompt(tmp_path):
    write_pairs(
        [PreferencePair((Message("user", "p"),), "a", "b"), PreferencePair("p", "a", "b")], tmp_path / "t.parquet"
    )
    first, second = read_pairs(tmp_path / "t.parquet")
    assert first == second
    assert first.prompt == "p"


def test_columns_can_be_read_by_others(tmp_path):
    pair = PreferencePair("p", "a", "b", 0.5, {"subset": "math", "n": 1})
    write_pairs([pair, PreferencePair("q", "a", "b")], tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.equals(SCHEMA)
    first, second = table.to_pylist()
    assert (first["prompt_id"], first["subset"], json.loads(first["metadata"])) == (
        pair.prompt_id,
        "math",
        {"subset": "math", "n": 1},
    )
    assert (second["subset"], second["target_margin"]) == (None, None)


def test_equal_pairs_give_equal_bytes(tmp_path):
    some = [PreferencePair(f"p{i}", "a", "b", float(i)) for i in range(50)]
    for name in ("one", "two"):
        write_pairs(some, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "t.parquet"
    write_pairs([PreferencePair("p", "a", "b")], path)
    with pytest.raises(DataError, match="not valid Unicode"):
        write_pairs([PreferencePair("p", "a", "\udc80")], path)
    assert len(read_pairs(path)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


def test_bad_tables_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="not there"):
        read_pairs(tmp_path / "none.parquet")
    path = tmp_path / "t.parquet"
    write_pairs([PreferencePair(f"p{i}", "a", "b") for i in range(100)], path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged"):
        read_pairs(path)
    pq.write_table(pq.read_table(_other(tmp_path)), path)
    with pytest.raises(DataError, match="no column 'pair_id'"):
        read_pairs(path)


def _other(folder):
    import pyarrow as pa

    pq.write_table(pa.table({"prompt": ["p"]}), folder / "other.parquet")
    return folder / "other.parquet"
