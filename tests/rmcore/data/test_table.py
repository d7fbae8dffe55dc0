"""Pairs come back from a Parquet table exactly as they went in, through both readers."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import RowWriter
from rmcore.data.parquet_rows import RecordFile, write_records
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import OBSERVATIONS, SCHEMA, read_pairs, write_converted, write_pairs
from tests.support.turn_fields import METADATA, PAIRS, PROMPTS, TEXTS


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(PAIRS, min_size=1, max_size=6))
def test_round_trip_is_exact_through_both_readers_and_both_forms(tmp_path_factory, some_pairs):
    folder = tmp_path_factory.mktemp("table")
    for form in (".parquet", ".jsonl"):
        write_converted(some_pairs, folder / f"pairs{form}")
        loaded = load_pairs(str(folder / f"pairs{form}"))
        assert (loaded.pairs, loaded.rejected) == (some_pairs, [])
        assert [pair.pair_id for pair in loaded.pairs] == [pair.pair_id for pair in some_pairs]
    assert read_pairs(folder / "pairs.parquet") == some_pairs
    write_pairs(iter(some_pairs), folder / "stream.parquet")
    assert (folder / "stream.parquet").read_bytes() == (folder / "pairs.parquet").read_bytes()


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
    pq.write_table(pa.table({"prompt": ["p"]}), path)
    with pytest.raises(DataError, match="no column 'pair_id'"):
        read_pairs(path)


@st.composite
def observations(draw):
    answers = tuple(draw(st.lists(TEXTS, min_size=1, max_size=5, unique=True)))
    said = {"annotator": draw(st.none() | TEXTS), "weight": draw(st.floats(0.01, 100)), "metadata": draw(METADATA)}
    if len(answers) == 1 or draw(st.booleans()):
        numbers = st.floats(allow_nan=False, allow_infinity=False)
        given = st.tuples(*[st.none() | numbers] * (len(answers) - 1), numbers)
        grades = draw(st.dictionaries(st.text(), given, min_size=1, max_size=3))
        return Observation(draw(PROMPTS), answers, grades=grades, **said)
    ranks = draw(st.lists(st.integers(1, 3), min_size=len(answers), max_size=len(answers)))
    dense = tuple(sorted(set(ranks)).index(rank) + 1 for rank in ranks)
    top_only = len(answers) > 2 and dense.count(1) == 1 and draw(st.booleans())
    return Observation(draw(PROMPTS), answers, ranks=dense, top_only=top_only, **said)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(observations(), max_size=5))
def test_round_trip_is_exact_on_disk_and_in_between(tmp_path_factory, some):
    folder = tmp_path_factory.mktemp("table")
    write_records(OBSERVATIONS, iter(some), folder / "a.parquet")
    with RowWriter(folder / "a.arrow", OBSERVATIONS) as writer:
        writer.extend(some)
    writer.rows().write_parquet(folder / "b.parquet")
    assert list(writer.rows()) == some
    assert (
        list(RecordFile(OBSERVATIONS, folder / "a.parquet"))
        == list(RecordFile(OBSERVATIONS, folder / "b.parquet"))
        == some
    )
    assert len(RecordFile(OBSERVATIONS, folder / "a.parquet")) == len(some)
