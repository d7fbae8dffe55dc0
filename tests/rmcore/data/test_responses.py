"""Rows of prompt and response: order kept, what cannot be scored counted, pairs left to the reader of pairs."""

import json

import pytest

from rmcore.core.errors import DataError
from rmcore.data.parts import SourceInParts

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
    source = SourceInParts(written(tmp_path, [USABLE[0], *UNUSABLE, USABLE[1]]), 10)
    [part] = source
    assert part.responses == [(row["prompt"], row["response"]) for row in USABLE]
    assert (source.num_rows, source.num_unusable) == (6, 4)


def test_a_limit_counts_rows(tmp_path):
    [part] = SourceInParts(written(tmp_path, USABLE * 5), 10, limit=3)
    assert len(part) == 3


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "chosen": "a", "rejected": "b"}],
        [{"pair_id": "1", "role": role, "prompt": "p", "response": role} for role in ("chosen", "rejected")],
    ],
    ids=["pair", "sides of a pair"],
)
def test_pairs_are_not_taken_for_responses(tmp_path, rows):
    [part] = SourceInParts(written(tmp_path, rows), 10)
    assert (len(part.pairs), part.responses) == (1, [])


def test_a_file_without_one_usable_row_is_refused(tmp_path):
    with pytest.raises(DataError, match="none of the 4 rows"):
        list(SourceInParts(written(tmp_path, UNUSABLE), 10))


@pytest.mark.parametrize("limit", [2, 2**63, 10**30])
def test_a_limit_larger_than_any_file_is_none(tmp_path, limit):
    [part] = SourceInParts(written(tmp_path, USABLE), 10, limit=limit)
    assert len(part) == 2
