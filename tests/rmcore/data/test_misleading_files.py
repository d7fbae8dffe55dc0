"""Files that look like preference data and mean something else give the right pairs, or are refused by name.

A table: a file, its pairs in short, and why rows were set aside; or what the refusal says. The better answer is "good",
with the number of its prompt.
"""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_converted
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
}


@pytest.mark.parametrize("name", READ)
def test_a_table_gives_its_pairs_and_counts_the_rest(tmp_path, name):
    text, numbers, reasons = READ[name]
    (tmp_path / name).write_text(text)
    loaded = load_pairs(str(tmp_path / name))
    expected = [(f"p{n}", f"good {n}", f"bad {n}") for n in numbers] or [("p1", "good 1", "chosen")]
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs] == expected
    assert Counter(row.reason for row in loaded.rejected) == reasons


@pytest.mark.parametrize("second", ["prompt,chosen,source", "prompt,chosen,rejected,source", "chosen,rejected"])
def test_a_second_header_with_other_columns_refuses_the_file_at_its_row(tmp_path, second):
    (tmp_path / "data.csv").write_text(table(HEADER, ROW, second, ROW))
    with pytest.raises(DataError, match="row 2 is a header again, with other columns"):
        load_pairs(str(tmp_path / "data.csv"))


def test_the_header_again_in_a_workbook(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (HEADER, ROW, TURNED, "bad {0},p{0},good {0}", "NULL,p,good"):
        book.active.append(row.format(book.active.max_row).split(","))
    book.save(tmp_path / "data.xlsx")
    loaded = load_pairs(str(tmp_path / "data.xlsx"))
    assert [pair.chosen for pair in loaded.pairs] == ["good 1", "good 3"]
    assert [(row.row, row.reason) for row in loaded.rejected] == [(3, "the header again"), (5, "missing rejected")]


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


def test_pairs_are_turned_as_the_refusal_says(tmp_path):
    """The two commands: renamed, converted, read with the columns exchanged."""
    turned = load_pairs(lines([argilla_record("preferred", "reply-1")], tmp_path / "rows.jsonl"))
    write_converted(turned.pairs, tmp_path / "pairs.parquet")
    columns = ColumnMap(chosen="rejected", rejected="chosen")
    (pair,) = load_pairs(str(tmp_path / "pairs.parquet"), columns=columns).pairs
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


def arrow_file(path, columns):
    """The columns as Parquet, or as Arrow."""
    whole = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(whole, path)
    else:
        with pa.ipc.new_stream(str(path), whole.schema) as writer:
            writer.write_table(whole)
    return str(path)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_of_json_texts_is_read_as_its_values(tmp_path, form):
    turn = {"role": "assistant", "content": 'a "b"\nc'}
    chosen = as_json_column(['a "b"\nc', [turn], turn, ...])
    columns = {"prompt": ["p"] * 4, "chosen": chosen, "rejected": ["bad"] * 2 + [None, "bad"]}
    columns["meta"] = pa.StructArray.from_arrays([as_json_column([{"n": [1]}, None, 2, ""])], ["held"])
    loaded = load_pairs(arrow_file(tmp_path / f"data.{form}", columns))
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
    loaded = load_pairs(arrow_file(tmp_path / "maps.parquet", columns))
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs] == [("p", "good", "bad")]
    assert [row.reason for row in loaded.rejected] == ["a key is repeated"]
