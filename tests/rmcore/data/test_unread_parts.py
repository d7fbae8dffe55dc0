"""A column that is part of the prompt and that nothing reads is named wherever data are read."""

import math

import pytest

from rmcore.data.audit import audit, format_audit
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.sources import load_pairs
from source_sample import lines

PAIR = {"prompt": "What is on it?", "chosen": "A cat.", "rejected": "A dog."}


@pytest.mark.parametrize(
    "part", [{"documents": ["x"]}, {"context": "It is dark."}, {"History": [["q", "a"]]}, {"input": "apple"}]
)
def test_it_is_named_by_data_check_and_by_what_reads_in_parts(tmp_path, part):
    source = lines([PAIR, {**PAIR, **part}], tmp_path / "data.jsonl")
    [name] = part
    loaded = load_pairs(source)
    [notice] = loaded.notices()
    assert f"{name!r} (in 1 of the first 2)" in notice
    assert f"NOTE     {notice}" in format_audit(audit({"all": loaded.pairs}, [loaded]))
    for size in (1, 100):
        parts = SourceInParts(source, size)
        assert sum(len(one.pairs) for one in parts) == 2
        [said] = parts.notices
        assert name in said


def test_it_is_named_where_responses_are_scored(tmp_path):
    row = {"prompt": "What is on it?", "response": "A cat.", "system": "Be brief."}
    parts = SourceInParts(lines([row, {**row, "context": "It is dark."}], tmp_path / "data.jsonl"), 1)
    assert sum(len(one.responses) for one in parts) == 2
    [said] = parts.notices
    assert "'context' (in 1 of the first 2)" in said
    assert "system'" not in said


@pytest.mark.parametrize(
    "other",
    [{"question": " What is on it? "}, {"context": ""}, {"images": []}, {"images": "[]"}, {"input": None}, {"n": "x"}],
)
def test_other_columns_are_not(tmp_path, other):
    assert load_pairs(lines([{**PAIR, **other}], tmp_path / "data.jsonl")).notices() == []


@pytest.mark.parametrize("first", ["round", "", None, math.nan])
def test_an_input_that_a_layout_reads_is_not(tmp_path, first):
    row = {"instruction": "Name it.", "input": "round", "chosen": "A ball.", "rejected": "A box."}
    loaded = load_pairs(lines([row | {"input": first}, row], tmp_path / "data.jsonl"))
    assert loaded.notices() == []
    assert [pair.prompt for pair in loaded.pairs] == [
        "Name it.\nround" if first == "round" else "Name it.",
        "Name it.\nround",
    ]
