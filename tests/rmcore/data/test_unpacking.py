"""What a file may cost that is small on disk: refused before memory or minutes are spent."""

import gzip
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from machine import largest_file
from rmcore.core.errors import DataError
from rmcore.data.readers import unpacking
from rmcore.data.readers.files import read_file

LINE = b'{"prompt": "p", "chosen": "' + b"a" * 10_000 + b'", "rejected": "b"}\n'


def bombs(folder):
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(LINE * 3000))
    (folder / "data.json.gz").write_bytes(gzip.compress(b"[" + b" " * 30_000_000))
    (folder / "data.csv.gz").write_bytes(gzip.compress(b"prompt,chosen,rejected\n" + b"p,a,b\n" * 1_000_000))
    table = pa.table({"prompt": ["p" * 10_000] * 3000, "chosen": ["a"] * 3000, "rejected": ["b"] * 3000})
    pq.write_table(table, folder / "data.parquet", compression="zstd")
    one = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["p" * 2**20]))
    repeated = pa.table({"prompt": one, "chosen": ["a"] * 500, "rejected": ["b"] * 500})
    pq.write_table(repeated, folder / "data.dictionary.parquet", compression="zstd", store_schema=False)
    equal = {name: pa.repeat(pa.scalar(name), 100_000) for name in ("prompt", "chosen", "rejected")}
    pq.write_table(pa.table(equal), folder / "data.rows.parquet")
    pq.write_table(table.slice(0, 10), folder / "plain.parquet")
    (folder / "data.parquet.gz").write_bytes(gzip.compress((folder / "plain.parquet").read_bytes() + bytes(30_000_000)))
    return sorted(folder.glob("data.*"))


@pytest.mark.slow
def test_a_file_that_unpacks_to_many_times_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "UNCHECKED_BYTES", 2**20)
    found = bombs(tmp_path)
    assert len(found) == 7
    for path in found:
        with pytest.raises(DataError, match=f"{path.name} unpacks to more than"):
            for _ in read_file(path):
                pass


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(("size", "most"), [(10, 512), (2**20, 256), (2**24, 16), (2**26, 4)])
def test_few_rows_are_decoded_at_once_where_a_dictionary_makes_them_large(tmp_path, codec, size, most):
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array(["p" * size]))})
    pq.write_table(table, tmp_path / "x.parquet", compression=codec, store_schema=False)
    with (tmp_path / "x.parquet").open("rb") as binary:
        rows = unpacking.rows_a_batch(pq.ParquetFile(binary), binary, 512)
    assert most / 2 < rows <= most


def test_a_full_disk_is_named(tmp_path):
    pq.write_table(pa.table({"prompt": [str(number) for number in range(9999)]}), tmp_path / "x.parquet")
    (tmp_path / "data.parquet.gz").write_bytes(gzip.compress((tmp_path / "x.parquet").read_bytes()))
    with largest_file(4096), pytest.raises(DataError, match=r"does not fit into .* TMPDIR"):
        list(read_file(tmp_path / "data.parquet.gz"))


def test_a_file_that_repeats_itself_is_read_where_it_is_small(tmp_path):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(LINE * 1000))
    assert sum(1 for _ in read_file(tmp_path / "data.jsonl.gz")) == 1000


READ = """
import sys, resource
from pathlib import Path
from rmcore.core.errors import DataError
from rmcore.data.readers.files import read_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    list(read_file(Path(sys.argv[1])))
except DataError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.csv", "data.json", "data.jsonl"])
def test_a_line_without_an_end_takes_bounded_memory(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'["' if name == "data.json" else b"prompt")
        file.truncate(2**30)
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 700_000  # KiB; the whole file would be a million at least
