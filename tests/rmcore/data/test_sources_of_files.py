"""Any source reads to the same pairs, whatever its form, in one go or in parts; its digest follows its content."""

import contextlib
import gzip
import io
import json
import math
import tempfile
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import source_sample as sample
from rmcore.core.errors import DataError
from rmcore.data.audit import audit, format_audit
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.json_stream import json_values
from rmcore.data.readers.sources import iter_records, load_pairs, source_digest, source_kind
from rmcore.data.table import write_pairs
from source_sample import lines

ROWS, FORMATS, write = sample.ROWS, sample.FORMATS, sample.write
PAIRS = [PreferencePair(row["prompt"], "ja", "no", row["margin"], {"subset": "α"}) for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_file_format_gives_the_same_pairs(tmp_path, form, packed):
    path = write(ROWS, tmp_path / f"data.{form}{packed}")
    told = []
    loaded = load_pairs(str(path), report=lambda *at: told.append(at))
    assert told == [(0, 1, f"1,000 rows of {path}")]
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


@pytest.mark.parametrize(("limit", "num_rows", "num_ties"), [(1, 3, 0), (3, 3, 0), (4, 6, 1), (5, 6, 1)])
def test_a_limit_cuts_no_record_so_every_label_of_those_that_were_read_is_counted(tmp_path, limit, num_rows, num_ties):
    record = {"instruction": "Name a tool.", "input": "", "response1": "A cloud.", "response2": "A hammer."}
    votes = [(1, 1, 2), (2, 2, 0), (1, 1, 1)]
    rows = [record | {f"annotator{place}": vote for place, vote in enumerate(one, start=1)} for one in votes]
    path = str(write(rows, tmp_path / "votes.json"))
    loaded, parts = load_pairs(path, limit=limit), SourceInParts(path, 2, limit=limit)
    assert (loaded.layout, len(loaded.pairs)) == ("PandaLM", limit)
    assert (loaded.num_rows, loaded.num_ties) == (num_rows, num_ties)
    assert sum(len(part) for part in parts) == limit
    assert (parts.num_rows, parts.num_unusable) == (num_rows, num_ties)


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
    with pytest.raises(DataError, match="is no folder of datasets' save_to_disk"):
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


@settings(max_examples=15)
@given(
    st.lists(st.integers() | st.text(max_size=4) | st.fixed_dictionaries({"a": st.text(max_size=5)}), max_size=4),
    st.integers(1, 7),
)
def test_the_json_stream_reads_what_the_whole_parser_reads_at_any_chunk_size(values, chunk):
    class Slow(io.StringIO):
        def read(self, size=-1):
            return super().read(min(size, chunk))

    assert list(json_values(Slow(json.dumps(values, indent=1)))) == values


def test_what_a_source_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "plain").write_text("x")
    kinds = {
        "owner/name": "folder", "owner/other": "hub", "squad": "hub", "plain": "file", "none.jsonl.gz": "file",
        "a/b.parquet": "file", "./x": "file", "/x/y": "file", "~/x": "file", "a/b/c": "file", "": "folder",
    }  # fmt: skip
    assert {source: source_kind(source) for source in kinds} == kinds


def test_digest_follows_names_in_a_folder_and_content_and_not_the_path(tmp_path):
    digests = []
    for index, (name, text) in enumerate([("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a/b", "x")]):
        file = tmp_path / str(index) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        digests.append((source_digest(str(tmp_path / str(index))), source_digest(str(file))))
    assert digests[0] == digests[1]
    folders, files = ({*each} for each in zip(*digests, strict=True))
    assert (len(folders), len(files)) == (4, 2)
    with pytest.raises(DataError, match="cannot be read"):
        source_digest(str(tmp_path / "none.csv"))


@pytest.mark.slow
def test_public_data_has_its_known_counts(data_folder):
    folder = data_folder
    alpaca = load_pairs(str(folder / "alpacaeval_train.parquet"))
    assert (len(alpaca.pairs), alpaca.rejected, alpaca.layout) == (10_591, [], "plain strings")
    assert all(pair.target_margin >= 2 for pair in alpaca.pairs)
    assert set(alpaca.pairs[0].metadata) == {"chosen_model", "rejected_model", "source"}
    harmless = load_pairs(str(folder / "hh_harmless_base_test.jsonl.gz"))
    assert (harmless.num_rows, len(harmless.pairs), harmless.layout) == (2_312, 2_303, "dialogues")
    found = [row.reason for row in harmless.rejected]
    assert {reason: found.count(reason) for reason in found} == {"prompts differ": 5, "empty chosen": 4}
    turns = [
        pair.prompt if isinstance(pair.prompt, tuple) else (Message("user", pair.prompt),) for pair in harmless.pairs
    ]
    assert all(prompt[0].role == prompt[-1].role == "user" for prompt in turns)


def put(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": one, "chosen": "a", "rejected": "b"}) + "\n" for one in prompts))


SPARK = "part-0000{}-3f2a-c000.jsonl"
FOLDERS = {
    "shards": "data/train-00000-of-00002.jsonl data/train-00001-of-00002.jsonl data/test-00000-of-00001.jsonl",
    "with a digest": "train-00000-of-00002-ab12.jsonl train-00001-of-00002-ab12.jsonl test.jsonl",
    "numbers": "data/train/0000.jsonl data/train/0001.jsonl data/test/0000.jsonl",
    "any name, from 1": "pairs_01.jsonl pairs_02.jsonl",
    "numbers alone": "0000.jsonl 0001.jsonl",
    "Spark": f"{SPARK.format(0)} {SPARK.format(1)}",
}


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
def test_the_files_of_a_split_are_one_data_set_in_the_order_of_their_numbers(tmp_path, names):
    first, second, *tests = (tmp_path / name for name in names.split())
    for path, prompts in zip((first, second, *tests), ("pq", "rs", "t"), strict=False):
        put(path, *prompts, "")
    for name in ("README.md", "dataset_infos.json", "_SUCCESS"):
        (tmp_path / name).write_text("{}")
    if not tests:
        (tmp_path / "dataset_infos.json").unlink()
    loaded = load_pairs(str(tmp_path))
    assert [pair.prompt for pair in loaded.pairs] == [*"pqrs"]
    assert [row.row for row in loaded.rejected] == [3, 6]
    for split in ("test", "dev")[: 2 if tests else 1]:
        if tests and split == "test":
            assert [pair.prompt for pair in load_pairs(str(tmp_path), split=split).pairs] == ["t"]
        else:
            with pytest.raises(DataError, match=f"no file in it is named as the split '{split}'"):
                load_pairs(str(tmp_path), split=split)
    number, next_but_one = ("_02", "_04") if "_02" in second.name else ("1", "3")
    second.rename(second.with_name(second.name.replace(number, next_but_one, 1)))
    with pytest.raises(DataError, match="lacks file 1 of the split 'train'"):
        load_pairs(str(tmp_path))


NO_DATA_SET = """
a-0.jsonl b-1.jsonl | test-0.jsonl test-1.jsonl | x-0.jsonl y.jsonl | x_1.jsonl x_01.jsonl | llama3.jsonl
part-1.train.jsonl part-2.test.jsonl | hh_test_1.jsonl hh_test_2.jsonl | pairs_v1.jsonl pairs_v2.jsonl
fold-1.jsonl fold-2.jsonl | train.jsonl data/train-00000-of-00001.jsonl
"""


@pytest.mark.parametrize("names", NO_DATA_SET.strip().replace("\n", "|").split("|"))
def test_files_that_need_not_be_one_data_set_are_refused(tmp_path, names):
    for name in names.split():
        put(tmp_path / name, "p")
    with pytest.raises(DataError, match=r"no file in it is named as the split|which one is meant is unknown"):
        load_pairs(str(tmp_path))


@pytest.mark.parametrize("form", ["stream", "file"])
@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_arrow_file_is_read_or_refused(form, data):
    """Whatever bytes are others: no crash of the process, no error but that of damaged data."""
    rows = [{"prompt": "p", "chosen": "good " * number, "rejected": "bad"} for number in range(1, 9)]
    table, buffer = pa.Table.from_pylist(rows), io.BytesIO()
    with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    whole = bytearray(buffer.getvalue())
    for _ in range(3):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.arrow"
        path.write_bytes(whole)
        with contextlib.suppress(DataError):
            load_pairs(str(path), require_pairs=False)


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("packed", [False, True])
def test_arrow_files_are_read_and_cut_ones_are_refused(tmp_path, form, packed):
    rows = [{"prompt": f"p {number}", "chosen": f"good {number}", "rejected": "bad"} for number in range(1500)]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / ("pairs.arrow.gz" if packed else "pairs.arrow")
    kind = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with (gzip.open if packed else open)(path, "wb") as file, kind(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=400)
    assert [pair.chosen for pair in load_pairs(str(path)).pairs] == [row["chosen"] for row in rows]
    whole = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    ends = [len(whole) - 8, len(whole) // 2, len(whole) // 2 + 1]  # the first is between two batches
    for end in ends:
        path.write_bytes(gzip.compress(whole[:end]) if packed else whole[:end])
        with pytest.raises(DataError, match=r"cut off|damaged"):
            load_pairs(str(path))


RESPONSES = [{"prompt": f"p{number}", "response": None if number % 5 == 3 else f"r{number}"} for number in range(23)]
RESPONSES[8] = {"prompt": " ", "response": "a blank prompt"}
RESPONSES[13] = {"prompt": ["two"], "response": "no text"}
RESPONSES[18] = {"prompt": "half a pair of \ud800", "response": "no Unicode"}
UNUSABLE = {3, 8, 13, 18}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gold_pairs):
    place = tmp_path_factory.mktemp("parts")
    write_pairs(gold_pairs[:31], place / "pairs.parquet")
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in gold_pairs[:31]]
    text = [*map(json.dumps, rows[:4]), "not JSON", '{"prompt": "p", "chosen": "same", "rejected": "same"}']
    (place / "pairs.jsonl").write_text("\n".join([*text, *map(json.dumps, rows[4:])]))
    sides = [
        {"pair_id": pair.pair_id, "role": role, "prompt": pair.prompt, "response": getattr(pair, role)}
        for role in ("chosen", "rejected")
        for pair in gold_pairs[:31]
    ]
    lines(sides, place / "sides.jsonl")
    lines(RESPONSES, place / "responses.jsonl")
    return place


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 40), st.none() | st.integers(1, 40), st.sampled_from(["pairs.parquet", "pairs.jsonl", "sides.jsonl"])
)
def test_the_pairs_of_all_parts_are_those_of_the_source(folder, size, limit, name):
    source = SourceInParts(str(folder / name), size, limit=limit)
    parts = list(source)
    whole = load_pairs(str(folder / name), limit=limit)
    assert [pair.pair_id for part in parts for pair in part.pairs] == [pair.pair_id for pair in whole.pairs]
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(len(part) == size for part in parts[:-1])
    assert 0 < len(parts[-1]) <= size
    if limit is None:
        assert (source.num_rows, source.num_unusable) == (whole.num_rows, len(whole.rejected))


@settings(max_examples=25)
@given(st.integers(1, 30), st.none() | st.integers(1, 30) | st.just(10**30))
def test_the_responses_of_all_parts_are_those_of_the_source(folder, size, limit):
    source, read = SourceInParts(str(folder / "responses.jsonl"), size, limit=limit), RESPONSES[:limit]
    parts = list(source)
    usable = [place for place in range(len(read)) if place not in UNUSABLE]
    expected = [(read[place]["prompt"], read[place]["response"]) for place in usable]
    assert [row for part in parts for row in part.responses] == expected
    assert [row - 1 for part in parts for row in part.rows] == usable
    assert [len(part.rows) for part in parts] == [len(part) for part in parts]
    assert (source.num_rows, source.num_unusable) == (len(read), len(read) - len(usable))


def test_a_damaged_first_line_says_nothing_about_the_others_and_no_row_is_read_before_it_is_asked_for(folder, tmp_path):
    """So memory holds one part, however long the file is."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["not JSON", *map(json.dumps, RESPONSES)]))
    source = SourceInParts(str(path), 5)
    parts = iter(source)
    assert [prompt for prompt, _ in next(parts).responses] == ["p0", "p1", "p2", "p4", "p5"]
    assert (source.num_rows, source.num_unusable) == (7, 2)
    source = SourceInParts(str(folder / "pairs.parquet"), 5)
    assert [source.num_rows for _ in source] == [5, 10, 15, 20, 25, 30, 31]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "chosen": "a", "rejected": "b"}],
        [{"pair_id": "1", "role": role, "prompt": "p", "response": role} for role in ("chosen", "rejected")],
    ],
    ids=["pair", "sides of a pair"],
)
def test_pairs_are_not_taken_for_responses(tmp_path, rows):
    [part] = SourceInParts(lines(rows, tmp_path / "rows.jsonl"), 10)
    assert (len(part.pairs), part.responses) == (1, [])


PAIR = {"prompt": "What is on it?", "chosen": "A cat.", "rejected": "A dog."}


@pytest.mark.parametrize(
    "part",
    [
        *({"documents": ["x"]}, {"context": "It is dark."}, {"History": [["q", "a"]]}, {"input": "apple"}),
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_it_is_named_by_data_check_and_by_what_reads_in_parts(tmp_path, part):
    source = lines([PAIR, {**PAIR, **part}], tmp_path / "data.jsonl")
    [name] = part
    loaded = load_pairs(source)
    [notice] = loaded.notices()
    assert f"{name!r} (in 1 of the first 2)" in notice
    assert f"NOTE     {notice}" in format_audit(audit({"all": loaded.pairs}, [loaded]))
    for size in (1, 100):
        parts = SourceInParts(source, size)
        assert sum(len(one.pairs) for one in parts) == 2
        [said] = parts.notices
        assert name in said


def test_it_is_named_where_responses_are_scored(tmp_path):
    row = {"prompt": "What is on it?", "response": "A cat.", "system": "Be brief."}
    parts = SourceInParts(lines([row, {**row, "context": "It is dark."}], tmp_path / "data.jsonl"), 1)
    assert sum(len(one.responses) for one in parts) == 2
    [said] = parts.notices
    assert "'context' (in 1 of the first 2)" in said
    assert "system'" not in said


@pytest.mark.parametrize(
    "other",
    [{"question": " What is on it? "}, {"context": ""}, {"images": []}, {"images": "[]"}, {"input": None}, {"n": "x"}],
)
def test_other_columns_are_not(tmp_path, other):
    assert load_pairs(lines([{**PAIR, **other}], tmp_path / "data.jsonl")).notices() == []


@pytest.mark.parametrize("first", ["round", "", None, math.nan])
def test_an_input_that_a_layout_reads_is_not(tmp_path, first):
    row = {"instruction": "Name it.", "input": first, "chosen": "A ball.", "rejected": "A box."}
    loaded = load_pairs(lines([row], tmp_path / "data.jsonl"))
    assert loaded.notices() == []
    assert loaded.pairs[0].prompt == ("Name it.\nround" if first == "round" else "Name it.")
