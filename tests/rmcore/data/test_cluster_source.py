"""`ray:` sources: what the files give one after the other, whoever parses them, and refusals in words."""

import gzip
import json
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rmcore.config.data import DataConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.object_store import ObjectStore
from rmcore.core.ray_cluster import RayCluster
from rmcore.data.readers.cluster import cluster_digest
from rmcore.data.readers.sources import load_pairs, source_digest
from rmcore.data.table import write_pairs
from rmcore.stages.prepare import prepare
from s3_server import make_bucket, s3_environment, s3_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gold_pairs):
    """Rows of one layout in files of three forms, one of which has a line that is none."""
    place = tmp_path_factory.mktemp("files")
    lines = [
        json.dumps({"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected}) for one in gold_pairs[:40]
    ]
    (place / "a.jsonl").write_text("\n".join([*lines[:12], "not JSON", *lines[12:15]]) + "\n")
    (place / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[15:30]).encode()))
    (place / "c.jsonl").write_text("\n".join(lines[30:]))
    (place / "README.md").write_text("no data")
    return place


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The same rows in one file."""
    texts = [(folder / name).read_text().rstrip("\n") for name in ("a.jsonl", "c.jsonl")]
    middle = gzip.decompress((folder / "b.jsonl.gz").read_bytes()).decode()
    path = tmp_path_factory.mktemp("whole") / "all.jsonl"
    path.write_text("\n".join([texts[0], middle, texts[1]]))
    return path


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this machine with an object store that its processes may read."""
    if find_spec("ray") is None or find_spec("moto") is None:
        assert os.environ.get("CI") != "true", "CI installs Ray and moto"
        pytest.skip("Ray or moto is not installed (rm-optimizer[cluster], moto)")
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in s3_environment(url).items():
            patch.setenv(name, value)
        make_bucket(url, "pairs")
        with TemporaryDirectory(prefix="ray") as folder:  # a short name: sockets lie below
            patch.setenv("RAY_TMPDIR", folder)
            left = Path(folder) / "ray"
            left.mkdir()
            (left / "ray_current_cluster").write_text("127.0.0.2:1")  # by a cluster that was killed
            with RayCluster("a test") as found:
                yield found


@pytest.mark.services
def test_files_are_read_in_order_wherever_they_lie(cluster, folder, whole):
    expected = load_pairs(str(whole))
    store = ObjectStore("s3://pairs/mine")
    for path in folder.iterdir():
        store.write(path.name, path)
    for source in (f"ray:{folder}", f"ray:{folder}/*", "ray:s3://pairs/mine", "ray:s3://pairs/mine/*.json*"):
        found = load_pairs(source)
        assert found.pairs == expected.pairs
        assert (found.num_rows, found.layout) == (expected.num_rows, expected.layout)
        assert [(row.row, row.reason) for row in found.rejected] == [(13, "not valid JSON")]
    assert load_pairs(f"ray:{folder}/[bc]*", limit=20).pairs == expected.pairs[15:35]
    assert load_pairs("ray:s3://pairs/mine/c.jsonl").pairs == expected.pairs[30:]
    store.write("old/x.jsonl", folder / "a.jsonl")  # of another folder
    assert load_pairs("ray:s3://pairs/mine/*.jsonl").num_rows == 16 + 10
    before = source_digest("ray:s3://pairs/mine")
    assert source_digest("ray:s3://pairs/mine") == before
    store.write("d.jsonl", b"{}")
    assert source_digest("ray:s3://pairs/mine") != before


@pytest.mark.services
def test_a_file_that_cannot_be_read_is_named_and_so_is_a_busy_cluster(cluster, folder, tmp_path, gold_pairs):
    write_pairs(gold_pairs[:5], tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        load_pairs(f"ray:{tmp_path}")
    row = {"prompt": "p", "chosen": "chos\u00e9n", "rejected": "r"}
    lines = "".join(json.dumps(row | {"prompt": f"p{at}"}, ensure_ascii=False) + "\n" for at in range(9))
    (tmp_path / "latin.jsonl").write_bytes(lines.encode("latin-1"))
    with pytest.raises(DataError, match=r"is not UTF-8: 9 of 9 rows hold other bytes.*Convert the files"):
        load_pairs(f"ray:{tmp_path}/latin.jsonl")
    ray = cluster.ray

    class Holder:
        pass

    held = ray.remote(num_cpus=cluster.room(1, 0))(Holder).remote()
    ray.get(held.__ray_ready__.remote())
    with pytest.raises(ConfigError, match=r"no core of it is free, so that it would wait for ever"):
        load_pairs(f"ray:{folder}")
    ray.kill(held)


@pytest.mark.slow
def test_the_digest_is_that_of_the_files_that_are_read(folder, tmp_path):
    before = cluster_digest(f"ray:{folder}")
    (folder / "README.md").write_text("other words")
    assert cluster_digest(f"ray:{folder}/*") == before != cluster_digest(f"ray:{folder}/*.gz")
    with pytest.raises(ConfigError, match="a file has none, so the test pairs would be the training pairs"):
        prepare(DataConfig(source=f"ray:{folder}", eval_split="test"), seed=0)
    with pytest.raises(DataError, match=r"none of 0 at .* fits \*\.csv"):
        cluster_digest(f"ray:{tmp_path}/*.csv")


@pytest.mark.parametrize("name", ["x.arrow", "x.xlsx", "x.parquet.gz"])
def test_a_file_of_data_that_is_not_read_is_refused_and_not_left_out(tmp_path, name):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    for source in (f"ray:{tmp_path}", f"ray:{tmp_path}/{name}", f"ray:{tmp_path}/x*"):
        with pytest.raises(DataError, match=f"{name} has the extension .* which is not read"):
            cluster_digest(source)
