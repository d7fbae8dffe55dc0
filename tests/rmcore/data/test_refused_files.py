"""Files that are no preference data, that may mean two things, or that are damaged are refused with what was seen.

A table: a file, and what the refusal says, next to the file's name.
"""

import gzip
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmcore.core.errors import DataError
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.sources import load_pairs
from source_sample import put

HEADER, GOOD = "prompt,chosen,rejected\n", {"prompt": "p", "chosen": "a", "rejected": "b"}
A_B = {"prompt": "p", "response_a": "a", "response_b": "b"}
ONE_TWO = {"prompt": "p", "answer_1": "a", "answer_2": "b"}
ARGILLA = {name: [{"value": ["reply_2", "reply_1"], "user_id": "u"}] for name in ("help", "harm")}
TWICE = pa.table([["p"], ["a"], ["b"], ["c"]], names=["prompt", "chosen", "rejected", "chosen"])
LOST_LINES = "".join(f"q{i},First, open a shell\nThen press enter\n" for i in range(9))


def parquet(table):
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


ROWS = pa.table({name: [f"{name} {number}" for number in range(300)] for name in GOOD})
PARQUET, LINES = parquet(ROWS), b'{"prompt": "p", "chosen": "a", "rejected": "b"}\n' * 9
NUMBERS = (
    *(("preference", value) for value in (0, "-1", 0.9, "0.9", 1.5, 3, 10**400, -100)),
    *(("preference_strength", value) for value in (0.2, "0.8")),
)


def graded(values):
    return [{"prompt": f"p {i % 3}", "response": f"r {i}", "score": value} for i, value in enumerate(values)]


REFUSED = {
    "names to quote": ("x.jsonl", [{"x": "p", "Good answer": "a", "Bad Response": "b"}],
                       "--set 'data.rejected_column=Bad Response'"),
    "nothing like it": ("x.jsonl", [{"x": "p", "y": "a"}], "data.prompt_column=COLUMN --set data.chosen_column=COLUMN"),
    "one of them": ("x.jsonl", [{"question": "p", "input": "q", "good": "a"}],
                    "--set data.prompt_column=COLUMN --set data.chosen_column=good"),
    "no prompt": ("x.jsonl", [{"question": "p", "chosen": "a", "rejected": "b"}], "--set data.prompt_column=question"),
    "two layouts": ("x.jsonl", [{**A_B, "winner": "a", "winner_model_a": 1, "winner_model_b": 0}],
                    "'two answers and a winner' and 'LMArena'"),
    "two winners": ("x.jsonl", [{**A_B, "winner": "a", "preference": "b"}],
        "winner and preference may both be the col"),
    "two pairs": ("x.jsonl", [{**A_B, "answer_a": "a", "answer_b": "b", "winner": "a"}],
                  "response_a with response_b and answer_a with answer_b"),
    "two prompts": ("x.jsonl", [{"instruction": "p", "question": "q", "a": "x", "b": "y", "winner": "a"}],
                    "instruction and question may both be"),
    "two spellings": ("x.jsonl", [{"Prompt": "p", "PROMPT": "q", "chosen": "a", "rejected": "b"}],
                      "'Prompt' and 'PROMPT' may both be prompt"),
    "two questions": ("x.jsonl", [{"fields": {"prompt": "p", "reply_1": "a", "reply_2": "b"}, "responses": ARGILLA}],
                      "help and harm may both be the preference"),
    "1 of a and b": ("x.jsonl", [{**A_B, "winner": 1}],
                     "row 1: winner is 1, and which of response_a and response_b that is cannot be known"),
    "a third answer": ("x.jsonl", [{**A_B, "response_c": "c", "winner": "a"}], "no layout fits"),
    "a third number": ("x.jsonl", [{"prompt": "p", "response_1": "a", "response_2": "b", "response_3": "c",
                                     "winner": "a"}], "no layout fits"),
    "no label": ("x.jsonl", [{"data": {"prompt": "p", "left": "a", "right": "b"}, "annotations": [{"result": []}]}],
                 "(not labelled: 1)"),
    "a word for a grade": ("x.jsonl", [{"prompt": "p", "response": "a", "quality": "fine", "label": 3}],
        "no layout fits"),
    "truth for ranks": ("x.jsonl", [{"prompt": "p", "answers": ["a", "b"], "ranks": [1, False]}], "wrong type: 1"),
    "ties alone": ("x.jsonl", [{"prompt": f"p {i}", "a": "x", "b": "y", "winner": "tie"} for i in range(5)],
                   "all 5 usable judgements of"),
    "equal grades": ("x.jsonl", graded([1, 1, 1, 1]), "are the same (overall is 1)"),
    "a grade a prompt": ("x.jsonl", graded([1, 2, 3]),
        "every prompt has one graded answer, so no held-out pair can be"),
    "equal in a prompt": ("x.jsonl", graded([1, 2, 3, 1]), "no prompt has two answers that differ"),
    "no grade": ("x.jsonl", [{"prompt": "p", "response": "r", "score": float("nan")}, *graded(["x", None])],
                 "not labelled: 2, grade is not a finite number: 1"),
    "incomplete": ("x.jsonl", [{"pair_id": one, "role": "chosen", "prompt": "p", "response": one} for one in "ab"],
                   "2 rows and none gives"),
    "Latin-1": ("x.jsonl", '{"prompt": "ä", "chosen": "a", "rejected": "b"}\n'.encode("cp1252"), "iconv -f CP1252"),
    "UTF-16 table": ("x.csv", f"{HEADER}p,a,b\n".encode("utf-16"), "Convert it:\n    iconv -f UTF-16 -t UTF-8"),
    "Latin-1 header": ("x.csv", "Präfix,chosen,rejected\np,a,b\n".encode("cp1252"), "its header holds other bytes"),
    "another header": ("x.csv", f"{HEADER}p,a,b\nprompt,chosen,source\np,a,b\n",
        "row 2 is a header again, with other col"),
    "a wider header": ("x.csv", f"{HEADER}p,a,b\n{HEADER[:-1]},source\np,a,b\n",
        "row 2 is a header again, with other col"),
    "a shorter header": ("x.csv", f"{HEADER}p,a,b\nchosen,rejected\np,a,b\n",
        "row 2 is a header again, with other columns"),
    "a column twice": ("x.csv", "prompt,chosen,chosen,rejected\np,a,b,c\n", "'chosen' twice"),
    "Parquet's twice": ("x.parquet", parquet(TWICE), "has the column 'chosen' twice: which one is meant is unknown"),
    "numbers": ("x.parquet", parquet(pa.table({"prompt": [1, 2], "chosen": ["a", "b"], "rejected": ["c", "d"]})),
                "wrong type: 2"),
    "backslashes": ("x.csv", f'{HEADER}p,a,b\np,"say \\"x\\"",b\np,a,b\n', "pandas.read_csv("),
    "behind a quote": ("x.csv", f'{HEADER}p,a,b\np,"x" y,b\np,a,b\n', "line 3"),
    "before a quote": ("x.csv", f'{HEADER}p,a,b\np, "x",b\np,a,b\n', "a space before a quote"),
    "one quote": ("x.csv", f'{HEADER}p,a,b\np,5" wide,b\np,a,b\n', "line 3"),
    "never closed": ("x.csv", f'{HEADER}p,a,b\np,"x,b\np,a,b\n', "quoted cell"),
    "NUL": ("x.csv", f"{HEADER}p,a,b\np,x\0\0\0,b\np,a,b\n", "NUL"),
    "not quoted": ("x.csv", f"{HEADER}p,a,b\nq,One\n{LOST_LINES}", "10 of 20 rows have another number of cells"),
    "an extension": ("x.pkl", b"\x80\x04.", "extension '.pkl'"),
    "packed Parquet": ("x.parquet.gz", gzip.compress(parquet(TWICE)), "'.parquet', gzipped, which is not read"),
    "a workbook": ("x.xlsx", b"PK", "Save the sheet as CSV UTF-8"),
    "Arrow": ("x.arrow", b"ARROW1", "Name the folder that save_to_disk wrote"),
    "a ranking of two meanings": ("x.jsonl", [{"prompt": "p", "answers": ["a", "b", "c"], "ranking": [2, 3, 1]}],
                                  "Of any other layout, write prompt, chosen and rejected"),
    **{f"scores and {order}": ("x.jsonl", [{"prompt": "p", "responses": ["a", "b"], "scores": [1, 2], order: [1, 2]}],
                               f"scores and {order} may both be how the answers are ranked")
       for order in ("ranking", "order")},
    **{f"a number that is no answer, {at}": ("x.jsonl", [ONE_TWO | {column: 2}, ONE_TWO | {column: value}],
                                             f"row 2: {column} is") for at, (column, value) in enumerate(NUMBERS)},
    "no row that is one": ("x.json", [GOOD | {"prompt": ""}, GOOD | {"prompt": " "}, GOOD | {"chosen": "b"}],
                           "3 rows and none gives a preference pair (empty prompt: 2, identical sides: 1)"),
    "cut Parquet": ("x.parquet", PARQUET[:-100], "cannot be read"),
    "overwritten Parquet": ("x.parquet", PARQUET[:200] + bytes(len(PARQUET) // 2) + PARQUET[200 + len(PARQUET) // 2 :],
                            "cannot be read"),
    "text named Parquet": ("x.parquet", HEADER, "cannot be read"),
    "cut gzip": ("x.jsonl.gz", gzip.compress(LINES)[:-10], "ends before its data does"),
    "text named gzip": ("x.jsonl.gz", LINES, "is not gzip data"),
    "gzip not named so": ("x.jsonl", gzip.compress(LINES), "its name does not say so"),
    "JSON not closed": ("x.json", b"[" + LINES.replace(b"\n", b",")[:-1], "not valid JSON after 9 rows"),
    "JSON without a comma": ("x.json", b"[" + LINES + b"]", "not valid JSON after 1 rows"),
    "deep JSON": ("x.json", b"[" * 100_000, "not valid JSON after 0 rows"),
    "a page of the web": ("x.json", "<html>not found</html>", "not valid JSON after 0 rows"),
    "empty": ("x.csv", "", "is empty (0 bytes)"),
    "empty inside gzip": ("x.jsonl.gz", gzip.compress(b""), "has no rows"),
    "a header alone": ("x.csv", HEADER, "has no rows"),
    "an empty array": ("x.json", " [ ] ", "has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_by_its_name_with_what_was_seen(tmp_path, name):
    file, content, said = REFUSED[name]
    with pytest.raises(DataError) as caught:
        load_pairs(put(content, tmp_path / file))
    assert said in str(caught.value)
    assert file in str(caught.value)


def test_a_weight_of_an_attribute_that_is_not_there_and_a_file_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"names 'honesty', which .* its attributes are overall"):
        load_pairs(put(graded([1, 2, 3, 2]), tmp_path / "x.jsonl"), attribute_weights={"honesty": 1})
    with pytest.raises(DataError, match="is not a file"):
        load_pairs(str(tmp_path / "none.parquet"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "is empty"),
        ('{"prompt": "p", "response": null}\n', "nothing can be scored"),
        ('{"prompt": "p", "chosen": "a", "rejected": "a"}\n', "none gives a preference pair"),
        ('{"question": "p"}\n', "question"),
    ],
)
def test_a_source_in_parts_without_a_usable_row_is_refused(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        list(SourceInParts(put(rows, tmp_path / "rows.jsonl"), 5))
