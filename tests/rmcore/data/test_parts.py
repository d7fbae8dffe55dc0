"""A source in parts: together they are what is read in one go, wherever they are cut; pairs, or responses to score."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.audit import audit, format_audit
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_pairs
from source_sample import lines

RESPONSES = [{"prompt": f"p{number}", "response": None if number % 5 == 3 else f"r{number}"} for number in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gold_pairs):
    place = tmp_path_factory.mktemp("parts")
    write_pairs(gold_pairs[:31], place / "pairs.parquet")
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in gold_pairs[:31]]
    text = [*map(json.dumps, rows[:4]), "not JSON", '{"prompt": "p", "chosen": "same", "rejected": "same"}']
    (place / "pairs.jsonl").write_text("\n".join([*text, *map(json.dumps, rows[4:])]))
    sides = [
        {"pair_id": pair.pair_id, "role": role, "prompt": pair.prompt, "response": getattr(pair, role)}
        for role in ("chosen", "rejected")
        for pair in gold_pairs[:31]
    ]
    lines(sides, place / "sides.jsonl")
    lines(RESPONSES, place / "responses.jsonl")
    return place


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 40), st.none() | st.integers(1, 40), st.sampled_from(["pairs.parquet", "pairs.jsonl", "sides.jsonl"])
)
def test_the_pairs_of_all_parts_are_those_of_the_source(folder, size, limit, name):
    source = SourceInParts(str(folder / name), size, limit=limit)
    parts = list(source)
    whole = load_pairs(str(folder / name), limit=limit)
    assert [pair.pair_id for part in parts for pair in part.pairs] == [pair.pair_id for pair in whole.pairs]
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(len(part) == size for part in parts[:-1])
    assert 0 < len(parts[-1]) <= size
    if limit is None:
        assert (source.num_rows, source.num_unusable) == (whole.num_rows, len(whole.rejected))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 30), st.none() | st.integers(1, 30))
def test_the_responses_of_all_parts_are_those_of_the_source(folder, size, limit):
    path = str(folder / "responses.jsonl")
    source = SourceInParts(path, size, limit=limit)
    parts = list(source)
    read = RESPONSES[:limit]
    usable = [(row["prompt"], row["response"]) for row in read if row["response"] is not None]
    assert [row for part in parts for row in part.responses] == usable
    places = [place for place, row in enumerate(read, start=1) if row["response"] is not None]
    assert [row for part in parts for row in part.rows] == places
    assert [len(part.rows) for part in parts] == [len(part) for part in parts]
    assert (source.num_rows, source.num_unusable) == (len(read), len(read) - len(usable))


def test_a_damaged_first_line_says_nothing_about_the_others(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["not JSON", *(json.dumps(row) for row in RESPONSES)]))
    source = SourceInParts(str(path), 5)
    usable = [(row["prompt"], row["response"]) for row in RESPONSES if row["response"] is not None]
    assert [row for part in source for row in part.responses] == usable
    assert source.num_unusable == 1 + sum(row["response"] is None for row in RESPONSES)


UNUSABLE = [
    {"prompt": "No answer.", "response": None},
    {"prompt": " ", "response": "blank prompt"},
    {"prompt": ["two"], "response": "no text"},
    {"prompt": "half a pair of \ud800", "response": "no Unicode"},
]


@pytest.mark.parametrize("limit", [None, 5, 2**63, 10**30])
def test_responses_that_cannot_be_scored_are_counted(tmp_path, limit):
    source = SourceInParts(
        lines([*UNUSABLE, {"prompt": "Grüße!", "response": "a"}], tmp_path / "r.jsonl"), 9, limit=limit
    )
    [part] = source
    assert part.responses == [("Grüße!", "a")]
    assert (source.num_rows, source.num_unusable) == (5, 4)


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "chosen": "a", "rejected": "b"}],
        [{"pair_id": "1", "role": role, "prompt": "p", "response": role} for role in ("chosen", "rejected")],
    ],
    ids=["pair", "sides of a pair"],
)
def test_pairs_are_not_taken_for_responses(tmp_path, rows):
    [part] = SourceInParts(lines(rows, tmp_path / "rows.jsonl"), 10)
    assert (len(part.pairs), part.responses) == (1, [])


def test_nothing_is_read_before_it_is_asked_for(tmp_path, gold_pairs):
    """So memory holds one part, however long the file is."""
    write_pairs(gold_pairs[:40], tmp_path / "pairs.parquet")
    source = SourceInParts(str(tmp_path / "pairs.parquet"), 5)
    parts = iter(source)
    for number in range(1, 4):
        next(parts)
        assert source.num_rows <= 5 * number + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"prompt": "p", "response": null}\n', "nothing can be scored"),
        ('{"prompt": "p", "chosen": "a", "rejected": "a"}\n', "none gives a preference pair"),
        ('{"question": "p"}\n', "question"),
    ],
)
def test_a_source_without_a_usable_row_is_refused(tmp_path, text, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        list(SourceInParts(str(path), 5))


PAIR = {"prompt": "What is on it?", "chosen": "A cat.", "rejected": "A dog."}


@pytest.mark.parametrize(
    "part",
    [
        *({"documents": ["x"]}, {"context": "It is dark."}, {"History": [["q", "a"]]}, {"input": "apple"}),
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
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
