"""A waiting record is what was written, or is named: no file of it ends in a traceback."""

import json
from dataclasses import asdict

import pytest

from rmcore.core.errors import DataError
from tasks.run_record import RunRecord, plain_table, read_record

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


@pytest.mark.parametrize("value", [None, 7, "x", [1], {"a": 1}, True])
@pytest.mark.parametrize(
    "name", ["study", "tags", "params", "uid", "started_ms", "folders", "curves", "status", "more"]
)
def test_a_field_of_another_kind_is_named(tmp_path, name, value):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(asdict(WHOLE) | {name: value}))
    if (name, value) in (("study", "x"), ("uid", "x"), ("started_ms", 7), ("status", None)):
        assert getattr(read_record(path), name) == value
    else:
        with pytest.raises(DataError, match="is not a run record"):
            read_record(path)


def test_a_table_takes_only_what_json_has(tmp_path):
    with pytest.raises(TypeError, match="column 'path'"):
        plain_table([{"path": tmp_path}])
