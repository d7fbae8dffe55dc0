"""Rows of prompt and response: order kept, what cannot be scored counted, pairs left to the reader of pairs."""

import json

import pytest

from rmcore.core.errors import DataError
from rmcore.data.responses import load_responses

USABLE = [{"prompt": "What is 2 + 2?", "response": "4"}, {"prompt": "Grüße!", "response": "Hello."}]
UNUSABLE = [
    {"prompt": "No answer.", "response": None},
    {"prompt": " ", "response": "blank prompt"},
    {"prompt": ["two"], "response": "no text"},
    {"prompt": "half a pair of \ud800", "response": "no Unicode"},
]


def written(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_usable_rows_keep_their_order_and_the_others_are_counted(tmp_path):
    loaded = load_responses(written(tmp_path, [USABLE[0], *UNUSABLE, USABLE[1]]))
    assert loaded.rows == [(row["prompt"], row["response"]) for row in USABLE]
    assert (loaded.num_rows, loaded.num_unusable) == (6, 4)


def test_a_limit_counts_rows(tmp_path):
    assert load_responses(written(tmp_path, USABLE * 5), limit=3).num_rows == 3


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"pair_id": "1", "role": "chosen", "prompt": "p", "response": "a"},
    ],
    ids=["pair", "side of a pair"],
)
def test_pairs_are_not_taken_for_responses(tmp_path, row):
    assert load_responses(written(tmp_path, [row])) is None


def test_a_file_without_one_usable_row_is_refused(tmp_path):
    with pytest.raises(DataError, match="none of the 4 rows"):
        load_responses(written(tmp_path, UNUSABLE))


@pytest.mark.parametrize("limit", [2, 2**63, 10**30])
def test_a_limit_larger_than_any_file_is_none(tmp_path, limit):
    assert len(load_responses(written(tmp_path, USABLE), limit=limit).rows) == 2
