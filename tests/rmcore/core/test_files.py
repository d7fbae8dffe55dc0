"""Files and folders that are there whole or as they were before."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machine import largest_file
from rmcore.core import files
from rmcore.core.files import (
    append_json_lines,
    atomic_file,
    atomic_folder,
    exclusive,
    read_json_lines,
    write_json,
    write_json_lines,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_who_has_a_lock_has_it_alone(tmp_path):
    with exclusive(tmp_path / "lock"), (tmp_path / "lock").open("a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_record_that_does_not_fit_the_disk_leaves_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"step": 1})
    with largest_file(4096), pytest.raises(OSError, match="too large"):
        write_json(path, {"step": 2, "text": 9000 * "x"})
    assert json.loads(path.read_text()) == {"step": 1}
    assert names(tmp_path) == ["record.json"]


@pytest.mark.slow
def test_writers_of_one_file_have_paths_of_their_own_and_each_one_writes_it_whole(tmp_path):
    """Four processes write one file and one folder 50 times each; every reader finds one writer's text, whole."""
    script = (
        "import sys; from pathlib import Path; from rmcore.core.files import atomic_folder, write_text\n"
        "place, text = Path(sys.argv[1]), sys.argv[2] * 20_000\n"
        "for _ in range(50):\n"
        "    write_text(place / 'report.html', text, durable=False)\n"
        "    with atomic_folder(place / 'best', replace=True) as folder:\n"
        "        (folder / 'one').write_text(text), (folder / 'two').write_text(text)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, tmp_path, letter]) for letter in "abcd"]
    try:
        while any(writer.poll() is None for writer in writers):
            with contextlib.suppress(FileNotFoundError):
                text = (tmp_path / "report.html").read_text()
                assert text == text[0] * 20_000
    finally:
        for writer in writers:
            writer.kill()
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    assert len({(tmp_path / "best" / name).read_text() for name in ("one", "two")}) == 1
    assert names(tmp_path) == ["best", "report.html"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_goes_with_the_next_one_and_what_a_living_one_writes_stays(tmp_path, kind):
    begin = {"file": "atomic_file(place)", "folder": "atomic_folder(place)"}[kind]
    script = (
        "import sys; from pathlib import Path; from rmcore.core.files import atomic_file, atomic_folder\n"
        f"place = Path(sys.argv[1])\nwith {begin} as own: print(own.name, flush=True); sys.stdin.read()"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, tmp_path / "best"], stdin=-1, stdout=-1, text=True)
    own = writer.stdout.readline().strip()
    try:
        assert names(tmp_path) == [own]
        with atomic_file(tmp_path / "best") as other:
            assert names(tmp_path) == sorted([own, other.name])
    finally:
        writer.kill()
        writer.communicate()
    (tmp_path / ".another.0123456789abcdef.tmp").touch()
    write_text(tmp_path / "best", "text")
    assert names(tmp_path) == [".another.0123456789abcdef.tmp", "best"]


def test_a_link_under_a_hidden_name_is_never_written_through(tmp_path, monkeypatch):
    """Another user who guesses the name and puts a link there first gains nothing, and the file is written."""
    guesses = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: next(guesses))
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / f".report.{'0' * 16}.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "report", "text")
    write_text(tmp_path / "report", "text")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "report").read_text()) == ("untouched", "text")


def test_a_name_as_long_as_a_file_system_takes_can_be_written(tmp_path):
    for name in ("n" * 255, "\u4e2d" * 85):
        write_text(tmp_path / name, name)
        assert (tmp_path / name).read_text() == name


def test_a_secret_has_its_permissions_whatever_a_killed_writer_left(tmp_path):
    (tmp_path / ".secret.tmp").write_text("half")
    (tmp_path / ".secret.tmp").chmod(0o666)
    with atomic_file(tmp_path / "secret", mode=0o600) as unfinished:
        assert stat.S_IMODE(unfinished.stat().st_mode) == 0o600
    write_text(tmp_path / "secret", "longer than before", mode=0o600)
    assert (tmp_path / "secret").read_text() == "longer than before"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize(("durable", "synced"), [(True, ["file", "", "folder"]), (False, [""])])
def test_a_durable_file_is_on_disk_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch, durable, synced):
    told, fsync, replace = [], os.fsync, os.replace

    def note_sync(descriptor):
        told.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_name(*paths):
        told.append("")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_name)
    write_text(tmp_path / "a", "text", durable=durable)
    assert told == synced


def test_a_folder_with_files_is_replaced_only_where_that_was_asked_for(tmp_path):
    place = tmp_path / "best"
    for text in ("one", "two"):
        (tmp_path / ".best.tmp").mkdir()  # of a writer that was killed
        (tmp_path / ".best.tmp" / "half").touch()
        with atomic_folder(place, replace=True) as unfinished:
            (unfinished / "weights").write_text(text)
        assert (place / "weights").read_text() == text
        assert names(place) == ["weights"]
    with pytest.raises(OSError, match="not empty"), atomic_folder(place) as unfinished:
        (unfinished / "weights").write_text("three")
    assert (place / "weights").read_text() == "two"
    assert names(tmp_path) == ["best"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_that_cannot_take_the_place_of_another_leaves_that_one_there(tmp_path, monkeypatch, failing):
    place, rename, calls = tmp_path / "best", Path.rename, []
    with atomic_folder(place) as first:
        (first / "weights").write_text("first")

    def fail_once(path, target):
        calls.append(path.name)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"), atomic_folder(place, replace=True) as second:
        (second / "weights").write_text("second")
    assert (place / "weights").read_text() == "first"
    assert names(tmp_path) == ["best"]


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file whose digest is worth remembering, old enough for it."""
    monkeypatch.setenv(files.DIGESTS_VARIABLE, str(tmp_path / "digests.jsonl"))
    monkeypatch.setattr(files, "SETTLED_NS", -1)
    path = tmp_path / "weights"
    path.write_bytes(b"w" * files.REMEMBERED_FROM)
    return path


def count_reads(monkeypatch):
    reads, original = [], files.file_digest

    def counted(path):
        reads.append(path)
        return original(path)

    monkeypatch.setattr(files, "file_digest", counted)
    return reads


@pytest.mark.parametrize("memory", ["a file that is named", "the user's cache"])
def test_a_large_file_is_read_once_for_all_its_names_and_a_copy_is_read(large, monkeypatch, memory):
    if memory == "the user's cache":
        monkeypatch.delenv(files.DIGESTS_VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(large.parent / "cache"))
    reads = count_reads(monkeypatch)
    first = files.known_digest(large)
    os.link(large, large.with_name("linked"))
    shutil.copy2(large, large.with_name("copied"))  # with its times: bytes may be lost on the way
    assert files.known_digest(large.with_name("linked")) == files.known_digest(large) == first
    assert len(reads) == 2
    assert files.known_digest(large.with_name("copied")) == first
    assert len(reads) == 3


@pytest.mark.parametrize("how", ["in place", "another file of that name"])
@given(at=st.integers(0, 2**20 - 1), byte=st.sampled_from(b"abc"))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_content_of_the_same_size_and_time_is_seen(large, how, at, byte):
    before = large.stat()
    files.known_digest(large)
    if how != "in place":
        large.unlink()
        large.write_bytes(b"w" * files.REMEMBERED_FROM)
    with large.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.known_digest(large) == files.file_digest(large)


@pytest.mark.parametrize("case", ["just written", "small", "nowhere to remember"])
def test_what_cannot_be_remembered_is_read_again(large, monkeypatch, case):
    reads = count_reads(monkeypatch)
    if case == "just written":
        monkeypatch.setattr(files, "SETTLED_NS", 3600 * 10**9)
    elif case == "small":
        large.write_bytes(b"w")
    elif case == "nowhere to remember":
        monkeypatch.setenv(files.DIGESTS_VARIABLE, os.devnull)
    for _ in range(2):
        files.known_digest(large)
    assert len(reads) == 2


def test_a_pipe_that_a_user_names_is_written_to_and_stays_a_pipe():
    read_end, write_end = os.pipe()
    write_json(Path(f"/dev/fd/{write_end}"), {"step": 1})
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        assert json.loads(pipe.read()) == {"step": 1}


@pytest.mark.parametrize(
    "line", ["[1]", "7", "null", '"text"', "{", "[" * 20_000, '{"path": "PATH", "size": 8, "inode": "x"}']
)
def test_a_damaged_memory_of_digests_costs_one_more_read(large, line):
    memory, digest = large.with_name("digests.jsonl"), hashlib.sha256(large.read_bytes()).hexdigest()
    memory.write_text(line.replace("PATH", str(large.resolve())) + "\n")
    assert files.known_digest(large) == files.known_digest(large) == digest
    assert json.loads(memory.read_text().splitlines()[-1])["sha256"] == digest


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\r\n")))
)
def test_lines_of_json_end_at_line_breaks_alone(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    rows = [{"text": text} for text in texts]
    write_json_lines(path, rows)
    append_json_lines(path, rows)
    assert read_json_lines(path) == [*rows, *rows]
    with path.open("ab") as file:
        file.write(b'{"text": "cut')
    assert read_json_lines(path) == [*rows, *rows]
