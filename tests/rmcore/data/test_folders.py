"""A folder of files named as those of a data set on the hub is read like one file."""

import contextlib
import gzip
import io
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.readers.sources import load_pairs


def put(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": one, "chosen": "a", "rejected": "b"}) + "\n" for one in prompts))


NAMES = {
    "shards": ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"),
    "with a digest": ("train-00000-of-00002-ab12.jsonl", "train-00001-of-00002-ab12.jsonl", "test.jsonl"),
    "numbers": ("data/train/0000.jsonl", "data/train/0001.jsonl", "data/test/0000.jsonl"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_the_files_of_a_split(tmp_path, names):
    for name, prompts in zip(names, ("pq", "rs", "t"), strict=True):
        put(tmp_path / name, *prompts, "")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "dataset_infos.json").write_text("{}")
    loaded = load_pairs(str(tmp_path))
    assert [pair.prompt for pair in loaded.pairs] == [*"pqrs"]
    assert [row.row for row in loaded.rejected] == [3, 6]
    assert [pair.prompt for pair in load_pairs(str(tmp_path), split="test").pairs] == ["t"]
    with pytest.raises(DataError, match="no file in it is named as the split 'dev'"):
        load_pairs(str(tmp_path), split="dev")
    if names[1] != "test.jsonl":
        (tmp_path / names[0]).unlink()
        with pytest.raises(DataError, match="lacks file 0 of the split 'train'"):
            load_pairs(str(tmp_path))


SHARDS = {
    "from 0": ("part-0.jsonl", "part-1.jsonl", "part-10.jsonl"),
    "from 1": ("pairs_01.jsonl", "pairs_02.jsonl", "pairs_03.jsonl"),
    "numbers alone": ("0000.jsonl", "0001.jsonl", "0002.jsonl"),
    "Spark": ("part-00000-3f2a-c000.jsonl", "part-00001-3f2a-c000.jsonl", "part-00002-3f2a-c000.jsonl"),
}


@pytest.mark.parametrize("names", SHARDS.values(), ids=SHARDS)
def test_numbered_files_of_any_name_are_one_data_set_in_the_order_of_their_numbers(tmp_path, names):
    for name, prompt in zip(names, "pqr", strict=True):
        put(tmp_path / name, prompt)
    (tmp_path / "_SUCCESS").write_text("")
    if names[2] == "part-10.jsonl":
        with pytest.raises(DataError, match="lacks file 2"):
            load_pairs(str(tmp_path))
        (tmp_path / names[2]).rename(tmp_path / "part-2.jsonl")
    assert [pair.prompt for pair in load_pairs(str(tmp_path)).pairs] == [*"pqr"]
    with pytest.raises(DataError, match="no file in it is named as the split 'test'"):
        load_pairs(str(tmp_path), split="test")


@pytest.mark.parametrize(
    "names",
    [
        *(("a-0.jsonl", "b-1.jsonl"), ("test-0.jsonl", "test-1.jsonl"), ("x-0.jsonl", "y.jsonl")),
        *(("x_1.jsonl", "x_01.jsonl"), ("part-1.train.jsonl", "part-2.test.jsonl"), ("llama3.jsonl",)),
        *(
            ("hh_test_1.jsonl", "hh_test_2.jsonl"),
            ("pairs_v1.jsonl", "pairs_v2.jsonl"),
            ("fold-1.jsonl", "fold-2.jsonl"),
        ),
    ],
)
def test_files_that_need_not_be_one_data_set_are_refused(tmp_path, names):
    for name in names:
        put(tmp_path / name, "p")
    with pytest.raises(DataError, match="no file in it is named as the split"):
        load_pairs(str(tmp_path))


def test_a_total_in_the_names_is_counted(tmp_path):
    for number in (1, 2):
        put(tmp_path / f"data-{number}-of-3.jsonl", str(number))
    with pytest.raises(DataError, match="lacks file 2"):
        load_pairs(str(tmp_path))
    put(tmp_path / "data-3-of-3.jsonl", "3")
    assert [pair.prompt for pair in load_pairs(str(tmp_path)).pairs] == [*"123"]


@pytest.mark.parametrize("form", ["stream", "file"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
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


def test_two_arrow_streams_in_one_file_are_refused(tmp_path):
    table = pa.Table.from_pylist([{"prompt": "p", "chosen": "a", "rejected": "b"}])
    for name in ("a", "b"):
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "both.arrow").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    with pytest.raises(DataError, match="second table"):
        load_pairs(str(tmp_path / "both.arrow"))


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


def test_an_arrow_folder_and_categories(tmp_path):
    table = pa.Table.from_pylist([{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2)
    for number, one in enumerate((table, table.set_column(2, "rejected", table["rejected"].dictionary_encode()))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pa.ipc.new_stream(str(folder / "shard-1.arrow"), one.schema) as writer:
            writer.write_table(one)
    assert len(load_pairs(str(tmp_path / "0")).pairs) == 2
    with pytest.raises(DataError, match="categories"):
        load_pairs(str(tmp_path / "1"))


def test_two_data_sets_in_one_folder(tmp_path):
    put(tmp_path / "train.jsonl", "p")
    put(tmp_path / "data/train-00000-of-00001.jsonl", "p")
    with pytest.raises(DataError, match="which one is meant is unknown"):
        load_pairs(str(tmp_path))
