"""Damage to a file is an error, and damage to a row costs that row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import source_sample as sample
from rmcore.core.errors import DataError
from rmcore.data.pair import is_blank
from rmcore.data.readers.sources import load_pairs, write_rejected

ROWS, FORMATS, write = sample.ROWS, sample.FORMATS, sample.write


def plain(**changes):
    return {"prompt": "p", "chosen": "a", "rejected": "b", **changes}


def reasons(loaded):
    return [(row.row, row.reason) for row in loaded.rejected]


@pytest.mark.parametrize("form", ["parquet", "json", "jsonl", "csv"])
def test_bad_rows_are_set_aside_with_number_and_reason(tmp_path, form):
    rows = [plain(), plain(prompt=""), plain(chosen="b"), plain(rejected="  "), plain(prompt="q")]
    loaded = load_pairs(str(write(rows, tmp_path / f"data.{form}")))
    assert [pair.prompt for pair in loaded.pairs] == ["p", "q"]
    assert reasons(loaded) == [(2, "empty prompt"), (3, "identical sides"), (4, "empty rejected")]
    assert loaded.num_rows == 5


@pytest.mark.parametrize("form", FORMATS)
def test_when_no_row_is_left_the_error_counts_the_reasons(tmp_path, form):
    path = write([plain(prompt=""), plain(prompt=" "), plain(chosen="b")], tmp_path / f"data.{form}")
    with pytest.raises(DataError, match=r"3 rows and none gives .* \(empty prompt: 2, identical sides: 1\)"):
        load_pairs(str(path))


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


def test_parquet_types_that_are_no_text(tmp_path):
    pq.write_table(
        pa.table({"prompt": [1, 2], "chosen": ["a", "b"], "rejected": ["c", "d"]}), tmp_path / "data.parquet"
    )
    with pytest.raises(DataError, match="wrong type: 2"):
        load_pairs(str(tmp_path / "data.parquet"))


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
    path.write_text("prompt,chosen,chosen,rejected\np,a,b,c\n")
    with pytest.raises(DataError, match="'chosen' twice"):
        load_pairs(str(path))
    long = "word " * 100_000
    path.write_text(head + f"p,{long},b\n")
    assert load_pairs(str(path)).pairs[0].chosen == long


def damaged(tmp_path, name, change):
    path = write(ROWS, tmp_path / name)
    path.write_bytes(change(path.read_bytes()))
    return path


DAMAGE = {
    "cut parquet": ("data.parquet", lambda data: data[:-100]),
    "overwritten parquet": (
        "data.parquet",
        lambda data: data[:200] + bytes(len(data) // 2) + data[200 + len(data) // 2 :],
    ),
    "text named parquet": ("data.parquet", lambda data: b"prompt,chosen,rejected\n"),
    "cut gz": ("data.jsonl.gz", lambda data: data[:-10]),
    "half gz": ("data.csv.gz", lambda data: data[: len(data) // 2]),
    "cut parquet.gz": ("data.parquet.gz", lambda data: data[:-10]),
    "changed gz": ("data.json.gz", lambda data: data[:500] + b"\0" * 50 + data[550:]),
    "checksum of gz": ("data.jsonl.gz", lambda data: data[:-8] + b"\0" * 8),
    "text named gz": ("data.jsonl.gz", lambda data: b'{"prompt": "p"}'),
    "gz not named so": ("data.jsonl", gzip.compress),
    "cut json": ("data.json", lambda data: data[:-100]),
    "json not closed": ("data.json", lambda data: data[:-1]),
    "json with a tail": ("data.json", lambda data: data + b"]"),
    "json without a comma": ("data.json", lambda data: data.replace(b"}, {", b"} {", 1)),
    "cut objects": ("lines.json", lambda data: data[:-20]),
    "json of a number": ("data.json", lambda data: b"12"),
    "deep json": ("data.json", lambda data: b"[" * 100_000),
    "html": ("data.json", lambda data: b"<html>not found</html>"),
    "empty": ("data.csv", lambda data: b""),
    "empty parquet": ("data.parquet", lambda data: b""),
    "empty inside gz": ("data.jsonl.gz", lambda data: gzip.compress(b"")),
    "only a header": ("data.csv", lambda data: b"prompt,chosen,rejected\n"),
    "only blank lines": ("data.jsonl", lambda data: b"\n\n  \n"),
    "empty array": ("data.json", lambda data: b" [ ] "),
    "only bad lines": ("data.jsonl", lambda data: b"no\nrows\n"),
    "utf-16": ("data.jsonl", lambda data: data[:300].decode("utf-8", "ignore").encode("utf-16")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path, name, change):
    path = damaged(tmp_path, name, change)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        load_pairs(str(path))


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(DataError, match="is not a file"):
        load_pairs(str(tmp_path / "none.parquet"))
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"extension '\.pkl'.*\.parquet, \.json, \.jsonl, \.csv"):
        load_pairs(str(tmp_path / "data.pkl"))


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.binary(max_size=200),
    st.sampled_from([".parquet", ".json", ".jsonl", ".csv", ".jsonl.gz", ".parquet.gz"]),
    st.booleans(),
)
def test_arbitrary_bytes_are_pairs_or_a_data_error(tmp_path_factory, data, suffix, packed):
    path = tmp_path_factory.mktemp("fuzz") / f"data{suffix}"
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(DataError):
        load_pairs(str(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(
        json_values | st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "margin"]), json_values),
        max_size=6,
    )
)
def test_arbitrary_json_rows_are_counted_and_never_stop_the_reading(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("fuzz") / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [plain(), *rows, plain(prompt="last")]))
    loaded = load_pairs(str(path))
    assert loaded.num_rows == len(loaded.pairs) + len(loaded.rejected) == len(rows) + 2
    assert loaded.pairs[-1].prompt == "last"
    write_rejected(loaded.rejected, path.with_name("rejected_rows.jsonl"))


def test_a_repeated_key_costs_its_row_alone_in_json_too(tmp_path):
    row, twice = json.dumps(plain()), '{"prompt": "p", "meta": [{"a": 1, "a": 2}], "chosen": "a", "rejected": "b"}'
    for text in (f"[{row}, {twice}, {row}]", f"{row}\n{twice}\n{row}"):
        (tmp_path / "data.json").write_text(text)
        loaded = load_pairs(str(tmp_path / "data.json"))
        assert (len(loaded.pairs), reasons(loaded)) == (2, [(2, "a key is repeated")])
    header = "prompt,chosen,rejected\n"
    (tmp_path / "data.csv").write_text(header + 'p,"[{""role"": ""assistant"", ""role"": ""user""}]",b\np,a,b\n')
    assert reasons(load_pairs(str(tmp_path / "data.csv"))) == [(1, "a key is repeated")]


def test_a_repeated_key_is_found_wherever_the_buffer_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("rmcore.data.readers.json_stream._READ_CHARACTERS", 5)
    rows = [plain(), plain(metadata={"a": 1}), plain()]
    text = json.dumps(rows).replace('"a": 1', '"a": 1, "a": 2')
    (tmp_path / "data.json").write_text(text)
    assert reasons(load_pairs(str(tmp_path / "data.json"))) == [(2, "a key is repeated")]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_repeated_column_is_refused(tmp_path, packed):
    table = pa.table([["p"], ["a"], ["b"], ["c"]], names=["prompt", "chosen", "rejected", "chosen"])
    path = tmp_path / f"data.parquet{packed}"
    with gzip.open(path, "wb") if packed else path.open("wb") as file:
        pq.write_table(table, file)
    with pytest.raises(DataError, match="has the column 'chosen' twice: which one is meant is unknown"):
        load_pairs(str(path))


@pytest.mark.parametrize("values", [[True, False], [1, False]])
def test_truth_values_are_no_ranks(tmp_path, values):
    path = write([{"prompt": "p", "answers": ["a", "b"], "ranks": values}], tmp_path / "data.jsonl")
    with pytest.raises(DataError, match="wrong type: 1"):
        load_pairs(str(path))


@given(st.text(st.sampled_from("\0\x01\x1f\x7f\u00ad\u200b\u200d\u2060\ufeff\u2800\u3164\ufe0f \t\n")), st.text())
def test_what_cannot_be_seen_is_blank_and_stays_where_something_can(unseen, text):
    assert is_blank(unseen)
    assert not is_blank(f"{unseen}e\u0301{unseen}{text}")
