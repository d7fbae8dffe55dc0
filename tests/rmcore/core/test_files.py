"""Files that are there whole or as they were before."""

import json
import os
import resource

import pytest

from rmcore.core import files
from rmcore.core.files import write_json


def test_a_record_that_does_not_fit_the_disk_leaves_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_json(path, {"step": 2, "text": 9000 * "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_text()) == {"step": 1}


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file whose digest is worth remembering, old enough for it."""
    monkeypatch.setenv(files.DIGESTS_VARIABLE, str(tmp_path / "digests.jsonl"))
    path = tmp_path / "weights"
    path.write_bytes(b"w" * files.REMEMBERED_FROM)
    os.utime(path, ns=(1, 1))
    return path


def count_reads(monkeypatch):
    reads, original = [], files.file_digest

    def counted(path):
        reads.append(path)
        return original(path)

    monkeypatch.setattr(files, "file_digest", counted)
    return reads


def test_a_large_file_is_read_once_until_it_changes(large, monkeypatch):
    reads = count_reads(monkeypatch)
    first = files.known_digest(large)
    assert files.known_digest(large) == first
    assert len(reads) == 1
    large.write_bytes(b"x" + large.read_bytes()[1:])
    os.utime(large, ns=(2, 2))
    assert files.known_digest(large) != first
    assert len(reads) == 2


@pytest.mark.parametrize("case", ["just written", "small", "nowhere to remember", "damaged memory"])
def test_what_cannot_be_remembered_is_read_again(large, monkeypatch, case):
    reads = count_reads(monkeypatch)
    if case == "just written":
        os.utime(large)
    elif case == "small":
        large.write_bytes(b"w")
        os.utime(large, ns=(1, 1))
    elif case == "nowhere to remember":
        monkeypatch.delenv(files.DIGESTS_VARIABLE)
    for _ in range(2):
        files.known_digest(large)
        if case == "damaged memory":
            (large.parent / "digests.jsonl").write_text("{\n")
    assert len(reads) == 2
