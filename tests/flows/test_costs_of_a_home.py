"""What lists, explains and compares runs reads each record and each manifest once at most, however many runs there are.

Files that are opened are counted, and calls of functions: not seconds.
"""

import json
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import report_sample
from flows import cli
from rmcore.core import files
from rmcore.core.manifests import MANIFEST, make_key
from rmcore.core.store import Store
from rmcore.data.readers.sources import source_digest
from rmcore.reporting.runs import RECORD

FEW, MANY = 20, 80
STAGES = ("prepare", "train", "evaluate")
_opened: list[Counter[str]] = []


def _hear(event, arguments):
    if _opened and event == "open" and isinstance(arguments[0], str | bytes):
        _opened[-1][Path(str(arguments[0])).name] += 1


sys.addaudithook(_hear)  # stays until the process ends, and counts only within `counted`


@contextmanager
def counted():
    """The names of all files that are opened in the block, with how often."""
    _opened.append(Counter())
    try:
        yield _opened[-1]
    finally:
        _opened.pop()


def grown(home, number):
    """A home with so many runs of the pipeline, each with artifacts of its own; their names."""
    store = Store(home / "store")
    names = []
    for index in range(number):
        keys = {}
        for stage in STAGES:
            inputs = {"config": {"lr": index}, "code": {"module": "digest"}, "stage": stage}
            with store.publish(stage, "mine", inputs, outcome=("*.txt",)) as out:
                (out / "model.txt").write_text("x")
            keys[stage] = make_key(inputs)
        names.append(f"mine-seed0-{make_key({'run': index})[:12]}")
        folder = home / "reports" / names[-1]
        folder.mkdir(parents=True)
        stages = [
            {"name": stage, "key": key, "path": str(store.find(stage, key)), "wall_seconds": 1.0, "device_seconds": 1.0}
            for stage, key in keys.items()
        ]
        (folder / RECORD).write_text(json.dumps({**report_sample.results(), "stages": stages}))
    return names


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    places = {number: tmp_path_factory.mktemp(f"home{number}") for number in (FEW, MANY)}
    return {place: grown(place, number) for number, place in places.items()}


@pytest.mark.parametrize(
    ("words", "named", "records", "manifests"),
    [
        (["runs"], 0, 1, 0),
        (["runs", "--limit", str(MANY)], 0, 1, 0),
        (["store", "why"], 1, 0, len(STAGES)),
        (["compare"], 2, 0, 0),
        (["verdict"], 1, 0, 0),
        (["store", "ls"], 0, 0, len(STAGES)),
    ],
)
def test_one_more_run_is_read_once_at_most(homes, monkeypatch, words, named, records, manifests):
    read = []
    for home, names in homes.items():
        monkeypatch.setenv("RM_OPT_HOME", str(home))
        with counted() as opened:
            done = CliRunner().invoke(cli.app, [*words, *names[:named]], prog_name="rm-opt")
        assert "Traceback" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        read.append(opened)
    few, many = read
    for file, growth in ((RECORD, records), (MANIFEST, manifests)):
        assert many[file] - few[file] == growth * (MANY - FEW), file


def test_what_a_folder_of_shards_is_known_by_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv(files.DIGESTS_VARIABLE, str(tmp_path / "digests.jsonl"))
    monkeypatch.setattr(files, "REMEMBERED_FROM", 2 * files.ENDS)
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))
    for number in (FEW, MANY):
        shards = tmp_path / f"shards{number}"
        shards.mkdir()
        for index in range(number):
            (shards / f"{index}.jsonl").write_bytes(b"%d" % index * 2 * files.ENDS)
        first = source_digest(str(shards))
        with counted() as opened:
            assert source_digest(str(shards)) == first
        assert opened["digests.jsonl"] == 1
