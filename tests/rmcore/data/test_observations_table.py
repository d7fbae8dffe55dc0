"""Observations come back from a Parquet table exactly as they went in."""

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import RowWriter
from rmcore.data.parquet_rows import RecordFile, write_records
from rmcore.data.table import OBSERVATIONS, write_pairs
from tests.support.turn_fields import METADATA, PROMPTS, TEXTS


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


@settings(max_examples=25, deadline=None)
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


def test_columns_can_be_read_by_others(tmp_path):
    write_records(OBSERVATIONS, [Observation("p", ("a", "b"), grades={"overall": (1.0, None)})], tmp_path / "t.parquet")
    (row,) = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert row["kind"] == "grades"
    assert (row["ranks"], row["grades"]) == (None, [("overall", [1.0, None])])


def test_what_is_no_table_of_observations_is_refused(tmp_path):
    with pytest.raises(DataError, match="the observations were not prepared"):
        list(RecordFile(OBSERVATIONS, tmp_path / "absent.parquet"))
    write_pairs([PreferencePair("p", "a", "b")], tmp_path / "pairs.parquet")
    with pytest.raises(DataError, match="no column 'observation_id': it is not a table of prepared observations"):
        list(RecordFile(OBSERVATIONS, tmp_path / "pairs.parquet"))
    with pytest.raises(DataError, match="one of the observations holds text that is not valid Unicode"):
        write_records(OBSERVATIONS, [Observation("p", ("a\ud800", "b"), ranks=(1, 1))], tmp_path / "t.parquet")
