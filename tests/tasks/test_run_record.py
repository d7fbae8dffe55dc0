"""What waits for MLflow is what was written, or is named; names of a study's runs tell them apart and fit MLflow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException

from rmcore.core.errors import DataError
from rmcore.reporting.runs import KEY_DIGITS
from tasks.comparison_view import told_apart
from tasks.mlflow_client import in_one_line
from tasks.run_record import RunRecord, read_record

WHOLE = RunRecord(
    "study",
    "seed 0",
    {"rm.kind": "cell"},
    {"train.lr": "0.1"},
    "http://127.0.0.1:9",
    parent_uid="m",
    folders={"/a": "train"},
    numbers={"eval/a": 0.5},
    model={"moves": {"ready": True}},
    status="FAILED",
    ended_ms=3,
)


def test_a_record_comes_back_as_it_was(tmp_path):
    assert read_record(WHOLE.save(tmp_path)) == WHOLE


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{", b"[]", b"null", b"7", b"{}", b"[" * 20_000], ids=repr)
def test_what_is_no_record_is_named(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"record\.json is not a run record"):
        read_record(path)


COLUMN = 250
"""Characters of MLflow's column of names, which PostgreSQL holds it to."""
PARAMS = st.dictionaries(
    st.sampled_from(["policy.judge", "train.lr", "model.name"]), st.text(min_size=100, max_size=400), min_size=3
)


@given(st.lists(PARAMS, min_size=2, max_size=3))
def test_a_name_with_the_digits_of_its_key_fits_the_column(params):
    assert all(len(f"{name} · {'0' * KEY_DIGITS}") <= COLUMN for name in told_apart(params))


def test_values_that_end_alike_are_told_whole():
    judges = [f"openai:{model}@http://127.0.0.1:8000/v1" for model in ("small", "large")]
    assert told_apart([{"policy.judge": judge} for judge in judges]) == [f"judge={judge}" for judge in judges]
    assert told_apart([{"data.source": f"/a/{name}.csv"} for name in "xy"]) == ["data=x.csv", "data=y.csv"]


def test_an_error_is_told_without_the_login_of_an_address():
    error = MlflowException("API request to https://me:secret@host/api failed with HTTPSConnectionPool\nmore")
    assert in_one_line(error) == "MlflowException: API request to https://host/api failed with HTTPSConnectionPool"
    assert in_one_line(ValueError("\n")) == "ValueError"
