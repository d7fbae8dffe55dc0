"""Workbooks give the pairs that their cells hold; what Excel may have cut, or is not one table, is not used."""

import datetime
import re
import zipfile

import pandas as pd
import pytest
from openpyxl import Workbook

from rmcore.core.errors import DataError
from rmcore.data.readers.excel_rows import MOST_CHARACTERS
from rmcore.data.readers.fields import Reason
from rmcore.data.readers.sources import load_pairs

ROWS = [
    {"prompt": f"p {number}\nmore", "chosen": "=1+1 é 好" if number else "a", "rejected": "b", "margin": 0.5}
    for number in range(3)
]


def test_what_pandas_wrote_is_read_back(tmp_path):
    pd.DataFrame(ROWS).to_csv(tmp_path / "pairs.csv", index=False)
    frame = pd.DataFrame([row | {"chosen": row["chosen"].replace("=", "")} for row in ROWS])
    frame.to_excel(tmp_path / "pairs.xlsx", index=False)
    found = load_pairs(str(tmp_path / "pairs.xlsx"))
    assert [(pair.prompt, pair.chosen, pair.rejected, pair.target_margin) for pair in found.pairs] == list(
        frame.itertuples(index=False, name=None)
    )


def workbook(path, *rows, more=()):
    book = Workbook()
    for row in rows:
        book.active.append(row)
    for title in more:
        book.create_sheet(title).append(["prompt", "chosen", "rejected"])
    book.save(path)
    return str(path)


HEADER = ["prompt", "chosen", "rejected"]


def test_cells_that_excel_may_have_cut_cost_their_row_alone(tmp_path):
    source = workbook(
        tmp_path / "x.xlsx",
        HEADER,
        ["p", "x" * MOST_CHARACTERS, "b"],
        [None, None, None],
        ["q", "y" * 1000, "b"],
        ["r", "a", "b", "?"],
    )
    loaded = load_pairs(source)
    assert [pair.prompt for pair in loaded.pairs] == ["q"]
    assert [(row.row, row.reason) for row in loaded.rejected] == [(2, Reason.CUT_CELL), (5, Reason.NOT_A_TABLE)]


def test_numbers_truth_and_dates_are_not_made_texts_of(tmp_path):
    source = workbook(
        tmp_path / "x.xlsx", HEADER, ["p", 1, "b"], ["p", "a", datetime.date(2026, 1, 2)], ["p", "a", "b"]
    )
    loaded = load_pairs(source)
    assert len(loaded.pairs) == 1
    assert {row.reason for row in loaded.rejected} == {Reason.WRONG_TYPE}


def patched(source, part, change):
    """The same workbook with another text in one of its parts."""
    with zipfile.ZipFile(source) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    assert part in parts
    with zipfile.ZipFile(source, "w") as written:
        for name, content in parts.items():
            written.writestr(name, change(content.decode()).encode() if name == part else content)
    return str(source)


SHEET = "xl/worksheets/sheet1.xml"


@pytest.mark.parametrize("ref", ["A1", "A1:C3", "A1:B9"])
def test_dimensions_that_a_program_wrote_wrong_hide_no_row(tmp_path, ref):
    source = workbook(tmp_path / "x.xlsx", HEADER, *([f"p{number}", "a", "b"] for number in range(5)))
    patched(source, SHEET, lambda text: re.sub(r'<dimension ref="[^"]*"', f'<dimension ref="{ref}"', text))
    assert len(load_pairs(source).pairs) == 5


def test_errors_of_excel_and_cut_emoji_are_set_aside(tmp_path):
    long = "\U0001f600" * 10 + "x" * (MOST_CHARACTERS - 20)
    source = workbook(tmp_path / "x.xlsx", HEADER, ["p", "a", "b"], ["q", long, "b"], ["r", "a", "b"])
    change = r'<c r="C2" t="e"><f>-foo</f><v>#NAME?</v></c>'
    patched(source, SHEET, lambda text: re.sub(r'<c r="C2".*?</c>', change, text))
    loaded = load_pairs(source)
    assert [pair.prompt for pair in loaded.pairs] == ["r"]
    assert [row.reason for row in loaded.rejected] == [Reason.EXCEL_ERROR, Reason.CUT_CELL]


def test_a_workbook_that_openpyxl_trips_over_is_refused(tmp_path):
    source = workbook(tmp_path / "x.xlsx", HEADER, ["p", "a", "b"])
    patched(source, "xl/styles.xml", lambda text: re.sub(r"<fills .*?</fills>", "<fills><fill/></fills>", text))
    with pytest.raises(DataError, match="cannot be read as an Excel workbook"):
        load_pairs(source)


def test_several_tables_none_and_other_formats_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"xlsx has 2 sheets"):
        load_pairs(workbook(tmp_path / "two.xlsx", HEADER, ["p", "a", "b"], more=["second"]))
    with pytest.raises(DataError, match=r"xlsx has 0 sheets"):
        load_pairs(workbook(tmp_path / "none.xlsx"))
    (tmp_path / "csv.xlsx").write_text("prompt,chosen,rejected\np,a,b\n")
    with pytest.raises(DataError, match="cannot be read as an Excel workbook"):
        load_pairs(str(tmp_path / "csv.xlsx"))
    whole = (tmp_path / "two.xlsx").read_bytes()
    (tmp_path / "cut.xlsx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as an Excel workbook"):
        load_pairs(str(tmp_path / "cut.xlsx"))
