"""Artifacts that machines share: one commit each, nothing half seen, named refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from machine import PATIENCE_S
from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.manifests import make_key, with_self_digest
from rmcore.core.shared_store import SharedStore, saved_files
from rmcore.core.store import Store
from s3_server import make_bucket, s3_environment, s3_server

pytest.importorskip("obstore")
OWNER = {"host": "here", "pid": "1"}
INPUTS = {"seed": 0}
KEY = make_key(INPUTS)


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("moto")
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(url).items():
            patch.setenv(name, value)
        make_bucket(url, "artifacts")
        yield "s3://artifacts"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.services)])
def url(request, tmp_path):
    if request.param == "file":
        (tmp_path / "shared").mkdir()
        return f"file://{tmp_path}/shared"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def opened(url):
    """A store; of a folder it is made first."""
    if url.startswith("file:///"):
        Path(url.removeprefix("file://")).mkdir(exist_ok=True)
    return SharedStore(url, OWNER)


def made(folder, content, log="{}"):
    """A home with one artifact."""
    store = Store(folder)
    with store.publish("prepare", "mine seed 0", INPUTS, outcome=("*.txt",)) as out:
        (out / "pairs.txt").write_text(content)
        (out / "deep").mkdir()
        (out / "deep" / "log.json").write_text(log)
    return store


def files(store):
    folder = store.find("prepare", KEY)
    found = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def program(url, code):
    head = (
        "import os, signal, sys, threading, time\nfrom pathlib import Path\n"
        "from rmcore.core.shared_store import SharedStore\nfrom rmcore.core.store import Store\n"
        f"url = {url!r}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_one_home_pushes_another_pulls_whole(url, tmp_path):
    first, second, shared = made(tmp_path / "a", "ours"), Store(tmp_path / "b"), opened(url)
    assert not shared.pull(second, "prepare", KEY)
    assert shared.push(first, "prepare", KEY)
    assert shared.pull(second, "prepare", KEY)
    assert second.status("prepare", KEY).state == "valid"
    assert second.ref("prepare", KEY).digest == first.ref("prepare", KEY).digest
    assert Path(second.ref("prepare", KEY).path).name == Path(first.ref("prepare", KEY).path).name
    assert files(second) == files(first)
    assert list(second.verify()) == [(second.find("prepare", KEY), None)]


def test_the_second_to_commit_takes_the_bytes_of_the_first(url, tmp_path):
    """Both computed the same key, and a log or a sum in another order differs: downstream all read one of them."""
    first, second, shared = made(tmp_path / "a", "first"), made(tmp_path / "b", "second"), opened(url)
    assert shared.push(first, "prepare", KEY)
    assert not shared.push(second, "prepare", KEY)
    assert second.status("prepare", KEY).state == "valid"
    assert files(second) == files(first)
    assert shared.push(first, "prepare", KEY)  # its own, again: nothing changes
    assert files(first) == files(second)


@pytest.mark.slow
def test_of_processes_that_race_one_wins_each_time(url):
    rounds, num_processes = 100, 8
    code = (
        "mine, shared = str(os.getpid()), SharedStore(url, {})\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        f"print(*[n for n in range({rounds}) if shared.register(f'race/{{n}}.json', mine.encode()) == mine.encode()])"
    )
    racers = [program(url, code) for _ in range(num_processes)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = Counter(int(number) for racer in racers for number in racer.communicate(timeout=PATIENCE_S)[0].split())
    assert won == dict.fromkeys(range(rounds), 1)


def test_an_uploader_that_is_killed_leaves_nothing_that_is_seen(url, tmp_path):
    store = made(tmp_path / "a", "ours")
    code = (
        "def create(place, content):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "shared = SharedStore(url, {})\n"
        "shared.objects.create = create\n"
        f"shared.push(Store(Path({str(store.root)!r})), 'prepare', {KEY!r})"
    )
    uploader = program(url, code)
    assert uploader.wait(PATIENCE_S) == -signal.SIGKILL
    shared = opened(url)
    assert shared.objects.list("blobs/")  # it had come so far
    assert shared.find("prepare", KEY) is None
    assert not shared.pull(Store(tmp_path / "b"), "prepare", KEY)
    assert shared.push(store, "prepare", KEY)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_an_artifact_whose_blob_is_damaged_is_not_taken_and_can_be_committed_again(url, tmp_path, damage):
    first, second, shared = made(tmp_path / "a", "ours"), Store(tmp_path / "b"), opened(url)
    shared.push(first, "prepare", KEY)
    blob = "blobs/" + first.manifest("prepare", KEY)["files"]["pairs.txt"]["sha256"]
    if damage == "gone":
        shared.objects.delete(blob)
    else:
        shared.objects.write(blob, b"something else")
    assert not shared.pull(second, "prepare", KEY)
    assert second.status("prepare", KEY).state == "missing"
    assert shared.push(first, "prepare", KEY)
    assert shared.pull(second, "prepare", KEY)


def older(folder, days):
    for blob in (folder / "blobs").iterdir():
        os.utime(blob, (time.time() - days * 86400,) * 2)


def test_a_rule_that_removes_old_blobs_takes_none_of_an_artifact_that_was_pushed_since(tmp_path):
    """Two artifacts hold files of the same content, such as a tokenizer."""
    shared, folder = opened(f"file://{tmp_path}/shared"), tmp_path / "shared"
    shared.push(made(tmp_path / "a", "ours"), "prepare", KEY)
    older(folder, 29)
    store, inputs = Store(tmp_path / "b"), {"seed": 1}
    with store.publish("prepare", "mine seed 1", inputs, outcome=("*.txt",)) as out:
        (out / "pairs.txt").write_text("other pairs")
        (out / "log.json").write_text("{}")
    shared.push(store, "prepare", make_key(inputs))
    for blob in (folder / "blobs").iterdir():
        if time.time() - blob.stat().st_mtime > 28 * 86400:
            blob.unlink()
    assert shared.pull(Store(tmp_path / "c"), "prepare", make_key(inputs))
    assert not shared.pull(Store(tmp_path / "c"), "prepare", KEY)


@pytest.mark.parametrize("lost", ["pairs.txt", "deep/log.json"])
def test_the_machine_that_has_an_artifact_sends_what_a_rule_removed_of_it(tmp_path, lost):
    """Also where the files that are no outcome are its own, and those of the first commit are gone."""
    shared = opened(f"file://{tmp_path}/shared")
    store, other = made(tmp_path / "a", "ours"), made(tmp_path / "b", "ours", log='{"took": 2}')
    shared.push(store, "prepare", KEY)
    shared.objects.delete("blobs/" + store.manifest("prepare", KEY)["files"][lost]["sha256"])
    assert [(entry.key, is_committed) for entry, is_committed in shared.push_all(other)] == [(KEY, True)]
    assert list(shared.push_all(other)) == list(shared.push_all(store)) == []
    assert shared.pull(taken := Store(tmp_path / "c"), "prepare", KEY)
    assert taken.ref("prepare", KEY).digest == store.ref("prepare", KEY).digest


def test_a_name_that_leaves_the_artifact_is_not_written(tmp_path):
    store, shared = made(tmp_path / "a", "ours"), opened(f"file://{tmp_path}/shared")
    shared.push(store, "prepare", KEY)
    with pytest.raises(StoreError, match="outside"):
        shared._download({"../../outside.txt": store.manifest("prepare", KEY)["files"]["pairs.txt"]}, tmp_path / "b")
    assert not (tmp_path.parent / "outside.txt").exists()


KEPT = ("resume", "drawn.jsonl", "metrics.jsonl")


def saved(home, step, text):
    """A stage's folder in a home, as it lies there before it has a name, with something saved."""
    out = Store(home).unfinished("train", KEY)
    (out / "resume" / f"step_{step}").mkdir(parents=True)
    (out / "resume" / ".half.tmp").mkdir(exist_ok=True)
    (out / "resume" / ".half.tmp" / "state.pt").write_text("half")
    (out / "resume" / f"step_{step}" / "state.pt").write_text(text)
    (out / "drawn.jsonl").write_text(f'{{"drawn": {step}}}\n')
    (out / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    return out


def content(out):
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}


def test_what_a_stage_has_saved_goes_on_elsewhere_and_the_last_to_save_is_believed(url, tmp_path):
    first, second = SharedStore(url, {"host": "a"}), SharedStore(url, {"host": "b"})
    here, there = saved(tmp_path / "a", 5, "five"), Store(tmp_path / "b").unfinished("train", KEY)
    there.mkdir(parents=True)
    assert not second.take_state("train", KEY, there, KEPT)
    first.keep_state("train", KEY, here, KEPT)
    assert second.take_state("train", KEY, there, KEPT)
    assert content(there) == {name: text for name, text in content(here).items() if "half" not in name}
    assert not first.take_state("train", KEY, here, KEPT)  # its own: what lies here is as new, or newer

    (there / "resume" / "step_5").rename(there / "resume" / "step_9")
    (there / "resume" / "step_9" / "state.pt").write_text("nine")
    second.keep_state("train", KEY, there, KEPT)
    assert first.take_state("train", KEY, here, KEPT)
    assert content(here) == content(there)
    assert len(first.objects.list(f"states/train/{KEY}/")) == 3  # those of step 5 have gone


@pytest.mark.parametrize("gone", ["step_5", "checkpoints"])
def test_a_state_that_is_removed_while_it_is_listed_is_left_out(tmp_path, monkeypatch, gone):
    """As a training does that saves the next one meanwhile; the rest is kept."""
    out, scan = saved(tmp_path, 5, "five"), os.scandir
    (out / "resume" / "step_5" / "checkpoints" / "best").mkdir(parents=True)
    (out / "resume" / "step_9").mkdir()
    (out / "resume" / "step_9" / "state.pt").write_text("nine")

    def removed_before_it_is_read(place="."):
        if Path(place).name == gone:
            monkeypatch.setattr(os, "scandir", scan)
            shutil.rmtree(place)
        return scan(place)

    monkeypatch.setattr(os, "scandir", removed_before_it_is_read)
    left = {str(path.relative_to(out)) for path in saved_files(out, KEPT)}
    assert left - {"resume/step_5/state.pt"} == {"resume/step_9/state.pt", "drawn.jsonl", "metrics.jsonl"}
    assert os.scandir is scan


def test_states_that_are_not_all_there_leave_what_lies_here_alone(url, tmp_path):
    shared = opened(url)
    shared.keep_state("train", KEY, saved(tmp_path / "a", 9, "nine"), KEPT)
    shared.objects.delete(shared.objects.list(f"states/train/{KEY}/")[0])
    here = saved(tmp_path / "b", 5, "five")
    before = content(here)
    assert not SharedStore(url, {"host": "b"}).take_state("train", KEY, here, KEPT)
    assert content(here) == before
    assert [path.name for path in here.parent.iterdir()] == [here.name]


def test_a_store_that_lets_two_create_the_same_is_refused_by_name(tmp_path, monkeypatch):
    import obstore

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, place, content, **given: put(store, place, content))
    with pytest.raises(StoreError, match="lets two writers create the same object"):
        opened(f"file://{tmp_path}/shared")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x/y", "begins with s3://"),
        ("shared", "begins with s3://"),
        ("file://nas/x", "names no folder"),
        ("file:///nowhere/x", "names no folder"),
    ],
)
def test_an_address_of_something_else_is_refused(url, words):
    with pytest.raises(ConfigError, match=words):
        SharedStore(url, OWNER)


@pytest.mark.services
def test_a_bucket_that_is_not_there_is_named(s3):
    with pytest.raises(StoreError, match=r"s3://elsewhere/x is not there: no such bucket"):
        opened("s3://elsewhere/x")


def test_a_store_that_is_away_is_named(monkeypatch):
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"s3://artifacts does not answer(.|\n)*continues when it is back"):
        opened("s3://artifacts")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_named(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="rights"):
        opened(f"file://{tmp_path}/shared")


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"files": 1', b"[" * 100_000, b'{"files": [1]}', b'{"files": null}'])
def test_a_state_that_is_not_what_was_written_is_refused_by_its_name(tmp_path, damage):
    shared = opened(f"file://{tmp_path}/shared")
    shared.objects.write(f"states/train/{KEY}.json", damage)
    here = saved(tmp_path / "a", 5, "five")
    before = content(here)
    with pytest.raises(StoreError, match=rf"states/train/{KEY}\.json is not what was written"):
        shared.take_state("train", KEY, here, KEPT)
    assert content(here) == before
    assert [path.name for path in here.parent.iterdir()] == [here.name]


def test_of_two_outcomes_of_one_key_both_are_kept_where_all_is_pushed(tmp_path):
    shared, other = opened(f"file://{tmp_path}/shared"), made(tmp_path / "b", "another outcome")
    assert [is_committed for _, is_committed in shared.push_all(made(tmp_path / "a", "ours"))] == [True]
    before = files(other)
    assert [(entry.key, is_committed) for entry, is_committed in shared.push_all(other)] == [(KEY, False)]
    assert files(other) == before


def test_an_address_with_credentials_in_it_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="holds credentials") as refused:
        opened("s3://AKIAEXAMPLE:topsecret@artifacts/x")
    assert "topsecret" not in str(refused.value)


def test_a_manifest_that_was_changed_is_refused(url, tmp_path):
    shared, store = opened(url), made(tmp_path / "a", "ours")
    shared.push(store, "prepare", KEY)
    place = f"manifests/prepare/{KEY}.json"
    record = json.loads(shared.objects.read(place))
    sealed = [with_self_digest(record["manifest"] | change) for change in ({"key": None}, {"files": ["pairs.txt"]})]
    changed = (record["manifest"] | {"digest": "0" * 64}, [1], {}, *sealed, with_self_digest({}))
    for damage in ({}, record | {"name": 1}, *(record | {"manifest": manifest} for manifest in changed)):
        shared.objects.write(place, json.dumps(damage).encode())
        with pytest.raises(StoreError, match=f"{KEY}.json is not what was written"):
            shared.pull(Store(tmp_path / "b"), "prepare", KEY)
    shared.objects.write(place, b'{"manifest": ' * 100_000)
    with pytest.raises(StoreError, match=f"{KEY}.json is not what was written"):
        shared.pull(Store(tmp_path / "b"), "prepare", KEY)
