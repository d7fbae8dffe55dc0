"""Any nested record becomes tables in which every leaf is found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.tree import blocks, label, scalar_text

KEYS = st.text("abcdefghij_", min_size=1, max_size=8)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), st.text("xyz ", max_size=90)
)
RECORDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=30,
)


def string_leaves(value) -> list[str]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in string_leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in string_leaves(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, RECORDS, max_size=5))
def test_every_text_leaf_is_shown_and_tables_are_rectangular(record):
    found = blocks(record, "all")
    tables = [table for block in found for table in block.tables]
    cells = [cell for one in tables for row in one.rows for cell in row] + [s for b in found for s in b.findings]
    everything = "\n".join(cells)
    for leaf in string_leaves(record):
        assert leaf in everything
    for one in tables:
        assert {len(row) for row in one.rows} == {len(one.headings)}
        assert all(isinstance(cell, str) for row in one.rows for cell in row)


def test_splits_stand_side_by_side_and_distributions_are_folded():
    split = {"num_pairs": 3, "longer_wins": {"accuracy": 0.75}, "characters": {"prompt": {"p5": 1.0, "max": 9.0}}}
    found = blocks({"num_rows": 9, "splits": {"train": split, "test": split | {"num_pairs": 1200}}}, "overview")
    assert found[0].tables[0].rows == [["rows", "9"]]
    [table] = found[1].tables
    assert table.headings == ["", "train", "test"]
    assert ["pairs", "3", "1,200"] in table.rows
    assert ["longer wins: accuracy", numbers.percent(0.75), numbers.percent(0.75)] in table.rows
    assert [block.is_folded for block in found] == [False, False, True, True]
    assert found[2].tables[0].headings == ["", "p5", "max"]


def test_lists_of_records_and_sentences():
    found = blocks(
        {"leak": [{"splits": ["a", "b"], "num": 1}], "warnings": ["w" * 80], "names": ["p", "q"], "no": []}, "t"
    )
    by_title = {block.title: block for block in found}
    assert by_title["leak"].tables[0].rows == [["a / b", "1"]]
    assert by_title["warnings"].findings == ["w" * 80]
    assert by_title["t"].tables[0].rows == [["names", "p, q"], ["no", "none"]]


def test_long_lists_say_that_they_are_cut():
    (found,) = blocks({"rows": [{"a": index} for index in range(1200)]}, "t")
    assert found.title == "rows (the first 50 of 1,200)"
    assert len(found.tables[0].rows) == 50


def test_leaves_as_text():
    assert label("num_exact_pairs") == "exact pairs"
    assert scalar_text(("label ceiling", "test"), 0.83) == numbers.percent(0.83)
    assert scalar_text(("mean",), 0.83) == "0.830"
    assert scalar_text(("x",), True) == "yes"
    assert scalar_text(("accuracy",), {"value": 0.5, "ci_low": 0.4, "ci_high": 0.6}).endswith(")")
