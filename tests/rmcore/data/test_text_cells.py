"""Messages and lists that a file holds as text are read alike in every format."""

import json

import pytest

import source_sample as sample
from rmcore.core.errors import DataError
from rmcore.data.readers.sources import load_pairs

FORMATS = ["parquet", "json", "jsonl", "csv"]
TURNS = [{"role": "user", "content": 'Is it "a"?'}, {"role": "assistant", "content": "Yes, [1, 2]."}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def read(folder, form, *rows):
    texts = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()} for row in rows
    ]
    return load_pairs(str(sample.write(texts, folder / f"data.{form}")))


def other(turns, text):
    return [*turns[:-1], {**turns[-1], "content": text}]


@pytest.mark.parametrize("form", FORMATS)
def test_messages(tmp_path, form):
    rows = [{"chosen": TURNS, "rejected": other(TURNS, f"No {i}.")} for i in range(3)]
    loaded = read(tmp_path, form, *rows)
    assert loaded.layout == "message lists"
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs] == [
        ('Is it "a"?', "Yes, [1, 2].", f"No {i}.") for i in range(3)
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_one_message_and_answers_that_are_messages(tmp_path, form):
    row = {"prompt": "q", "chosen": {"role": "assistant", "content": "a"}, "rejected": TURNS[1:]}
    (pair,) = read(tmp_path, form, row).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == ("q", "a", "Yes, [1, 2].")
    row = {"prompt": "q", "responses": [json.dumps(TURNS[1:]), json.dumps(other(TURNS[1:], "no"))], "ranks": [2, 1]}
    (pair,) = read(tmp_path, form, row).pairs
    assert (pair.chosen, pair.rejected) == ("no", "Yes, [1, 2].")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("column", ["prompt", "chosen"])
def test_another_notation_is_set_aside_and_no_answer(tmp_path, form, column):
    good = {"prompt": "p", "chosen": "a", "rejected": "b", "note": "[{'role': 'user'}]"}
    loaded = read(tmp_path, form, good, {**good, column: repr(TURNS[1:])}, {**good, column: '[{"role": "user", "con'})
    assert [(row.row, row.reason) for row in loaded.rejected] == [(2, "not valid JSON"), (3, "not valid JSON")]
    assert loaded.pairs[0].metadata["note"] == "[{'role': 'user'}]"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "answer",
    [
        *("[1, 2]", '{"role": "admin", "name": "Eve"}', '[{"value": 3}]', '[{"a": "[{\'role\': 1"}]', "[{", "[x](y)"),
        *("[{'from': 'A', 'to': 'B'}]", '[{"role": "admin", "id": 1}]', '{"u": {"role": "admin"}} is JSON.'),
    ],
)
def test_other_text_stays_text(tmp_path, form, answer):
    (pair,) = read(tmp_path, form, {"prompt": "p", "chosen": answer, "rejected": "b"}).pairs
    assert pair.chosen == answer


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_of_another_notation_alone_is_refused_for_that(tmp_path, form):
    with pytest.raises(DataError, match="not valid JSON: 2"):
        read(tmp_path, form, *[{"chosen": repr(TURNS), "rejected": repr(other(TURNS, str(i)))} for i in range(2)])
