"""Tables as programs write them: no cell is read as another one, and what may be cut or damaged is not used."""

import csv
import gzip
import io
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.readers import files, tables
from rmcore.data.readers.sources import load_pairs
from source_sample import lines

HEADER, TURNED = "prompt,chosen,rejected", "rejected,prompt,chosen"
ROW = "p{0},good {0},bad {0}"


def table(*rows, end="\n"):
    return end.join(row.format(place) for place, row in enumerate(rows)) + end


READ = {
    "again.csv": (table(HEADER, ROW, HEADER, ROW), [1, 3], {"the header again": 1}),
    "spelled.csv": (table(HEADER, ROW, '"Prompt", Chosen ,REJECTED', ROW), [1, 3], {"the header again": 1}),
    "turned.csv": (table(HEADER, ROW, TURNED, "bad {0},p{0},good {0}"), [1, 3], {"the header again": 1}),
    "turned.tsv": (
        table(HEADER, ROW, TURNED, "bad {0},p{0},good {0}").replace(",", "\t"),
        [1, 3],
        {"the header again": 1},
    ),
    "wide.csv": (table(f"{HEADER},,", ROW, HEADER, f"{ROW},,"), [1, 3], {"the header again": 1}),
    "one_name.csv": (table(HEADER, "p{0},good {0},chosen"), [], {}),
    "survey.csv": (
        table(HEADER, "Question?,A,B", *['"{{""ImportId"":""Q1""}}","{{""ImportId"":""Q2""}}",'], ROW, ROW),
        [3, 4],
        {},
    ),
    "nothing.csv": (
        table(
            HEADER, ROW, *(f"p{{0}},good,{word}" for word in ("NULL", "None", "N/A", "NaN", "nan", "#N/A", " null "))
        ),
        [1],
        {"missing rejected": 7},
    ),
    "nothing_else.csv": (table(f"{HEADER},margin", f"{ROW},NULL", f"{ROW},n/a"), [1, 2], {}),
    "empty_columns.csv": (table(f"{HEADER},,", f"{ROW},,", ROW, f"{ROW},,,"), [1, 2, 3], {}),
    "separator.csv": ("sep=;\n" + table(HEADER, ROW, ROW).replace(",", ";"), [1, 2], {}),
    "quoted_separator.csv": ('"sep=|"\r\n\r\n' + table(HEADER, ROW, end="\r\n").replace(",", "|"), [1], {}),
    "both.csv": ("\ufeffsep=;\n" + table(f"{HEADER},", f"{ROW},", ROW, f"{ROW},,").replace(",", ";"), [1, 2, 3], {}),
    "beyond.csv": (table(f"{HEADER},,", f"{ROW},,", f"{ROW},lost,"), [1], {"not valid CSV": 1}),
}


@pytest.mark.parametrize("name", READ)
def test_a_table_gives_its_pairs_and_counts_the_rest(tmp_path, name):
    text, numbers, reasons = READ[name]
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    loaded = load_pairs(str(tmp_path / name))
    expected = [(f"p{n}", f"good {n}", f"bad {n}") for n in numbers] or [("p1", "good 1", "chosen")]
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs] == expected
    assert Counter(row.reason for row in loaded.rejected) == reasons


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
    (pair,) = load_pairs(lines([row], tmp_path / "rows.jsonl")).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == ("p", "good", "bad")


TWO = {"prompt": "p", "response_1": "bad", "response_2": "good"}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("preference", value) for value in (0.9, "0.9", 1.5, 3, 10**400, -100)),
        *(("preference_strength", value) for value in (0.2, "0.8")),
    ],
)
def test_a_number_that_is_no_answer_and_no_strength_refuses_the_file(tmp_path, column, value):
    with pytest.raises(DataError, match=rf"row 2: {column} is") as caught:
        load_pairs(lines([TWO | {column: 2}, TWO | {column: value}], tmp_path / "rows.jsonl"))
    assert "response_1" in str(caught.value)


NO_LABEL = [
    (TWO | {"preference_strength": 2}, TWO | {"preference_strength": -100}),
    (TWO | {"preference": 2, "answer": "accept"}, TWO | {"preference": 2, "answer": "ignore"}),
    (TWO | {"preference": 2, "answer": "accept"}, TWO | {"preference": 2, "answer": "reject"}),
    (
        {"prompt": "p", "chosen": "good", "rejected": "bad", "answer": "accept"},
        {"prompt": "p", "chosen": "good", "rejected": "bad", "answer": "ignore"},
    ),
]


@pytest.mark.parametrize("rows", NO_LABEL, ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_what_an_annotator_did_not_say_is_no_label(tmp_path, rows, order):
    loaded = load_pairs(lines(rows[::order], tmp_path / "rows.jsonl"))
    assert [(pair.chosen, pair.rejected) for pair in loaded.pairs] == [("good", "bad")]
    assert [row.reason for row in loaded.rejected] == ["not labelled"]


def as_json_column(rows):
    texts = pa.array([json.dumps(row) if row is not ... else "{broken" for row in rows], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)


def parquet_file(path, columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_a_column_of_json_texts_is_read_as_its_values(tmp_path):
    turn = {"role": "assistant", "content": 'a "b"\nc'}
    chosen = as_json_column(['a "b"\nc', [turn], turn, ...])
    columns = {"prompt": ["p"] * 4, "chosen": chosen, "rejected": ["bad"] * 2 + [None, "bad"]}
    columns["meta"] = pa.StructArray.from_arrays([as_json_column([{"n": [1]}, None, 2, ""])], ["held"])
    loaded = load_pairs(parquet_file(tmp_path / "data.parquet", columns))
    assert [(pair.prompt, pair.chosen) for pair in loaded.pairs] == [("p", 'a "b"\nc')] * 2
    assert [row.reason for row in loaded.rejected] == ["missing rejected", "not valid JSON"]
    assert loaded.pairs[0].metadata == {"meta": {"held": {"n": [1]}}}


def test_maps_of_arrow_are_objects(tmp_path):
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    twice = [[("role", "assistant"), ("content", "a"), ("content", "b")]]

    def side(text):
        return [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]

    columns = {
        "chosen": pa.array([side("good"), side("good")], kind),
        "rejected": pa.array([[list(turn.items()) for turn in side("bad")], twice], kind),
    }
    loaded = load_pairs(parquet_file(tmp_path / "maps.parquet", columns))
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs] == [("p", "good", "bad")]
    assert [row.reason for row in loaded.rejected] == ["a key is repeated"]


NAMES = ("prompt", "chosen", "rejected")
words = st.lists(st.sampled_from(["a", "b c", ",", "\n", '"', ', "', "\n\n"]), min_size=1, max_size=6).map("".join)
with_backslashes = st.lists(st.sampled_from(["a", ",", "\n", '"', "\\"]), min_size=1, max_size=6).map("".join)


def texts_in_tables(texts):
    cells = texts.map(lambda text: f"x{text}")  # never blank
    rows = st.tuples(cells, cells.map("good {}".format), cells.map("bad {}".format))
    return st.lists(rows, min_size=1, max_size=6)


def written(rows, **dialect):
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n", **dialect).writerows([NAMES, *rows])
    return out.getvalue()


def read(folder, text):
    """The pairs of a file of that text, as rows; None where it is refused."""
    path = folder / "data.csv"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        return [(pair.prompt, pair.chosen, pair.rejected) for pair in load_pairs(str(path)).pairs]
    except DataError:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("csv")


@pytest.mark.slow
@given(texts_in_tables(words))
def test_quotes_that_are_escaped_with_backslashes(folder, rows):
    found = read(folder, written(rows, escapechar="\\", doublequote=False))
    assert found is None or set(found) <= set(rows)


@pytest.mark.slow
@given(texts_in_tables(with_backslashes))
def test_backslashes_are_text_where_quotes_are_doubled(folder, rows):
    text = written(rows)
    found = read(folder, text)
    assert found == rows or (found is None and '\\"' in text)


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
def test_the_order_of_its_rows_does_not_decide_whether_a_table_is_read(tmp_path, name):
    rows = [("p", "a, \\", "b"), ("\udcff", "q", "r"), *[("é" * 999, "x", "y")] * 99, ("q", 'say "x"', "z")]
    for each in (rows, rows[::-1]):
        content = written(each).encode("utf-8", "surrogateescape")
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        found = [(pair.prompt, pair.chosen, pair.rejected) for pair in load_pairs(str(tmp_path / name)).pairs]
        assert found == [row for row in each if row[0] != "\udcff"]


def test_the_row_limit_holds_for_lines_headers_and_cells_of_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    texts = ("x" * 1001, "prompt,chosen,rejected\n" + "p" * 1001, 'prompt,chosen,rejected\n"' + "p\n" * 501)
    for name, text in (*(("data.csv", text) for text in texts), ("data.jsonl", texts[0])):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=r"longer than|larger than"):
            load_pairs(str(tmp_path / name))
