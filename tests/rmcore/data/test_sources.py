"""Any source reads to the same pairs; damage to a file is an error and damage to a row costs that row."""

import csv
import gzip
import json
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.data.layouts import ColumnMap
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.sources import is_local, iter_records, load_pairs, source_digest, source_kind, write_rejected
from rmcore.errors import DataError

ROWS = [
    {
        "prompt": f"Frage {i}: wie heißt,\n„{i}“?",
        "chosen": [
            {"role": "user", "content": f"Frage {i}: wie heißt,\n„{i}“?"},
            {"role": "assistant", "content": "ja"},
        ],
        "rejected": [
            {"role": "user", "content": f"Frage {i}: wie heißt,\n„{i}“?"},
            {"role": "assistant", "content": "no"},
        ],
        "margin": i / 4,
        "subset": "α",
    }
    for i in range(1200)
]
PAIRS = [PreferencePair(row["prompt"], "ja", "no", row["margin"], {"subset": "α"}) for row in ROWS]
FORMATS = ["parquet", "json", "jsonl", "csv", "pretty.json", "lines.json"]


def write(rows, path):
    """Write rows in the form that the name asks for."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        if path.name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
        return path
    with (gzip.open if path.name.endswith(".gz") else open)(path, "wt", encoding="utf-8", newline="") as file:
        if name.endswith("csv"):
            writer = csv.writer(file)
            writer.writerow(rows[0])
            writer.writerows([v if isinstance(v, str) else json.dumps(v) for v in row.values()] for row in rows)
        elif name.endswith(("jsonl", "lines.json")):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            json.dump(rows, file, indent=2 if "pretty" in name else None)
    return path


def plain(**changes):
    return {"prompt": "p", "chosen": "a", "rejected": "b", **changes}


def reasons(loaded):
    return [(row.row, row.reason) for row in loaded.rejected]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_file_format_gives_the_same_pairs(tmp_path, form, packed):
    path = write(ROWS, tmp_path / f"data.{form}{packed}")
    loaded = load_pairs(str(path))
    assert loaded.pairs == PAIRS
    assert (loaded.rejected, loaded.num_rows, loaded.source) == ([], 1200, str(path))
    assert [record.row for record in islice(iter_records(str(path)), 3)] == [1, 2, 3]


def test_limit_counts_pairs_and_stops_reading(tmp_path):
    path = write(ROWS, tmp_path / "data.jsonl")
    loaded = load_pairs(str(path), limit=7)
    assert (loaded.pairs, loaded.num_rows) == (PAIRS[:7], 7)
    ranked = {"prompt": "p", "answers": ["a", "b", "c"], "ranks": [1, 2, 3]}
    loaded = load_pairs(str(write([ranked] * 5, tmp_path / "ranked.json")), limit=4)
    assert (len(loaded.pairs), loaded.num_rows, loaded.layout) == (4, 2, "ranked answers")


def test_a_limit_before_the_damage_reads_what_was_asked_for(tmp_path):
    path = write(ROWS, tmp_path / "data.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-30])
    assert len(load_pairs(str(path), limit=5).pairs) == 5


@pytest.fixture(scope="module")
def dataset_folders(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("folders")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(folder / "one"))
    shuffled = whole.select(range(3)), whole.select(range(3, 5))
    datasets.DatasetDict({"train": shuffled[0], "test": shuffled[1]}).save_to_disk(str(folder / "dict"))
    return folder


def test_datasets_folders(dataset_folders):
    assert load_pairs(str(dataset_folders / "one")).pairs == PAIRS
    assert load_pairs(str(dataset_folders / "dict")).pairs == PAIRS[:3]
    assert load_pairs(str(dataset_folders / "dict"), split="test").pairs == PAIRS[3:5]
    with pytest.raises(DataError, match="no split 'dev', its splits are train, test"):
        load_pairs(str(dataset_folders / "dict"), split="dev")


def test_bad_datasets_folders(dataset_folders, tmp_path):
    with pytest.raises(DataError, match=r"without state\.json"):
        load_pairs(str(tmp_path))
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text((dataset_folders / "one" / name).read_text())
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))
    arrow = next((dataset_folders / "one").glob("*.arrow"))
    (tmp_path / arrow.name).write_bytes(arrow.read_bytes()[:-5000])
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))


def test_named_columns(tmp_path):
    path = write([{"q": "p", "good": "a", "bad": "b", "gap": 2}], tmp_path / "data.csv")
    loaded = load_pairs(str(path), columns=ColumnMap("q", "good", "bad", "gap"))
    assert loaded.pairs == [PreferencePair("p", "a", "b", 2.0)]
    with pytest.raises(
        DataError, match=r"data\.csv: no layout fits the columns: the columns are 'q', 'good'.*--prompt-column"
    ):
        load_pairs(str(path))
    with pytest.raises(DataError, match="no column 'best'"):
        load_pairs(str(path), columns=ColumnMap(chosen="best"))


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
    b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}': "invalid UTF-8",
    b"[1, 2]": "wrong type",
    b"7": "wrong type",
    b"[" * 100_000: "not valid JSON",
    b"9" * 5000: "not valid JSON",
    b'{"prompt": "p", "chosen": "a"}': "missing rejected",
    b'{"prompt": "p", "chosen": "a", "rejected": null}': "missing rejected",
    b"{}": "missing chosen",
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
    path.write_text(head + 'p,"[1, 2]",b\np,a\np,"x" y,b\np,"[{\'role\': \'user\'}]",b\n\n"p ""q""","multi\nline",b\n')
    loaded = load_pairs(str(path))
    assert [(pair.prompt, pair.chosen) for pair in loaded.pairs] == [("p", "[1, 2]"), ('p "q"', "multi\nline")]
    assert reasons(loaded) == [(2, "not valid CSV"), (3, "not valid CSV"), (4, "not valid JSON")]
    path.write_text(head + 'p,a,b\np,"never closed,b\np,a,b\n')
    with pytest.raises(DataError, match="quoted cell is not closed"):
        load_pairs(str(path))
    path.write_text("prompt,chosen,chosen,rejected\np,a,b,c\n")
    with pytest.raises(DataError, match="'chosen' twice"):
        load_pairs(str(path))
    long = "word " * 100_000
    path.write_text(head + f"p,{long},b\n")
    assert load_pairs(str(path)).pairs[0].chosen == long


RANKED = {"prompt": "p", "responses": ["a", "b", "c"], "scores": [0.5, 3, 1]}


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_ranked_answers_in_every_storage(tmp_path, form):
    loaded = load_pairs(str(write([RANKED], tmp_path / f"data.{form}")))
    assert {(pair.chosen, pair.rejected): pair.target_margin for pair in loaded.pairs} == {
        ("b", "a"): 2.5, ("b", "c"): 2.0, ("c", "a"): 0.5
    }  # fmt: skip


def test_our_own_records_read_back_equal(tmp_path):
    dialogue = (Message("system", "s"), Message("user", "u"))
    own = [PreferencePair("p", "a", "b", 1.5, {"subset": "x", "n": None}, "id-1"), PreferencePair(dialogue, "a", "b")]
    for form in ("jsonl", "json"):
        assert load_pairs(str(write([pair.to_dict() for pair in own], tmp_path / f"own.{form}"))).pairs == own


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


@pytest.mark.parametrize(("name", "change"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path, name, change):
    path = damaged(tmp_path, name, change)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        load_pairs(str(path))


def test_a_cut_file_says_that_rows_are_lost(tmp_path):
    with pytest.raises(DataError, match="cut off, and the rows behind the cut are lost"):
        load_pairs(str(damaged(tmp_path, "data.jsonl.gz", lambda data: data[:-10])))


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(DataError, match="is not a file"):
        load_pairs(str(tmp_path / "none.parquet"))
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"extension '\.pkl'.*\.parquet, \.json, \.jsonl, \.csv"):
        load_pairs(str(tmp_path / "data.pkl"))


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


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers() | st.text(max_size=4) | st.fixed_dictionaries({"a": st.text(max_size=9)}), max_size=9),
    st.integers(1, 7),
)
def test_the_json_stream_reads_what_the_whole_parser_reads_at_any_chunk_size(values, chunk):
    import io

    from rmcore.data.json_stream import JsonText, array_values

    class Slow(io.StringIO):
        def read(self, size=-1):
            return super().read(min(size, chunk))

    assert list(array_values(JsonText(Slow(json.dumps(values, indent=1))))) == values


def test_what_a_source_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "plain").write_text("x")
    kinds = {
        "owner/name": "folder", "owner/other": "hub", "squad": "hub", "plain": "file", "none.jsonl.gz": "file",
        "a/b.parquet": "file", "./x": "file", "/x/y": "file", "~/x": "file", "a/b/c": "file", "": "folder",
    }  # fmt: skip
    assert {source: source_kind(source) for source in kinds} == kinds
    assert [is_local(source) for source in ("squad", "owner/name", "none.csv")] == [False, True, True]


def test_digest_follows_content_and_not_the_path(tmp_path):
    one, two = write(ROWS[:3], tmp_path / "one.csv"), write(ROWS[:3], tmp_path / "two.csv")
    assert source_digest(str(one)) == source_digest(str(two))
    write(ROWS[:4], two)
    assert source_digest(str(one)) != source_digest(str(two))
    with pytest.raises(DataError, match="cannot be read"):
        source_digest(str(tmp_path / "none.csv"))


def test_folder_digest_follows_names_and_content(tmp_path):
    digests = []
    for index, (name, text) in enumerate([("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a/b", "x")]):
        file = tmp_path / str(index) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        digests.append(source_digest(str(tmp_path / str(index))))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_public_data_has_its_known_counts(data_folder):
    folder = data_folder
    alpaca = load_pairs(str(folder / "alpacaeval_train.parquet"))
    assert (len(alpaca.pairs), alpaca.rejected, alpaca.layout) == (10_591, [], "plain strings")
    assert all(pair.target_margin >= 2 for pair in alpaca.pairs)
    assert set(alpaca.pairs[0].metadata) == {"chosen_model", "rejected_model", "source"}
    harmless = load_pairs(str(folder / "hh_harmless_base_test.jsonl.gz"))
    assert (harmless.num_rows, len(harmless.pairs), harmless.layout) == (2_312, 2_303, "dialogues")
    found = [reason for _, reason in reasons(harmless)]
    assert {reason: found.count(reason) for reason in found} == {"prompts differ": 5, "empty chosen": 4}
    turns = [
        pair.prompt if isinstance(pair.prompt, tuple) else (Message("user", pair.prompt),) for pair in harmless.pairs
    ]
    assert all(prompt[0].role == prompt[-1].role == "user" for prompt in turns)
