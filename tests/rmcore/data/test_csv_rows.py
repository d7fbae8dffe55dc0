"""No pair is made of the inside of a quoted cell, whatever program wrote the file and damaged its quotes."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.readers import csv_rows
from rmcore.data.readers.sources import load_pairs

NAMES = ("prompt", "chosen", "rejected")
words = st.lists(st.sampled_from(["a", "b c", ",", "\n", '"', ', "', "\n\n"]), min_size=1, max_size=6).map("".join)
with_backslashes = st.lists(st.sampled_from(["a", ",", "\n", '"', "\\"]), min_size=1, max_size=6).map("".join)


def tables(texts):
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
@given(tables(words))
def test_quotes_that_are_escaped_with_backslashes(folder, rows):
    found = read(folder, written(rows, escapechar="\\", doublequote=False))
    assert found is None or set(found) <= set(rows)


@pytest.mark.slow
@given(tables(with_backslashes))
def test_backslashes_are_text_where_quotes_are_doubled(folder, rows):
    text = written(rows)
    found = read(folder, text)
    assert found == rows or (found is None and '\\"' in text)


@pytest.mark.slow
def test_one_doubled_quote_anywhere_shows_that_backslashes_are_text(folder):
    rows = [("q", "C:\\", "a"), *((f"q{i}", "x, " * 1000, "b") for i in range(1000)), ("r", 'say "yes"', "c")]
    assert read(folder, written(rows, quoting=csv.QUOTE_ALL)) == rows
    assert read(folder, written(rows[:-1], quoting=csv.QUOTE_ALL)) is None


@pytest.mark.slow
@settings(max_examples=300)
@given(tables(words), st.data())
def test_a_quote_too_many_or_too_few(folder, rows, data):
    text = written(rows)
    places = [place for place, char in enumerate(text) if char == '"' and place > len(",".join(NAMES))]
    if places and data.draw(st.booleans()):
        place = data.draw(st.sampled_from(places))
        text = text[:place] + text[place + 1 :]
    else:
        place = data.draw(st.integers(len(",".join(NAMES)) + 1, len(text)))
        text = text[:place] + '"' + text[place:]
    plain = {tuple(cell.replace('"', "") for cell in row) for row in rows}
    found = read(folder, text) or []
    assert {tuple(cell.replace('"', "") for cell in row) for row in found} <= plain


@pytest.mark.slow
@given(tables(words), st.data())
def test_a_file_that_was_cut_off_has_no_other_rows(folder, rows, data):
    text = written(rows)
    *found, last = read(folder, text[: data.draw(st.integers(30, len(text)))]) or [None]
    assert set(found) <= set(rows)
    assert last is None or any(row[:2] == last[:2] and row[2].startswith(last[2]) for row in rows)


DAMAGED = {
    "backslash": ('p,"say \\"x\\"",b', r"line 3 \(.*\n    python -c 'import pandas; pandas\.read_csv\(.*escapechar="),
    "junk behind a quote": ('p,"x" y,b', "line 3"),
    "a space before a quote": ('p, "x",b', "line 3 .a space before a quote"),
    "one quote": ('p,5" wide,b', "line 3"),
    "never closed": ('p,"x,b', "line 3 .*quoted cell"),
    "NUL": ("p,x\0\0\0,b", "line 3 .NUL"),
}


@pytest.mark.parametrize(("line", "message"), DAMAGED.values(), ids=DAMAGED)
def test_the_error_names_the_line(tmp_path, line, message):
    (tmp_path / "data.csv").write_text(f"prompt,chosen,rejected\np,a,b\n{line}\np,a,b\n")
    with pytest.raises(DataError, match=message):
        load_pairs(str(tmp_path / "data.csv"))


def test_cells_that_are_not_quoted_at_all_refuse_the_file(tmp_path):
    rows = "".join(f"q{i},First, open a shell\nThen press enter\n" for i in range(9))
    (tmp_path / "data.csv").write_text("prompt,chosen,rejected\np,a,b\nq,One\n" + rows)
    with pytest.raises(DataError, match="10 of 20 rows have another number of cells"):
        load_pairs(str(tmp_path / "data.csv"))


EXCEL = {
    "empty columns": "prompt,chosen,rejected,,\nq,a,b,,\nr,a,b\ns,a,b,,,\n",
    "separator": "sep=;\nprompt;chosen;rejected\nq;a;b\nr;a;b\ns;a;b\n",
    "quoted separator": '"sep=|"\r\n\r\nprompt|chosen|rejected\r\nq|a|b\r\nr|a|b\r\ns|a|b\r\n',
    "both": "\ufeffsep=;\nprompt;chosen;rejected;\nq;a;b;\nr;a;b\ns;a;b;;\n",
}


@pytest.mark.parametrize("text", EXCEL.values(), ids=EXCEL)
def test_what_spreadsheets_add(folder, text):
    assert read(folder, text) == [(prompt, "a", "b") for prompt in "qrs"]


def test_a_cell_behind_the_last_column_costs_its_row(tmp_path):
    (tmp_path / "data.csv").write_text("prompt,chosen,rejected,,\nq,a,b,,\nr,a,b,lost,\n")
    loaded = load_pairs(str(tmp_path / "data.csv"))
    assert [(row.row, row.reason) for row in loaded.rejected] == [(2, "not valid CSV")]


def test_the_row_limit_holds_for_headers_and_for_cells_of_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 1000)
    path = tmp_path / "data.csv"
    for text in ("x" * 1001, "prompt,chosen,rejected\n" + "p" * 1001, 'prompt,chosen,rejected\n"' + "p\n" * 501):
        path.write_text(text)
        with pytest.raises(DataError, match="longer than"):
            load_pairs(str(path))
