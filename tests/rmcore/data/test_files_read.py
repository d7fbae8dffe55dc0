"""Files as programs write them: no text is read as another one, and what is damaged costs its row, or the whole file.

A table: a file, its pairs, and the rows that are set aside, each with its number and reason.
"""

import csv
import gzip
import io
import json
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.pair import is_blank
from rmcore.data.readers import files, tables
from rmcore.data.readers.sources import load_pairs, write_rejected
from source_sample import lines, put, write
from tests.fuzz.data_files import one

HEADER, TURNED = "prompt,chosen,rejected", "rejected,prompt,chosen"
ROW = "p{0},good {0},bad {0}"
AGAIN, TWICE = "the header again", "a key is repeated"
GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}
LINE, LONG = json.dumps(GOOD), "word " * 100_000
BAD_TEXTS = pa.array([b"good 0", b"\xff", b"good 2"], pa.binary()).view(pa.string())


def table(*rows, end="\n"):
    return end.join(row.format(place) for place, row in enumerate(rows)) + end


def good(*numbers):
    return [(f"p{number}", f"good {number}", f"bad {number}") for number in numbers]


READ = {
    "again.csv": (table(HEADER, ROW, HEADER, ROW), good(1, 3), [(2, AGAIN)]),
    "spelled.csv": (table(HEADER, ROW, '"Prompt", Chosen ,REJECTED', ROW), good(1, 3), [(2, AGAIN)]),
    "turned.csv": (table(HEADER, ROW, TURNED, "bad {0},p{0},good {0}"), good(1, 3), [(2, AGAIN)]),
    "turned.tsv": (
        table(HEADER, ROW, TURNED, "bad {0},p{0},good {0}").replace(",", "\t"), good(1, 3), [(2, AGAIN)]
    ),
    "wide.csv": (table(f"{HEADER},,", ROW, HEADER, f"{ROW},,"), good(1, 3), [(2, AGAIN)]),
    "one_name.csv": (table(HEADER, "p{0},good {0},chosen"), [("p1", "good 1", "chosen")], []),
    "survey.csv": (
        table(HEADER, "Question?,A,B", *['"{{""ImportId"":""Q1""}}","{{""ImportId"":""Q2""}}",'], ROW, ROW),
        good(3, 4),
        [],
    ),
    "nothing.csv": (
        table(HEADER, ROW, *(f"p,good,{word}" for word in ("NULL", "None", "N/A", "NaN", "nan", "#N/A", " null "))),
        good(1),
        [(row, "missing rejected") for row in range(2, 9)],
    ),
    "nothing_else.csv": (table(f"{HEADER},margin", f"{ROW},NULL", f"{ROW},n/a"), good(1, 2), []),
    "empty_columns.csv": (table(f"{HEADER},,", f"{ROW},,", ROW, f"{ROW},,,"), good(1, 2, 3), []),
    "separator.csv": ("sep=;\n" + table(HEADER, ROW, ROW).replace(",", ";"), good(1, 2), []),
    "quoted_separator.csv": ('"sep=|"\r\n\r\n' + table(HEADER, ROW, end="\r\n").replace(",", "|"), good(1), []),
    "both.csv": (
        "\ufeffsep=;\n" + table(f"{HEADER},", f"{ROW},", ROW, f"{ROW},,").replace(",", ";"), good(1, 2, 3), []
    ),
    "beyond.csv": (table(f"{HEADER},,", f"{ROW},,", f"{ROW},lost,"), good(1), [(2, "not valid CSV")]),
    "cells.csv": (
        HEADER + '\np,"[1, 2]",b\np,a\np,"[{\'role\': \'user\'}]",b\n\n"p ""q""","multi\nline",b\np,say "x",b\n',
        [("p", "[1, 2]", "b"), ('p "q"', "multi\nline", "b"), ("p", 'say "x"', "b")],
        [(2, "not valid CSV"), (3, "not valid JSON")],
    ),
    "long.csv": (f"{HEADER}\np,{LONG},b\n", [("p", LONG, "b")], []),
    "other_bytes.csv": (
        table(HEADER, ROW, "q,XX,b", ROW).encode().replace(b"XX", b"\xc3("), good(1, 3), [(2, "invalid UTF-8")]
    ),
    "other_bytes.json": (
        f"[{LINE}, {LINE.replace('a', 'XX')}]".encode().replace(b"XX", b"\xc3("), [("p", "a", "b")],
        [(2, "invalid UTF-8")],
    ),
    "other_bytes.parquet": (
        pa.table({"prompt": ["p0", "p", "p2"], "chosen": BAD_TEXTS, "rejected": ["bad 0", "b", "bad 2"]}),
        good(0, 2),
        [(2, "invalid UTF-8")],
    ),
    "twice.json": (f'[{LINE}, {{"prompt": "p", "meta": [{{"a": 1, "a": 2}}]}}, {LINE}]', [("p", "a", "b")] * 2,
                   [(2, TWICE)]),
    "twice_in_lines.json": (f'{LINE}\n{{"prompt": "p", "prompt": "q"}}\n{LINE}', [("p", "a", "b")] * 2, [(2, TWICE)]),
    "twice.csv": (f'{HEADER}\np,"[{{""role"": ""assistant"", ""role"": ""user""}}]",b\np,a,b\n', [("p", "a", "b")],
                  [(1, TWICE)]),
}  # fmt: skip


def texts(loaded):
    return [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs]


def reasons(loaded):
    return [(row.row, row.reason) for row in loaded.rejected]


@pytest.mark.parametrize("name", READ)
def test_a_file_gives_its_pairs_and_sets_the_other_rows_aside(tmp_path, name):
    content, pairs, rejected = READ[name]
    loaded = load_pairs(put(content, tmp_path / name))
    assert (texts(loaded), reasons(loaded)) == (pairs, rejected)


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
    b"{}": "missing chosen",
    b'{"prompt": "p", "chosen": "a", "rejected": "b", "chosen": "c"}': "a key is repeated",
    b'{"prompt": "p", "chosen": [{"role": "user", "role": "assistant", "content": "a"}]}': "a key is repeated",
    b'{"prompt": "p", "chosen": "\\u0000\\u200b", "rejected": "b"}': "empty chosen",
    b"\x00\x01\x02": "not valid JSON",
}


def test_a_bad_line_costs_that_line(tmp_path):
    content = b"\n".join([b"\xef\xbb\xbf" + LINE.encode() + b"\r\n", *BAD_LINES, LINE.encode()])
    loaded = load_pairs(put(content, tmp_path / "data.jsonl"))
    assert (len(loaded.pairs), loaded.num_rows) == (2, 2 + len(BAD_LINES))
    assert reasons(loaded) == list(enumerate(BAD_LINES.values(), start=3))
    write_rejected(loaded.rejected, tmp_path / "out" / "rejected_rows.jsonl")
    written = (tmp_path / "out" / "rejected_rows.jsonl").read_text(encoding="utf-8").splitlines()
    for line, row in zip(map(json.loads, written), loaded.rejected, strict=True):
        assert line == {"row": row.row, "reason": row.reason, "excerpt": row.excerpt, "pair_id": None}
        assert len(row.excerpt) <= 200


@given(st.text(st.sampled_from("\0\x01\x1f\x7f\u00ad\u200b\u200d\u2060\ufeff\u2800\u3164\ufe0f \t\n")), st.text())
def test_what_cannot_be_seen_is_blank_and_stays_where_something_can(unseen, text):
    assert is_blank(unseen)
    assert not is_blank(f"{unseen}e\u0301{unseen}{text}")


TURNS = [{"role": "user", "content": 'Is it "a"?'}, {"role": "assistant", "content": "Yes, [1, 2]."}]
SAYS_NO = {"role": "assistant", "content": "No."}
MESSAGES = [
    ({"chosen": TURNS, "rejected": [TURNS[0], SAYS_NO]}, ('Is it "a"?', "Yes, [1, 2].", "No.")),
    ({"prompt": "q", "chosen": SAYS_NO, "rejected": TURNS[1:]}, ("q", "No.", "Yes, [1, 2].")),
    ({"prompt": "q", "responses": [json.dumps(TURNS[1:]), json.dumps([SAYS_NO])], "ranks": [2, 1]},
     ("q", "No.", "Yes, [1, 2].")),
]  # fmt: skip
OTHER_TEXTS = [
    *("[1, 2]", '{"role": "admin", "name": "Eve"}', '[{"value": 3}]', '[{"a": "[{\'role\': 1"}]', "[{", "[x](y)"),
    *("[{'from': 'A', 'to': 'B'}]", '[{"role": "admin", "id": 1}]', '{"u": {"role": "admin"}} is JSON.'),
]


@pytest.mark.parametrize("form", ["parquet", "json", "jsonl", "csv"])
def test_text_is_read_as_messages_where_it_is_their_json_and_another_notation_is_no_answer(tmp_path, form):
    def read(*rows):
        cells = [{name: one if isinstance(one, str) else json.dumps(one) for name, one in row.items()} for row in rows]
        return load_pairs(str(write(cells, tmp_path / f"data.{form}")))

    for row, pair in MESSAGES:
        assert texts(read(row, row)) == [pair] * 2
    assert [pair.chosen for pair in read(*(GOOD | {"chosen": text} for text in OTHER_TEXTS)).pairs] == OTHER_TEXTS
    noted = GOOD | {"note": "[{'role': 'user'}]"}
    unread = [noted | {column: text} for column in GOOD for text in (repr(TURNS[1:]), '[{"role": "user", "con')]
    loaded = read(noted, *unread)
    assert reasons(loaded) == [(row, "not valid JSON") for row in range(2, 8)]
    assert loaded.pairs[0].metadata == {"note": noted["note"]}


def as_json_column(rows):
    values = pa.array([json.dumps(row) if row is not ... else "{broken" for row in rows], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), values)


def test_a_column_of_json_texts_is_read_as_its_values(tmp_path):
    turn = {"role": "assistant", "content": 'a "b"\nc'}
    chosen = as_json_column(['a "b"\nc', [turn], turn, ...])
    columns = {"prompt": ["p"] * 4, "chosen": chosen, "rejected": ["bad"] * 2 + [None, "bad"]}
    columns["meta"] = pa.StructArray.from_arrays([as_json_column([{"n": [1]}, None, 2, ""])], ["held"])
    loaded = load_pairs(put(pa.table(columns), tmp_path / "data.parquet"))
    assert texts(loaded) == [("p", 'a "b"\nc', "bad")] * 2
    assert reasons(loaded) == [(3, "missing rejected"), (4, "not valid JSON")]
    assert loaded.pairs[0].metadata == {"meta": {"held": {"n": [1]}}}


def test_maps_of_arrow_are_objects(tmp_path):
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    asks, twice = [("role", "user"), ("content", "p")], [("role", "assistant"), ("content", "a"), ("content", "b")]
    sides = {text: [asks, [("role", "assistant"), ("content", text)]] for text in ("good", "bad")}
    chosen, rejected = pa.array([sides["good"]] * 2, kind), pa.array([sides["bad"], [asks, twice]], kind)
    loaded = load_pairs(put(pa.table({"chosen": chosen, "rejected": rejected}), tmp_path / "maps.parquet"))
    assert (texts(loaded), reasons(loaded)) == ([("p", "good", "bad")], [(2, TWICE)])


FIELDS = {"prompt": "p", "reply-1": "bad", "reply-2": "good"}


def argilla_record(question, *values):
    return {"fields": FIELDS, "responses": {question: [{"value": value, "user_id": "u"} for value in values]}}


def argilla_ratings(form, *values):
    said = {form.format(f"reply-{place}"): [{"value": value}] for place, value in enumerate(values, start=1)}
    return {"fields": FIELDS, "responses": said}


def label_studio(question):
    result = {"type": "pairwise", "from_name": question, "to_name": "a1,a2", "value": {"selected": "right"}}
    return {"data": {"prompt": "p", "a1": "bad", "a2": "good"}, "annotations": [{"result": [result]}]}


OPPOSITES = ("which_is_worse", "worst", "less_helpful", "rejected", "Which answer is the least good?", "dispreferred",
             "not_helpful", "more_harmful", "whichIsWorse", "question")  # fmt: skip
SAYS_BETTER = ("preference", "which_is_better", "Which of the two answers is more helpful?", "bestResponse", "chosen")
GRADES_OF_WORSE = ("rank_{}", "harmfulness_{}", "{}_toxicity_score", "rating of errors in {}", "{}")
GRADES = ("rating_{}", "Quality of {}", "{} score", "overall_helpfulness_{}")


@pytest.mark.parametrize(
    "row",
    [
        *(argilla_record(name, "reply-1") for name in OPPOSITES),
        *(argilla_record(name, ["reply-1", "reply-2"]) for name in ("harm_ranking", "worst_first")),
        *(argilla_ratings(form, 2, 1) for form in GRADES_OF_WORSE),
        *map(label_studio, OPPOSITES),
    ],
    ids=str,
)
def test_a_question_that_may_ask_for_the_worse_answer_is_refused_by_its_name(tmp_path, row):
    said = row.get("responses") or row["annotations"][0]["result"][0]
    name = next(iter(said)) if "responses" in row else said["from_name"]
    with pytest.raises(DataError, match=r"row 1: the question .* does not say") as caught:
        load_pairs(lines([row], tmp_path / "rows.jsonl"))
    assert repr(name) in str(caught.value)
    assert "data.chosen_column=rejected" in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        *(argilla_record(name, "reply-2") for name in SAYS_BETTER),
        *(argilla_record(name, ["reply-2", "reply-1"]) for name in ("ranking", "helpfulness_rank", "preference")),
        *(argilla_ratings(form, 1, 2) for form in GRADES),
        *map(label_studio, (*SAYS_BETTER, "pw", "comparison")),
    ],
    ids=str,
)
def test_a_question_that_asks_for_the_better_answer_is_read(tmp_path, row):
    assert texts(load_pairs(lines([row], tmp_path / "rows.jsonl"))) == [("p", "good", "bad")]


TWO = {"prompt": "p", "response_1": "bad", "response_2": "good"}
NO_LABEL = [
    (TWO | {"preference_strength": 2}, {"preference_strength": -100}),
    *((TWO | {"preference": 2, "answer": "accept"}, {"answer": said}) for said in ("ignore", "reject")),
    ({"prompt": "p", "chosen": "good", "rejected": "bad", "answer": "accept"}, {"answer": "ignore"}),
]


@pytest.mark.parametrize(("row", "unsaid"), NO_LABEL, ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_what_an_annotator_did_not_say_is_no_label(tmp_path, row, unsaid, order):
    loaded = load_pairs(lines([row, row | unsaid][::order], tmp_path / "rows.jsonl"))
    assert texts(loaded) == [("p", "good", "bad")]
    assert [reason for _, reason in reasons(loaded)] == ["not labelled"]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_what_is_written_is_read_and_what_is_damaged_gives_no_other_pairs(tmp_path_factory, seed):
    """Each layout, in each format, as some program writes it; or with some bytes of it lost, added or changed."""
    assert one(random.Random(seed), tmp_path_factory.mktemp("file")) in ("same", "subset", "refused")  # noqa: S311


words = st.lists(st.sampled_from(["a", "b c", ",", "\n", '"', ', "', "\n\n"]), min_size=1, max_size=6).map("".join)
with_backslashes = st.lists(st.sampled_from(["a", ",", "\n", '"', "\\"]), min_size=1, max_size=6).map("".join)


def texts_in_tables(drawn):
    cells = drawn.map(lambda text: f"x{text}")  # never blank
    rows = st.tuples(cells, cells.map("good {}".format), cells.map("bad {}".format))
    return st.lists(rows, min_size=1, max_size=6)


def as_csv(rows, **dialect):
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n", **dialect).writerows([HEADER.split(","), *rows])
    return out.getvalue()


def read_or_none(folder, text):
    """The pairs of a file of that text, as rows; None where it is refused."""
    try:
        return texts(load_pairs(put(text, folder / "data.csv")))
    except DataError:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("csv")


@pytest.mark.slow
@given(texts_in_tables(words))
def test_quotes_that_are_escaped_with_backslashes(folder, rows):
    found = read_or_none(folder, as_csv(rows, escapechar="\\", doublequote=False))
    assert found is None or set(found) <= set(rows)


@pytest.mark.slow
@given(texts_in_tables(with_backslashes))
def test_backslashes_are_text_where_quotes_are_doubled(folder, rows):
    text = as_csv(rows)
    found = read_or_none(folder, text)
    assert found == rows or (found is None and '\\"' in text)


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
def test_the_order_of_its_rows_does_not_decide_whether_a_table_is_read(tmp_path, name):
    rows = [("p", "a, \\", "b"), ("\udcff", "q", "r"), *[("é" * 999, "x", "y")] * 99, ("q", 'say "x"', "z")]
    for each in (rows, rows[::-1]):
        content = as_csv(each).encode("utf-8", "surrogateescape")
        loaded = load_pairs(put(gzip.compress(content) if name.endswith("gz") else content, tmp_path / name))
        assert texts(loaded) == [row for row in each if row[0] != "\udcff"]


def test_the_row_limit_holds_for_lines_headers_and_cells_of_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    long = ("x" * 1001, f"{HEADER}\n" + "p" * 1001, f'{HEADER}\n"' + "p\n" * 501)
    for name, text in (*(("data.csv", text) for text in long), ("data.jsonl", long[0])):
        with pytest.raises(DataError, match=r"longer than|larger than"):
            load_pairs(put(text, tmp_path / name))
