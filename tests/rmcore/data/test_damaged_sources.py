"""Damage to a row costs that row, and messages and lists that a file holds as text are read alike in every format."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import source_sample as sample
from rmcore.data.pair import is_blank
from rmcore.data.readers.sources import load_pairs, write_rejected
from tests.fuzz.data_files import one

write = sample.write


def plain(**changes):
    return {"prompt": "p", "chosen": "a", "rejected": "b", **changes}


def reasons(loaded):
    return [(row.row, row.reason) for row in loaded.rejected]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_what_is_written_is_read_and_what_is_damaged_gives_no_other_pairs(tmp_path_factory, seed):
    """Each layout, in each format, as some program writes it; or with some bytes of it lost, added or changed."""
    assert one(random.Random(seed), tmp_path_factory.mktemp("file")) in ("same", "subset", "refused")  # noqa: S311


GOOD_LINE = json.dumps(plain()).encode()
BAD_LINES = {
    b'{"prompt": "p", "chosen"': "not valid JSON",
    b'{"prompt": "\xff", "chosen": "a", "rejected": "b"}': "invalid UTF-8",
    b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}': "broken \\u escape",
    b'{"prompt": "p", "chosen": "a", "rejected": "b", "k\\ud83d": 1}': "broken \\u escape",
    b'{"prompt": "p", "chosen": "a", "rejected": "b", "k": {"\\ud83d": 1}}': "broken \\u escape",
    b"[1, 2]": "wrong type",
    b"7": "wrong type",
    b"[" * 100_000: "not valid JSON",
    b"9" * 5000: "not valid JSON",
    b'{"prompt": "p", "chosen": "a"}': "missing rejected",
    b'{"prompt": "p", "chosen": "a", "rejected": null}': "missing rejected",
    b"{}": "missing chosen",
    b'{"prompt": "p", "chosen": "a", "rejected": "b", "chosen": "c"}': "a key is repeated",
    b'{"prompt": "p", "chosen": [{"role": "user", "role": "assistant", "content": "a"}]}': "a key is repeated",
    b'{"prompt": "p", "chosen": "\\u0000\\u200b", "rejected": "b"}': "empty chosen",
    b'{"prompt": "\\u2060\\ufeff \\u3164", "chosen": "a", "rejected": "b"}': "empty prompt",
    b"\x00\x01\x02": "not valid JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_one_bad_line_costs_one_line(tmp_path, line, reason):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD_LINE + b"\r\n\n" + line + b"\n" + GOOD_LINE)
    loaded = load_pairs(str(path))
    assert (len(loaded.pairs), loaded.num_rows) == (2, 3)
    assert reasons(loaded) == [(3, reason)]
    write_rejected(loaded.rejected, tmp_path / "out" / "rejected_rows.jsonl")
    (written,) = (tmp_path / "out" / "rejected_rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(written) == {
        "row": 3, "reason": reason, "excerpt": loaded.rejected[0].excerpt, "pair_id": None
    }  # fmt: skip
    assert len(loaded.rejected[0].excerpt) <= 200


@pytest.mark.parametrize("form", ["csv", "json"])
def test_invalid_utf8_costs_one_row_in_other_text_formats(tmp_path, form):
    path = write([plain(), plain(chosen="XX"), plain(prompt="q")], tmp_path / f"data.{form}")
    path.write_bytes(path.read_bytes().replace(b"XX", b"\xc3("))
    assert reasons(load_pairs(str(path))) == [(2, "invalid UTF-8")]


def test_invalid_utf8_costs_one_row_in_parquet(tmp_path):
    texts = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": ["p"] * 3, "chosen": texts, "rejected": ["b"] * 3}), tmp_path / "data.parquet")
    loaded = load_pairs(str(tmp_path / "data.parquet"))
    assert reasons(loaded) == [(2, "invalid UTF-8")]
    assert [pair.chosen for pair in loaded.pairs] == ["good", "fine"]


def test_csv_cells(tmp_path):
    path = tmp_path / "data.csv"
    head = "prompt,chosen,rejected\n"
    path.write_text(
        head + 'p,"[1, 2]",b\np,a\np,"[{\'role\': \'user\'}]",b\n\n"p ""q""","multi\nline",b\np,say "x",b\n'
    )
    loaded = load_pairs(str(path))
    texts = [(pair.prompt, pair.chosen) for pair in loaded.pairs]
    assert texts == [("p", "[1, 2]"), ('p "q"', "multi\nline"), ("p", 'say "x"')]
    assert reasons(loaded) == [(2, "not valid CSV"), (3, "not valid JSON")]
    long = "word " * 100_000
    path.write_text(head + f"p,{long},b\n")
    assert load_pairs(str(path)).pairs[0].chosen == long


def test_a_repeated_key_costs_its_row_alone_in_json_too(tmp_path):
    row, twice = json.dumps(plain()), '{"prompt": "p", "meta": [{"a": 1, "a": 2}], "chosen": "a", "rejected": "b"}'
    for text in (f"[{row}, {twice}, {row}]", f"{row}\n{twice}\n{row}"):
        (tmp_path / "data.json").write_text(text)
        loaded = load_pairs(str(tmp_path / "data.json"))
        assert (len(loaded.pairs), reasons(loaded)) == (2, [(2, "a key is repeated")])
    header = "prompt,chosen,rejected\n"
    (tmp_path / "data.csv").write_text(header + 'p,"[{""role"": ""assistant"", ""role"": ""user""}]",b\np,a,b\n')
    assert reasons(load_pairs(str(tmp_path / "data.csv"))) == [(1, "a key is repeated")]


@given(st.text(st.sampled_from("\0\x01\x1f\x7f\u00ad\u200b\u200d\u2060\ufeff\u2800\u3164\ufe0f \t\n")), st.text())
def test_what_cannot_be_seen_is_blank_and_stays_where_something_can(unseen, text):
    assert is_blank(unseen)
    assert not is_blank(f"{unseen}e\u0301{unseen}{text}")


FORMATS = ["parquet", "json", "jsonl", "csv"]
TURNS = [{"role": "user", "content": 'Is it "a"?'}, {"role": "assistant", "content": "Yes, [1, 2]."}]


def read(folder, form, *rows):
    texts = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()} for row in rows
    ]
    return load_pairs(str(sample.write(texts, folder / f"data.{form}")))


def other(turns, text):
    return [*turns[:-1], {**turns[-1], "content": text}]


MESSAGES = {
    "message lists": ({"chosen": TURNS, "rejected": other(TURNS, "No.")}, ('Is it "a"?', "Yes, [1, 2].", "No.")),
    "one message": ({"prompt": "q", "chosen": {"role": "assistant", "content": "a"}, "rejected": TURNS[1:]},
                    ("q", "a", "Yes, [1, 2].")),
    "answers": ({"prompt": "q", "responses": [json.dumps(TURNS[1:]), json.dumps(other(TURNS[1:], "no"))],
                 "ranks": [2, 1]}, ("q", "no", "Yes, [1, 2].")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("row", "texts"), MESSAGES.values(), ids=MESSAGES)
def test_messages_as_text(tmp_path, form, row, texts):
    found = read(tmp_path, form, row, row).pairs
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in found] == [texts] * 2


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
