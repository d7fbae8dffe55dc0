import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import StoreError
from rmcore.core.files import file_digest
from rmcore.core.manifests import MANIFEST, SEAL, TIMES, canonical_json, make_key, with_self_digest
from rmcore.core.store import LEASES, UNFINISHED, Store, explain

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=6,
)


def publish(store, inputs, content="x", outcome=("*.txt",)):
    with store.publish("train", "tiny gold/seed", inputs, outcome=outcome) as out:
        (out / "model.txt").write_text(content)
        (out / "log.json").write_text(str(os.urandom(4)))
    return make_key(inputs)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_key_does_not_depend_on_the_order_of_names(inputs):
    reversed_order = dict(reversed(list(inputs.items())))
    assert make_key(inputs) == make_key(reversed_order) == make_key(json.loads(canonical_json(inputs)))


def test_an_artifact_is_found_verified_and_readable_by_name(store):
    key = publish(store, {"lr": 1})
    assert store.status("train", key).state == "valid"
    ref = store.ref("train", key)
    assert ref.path.endswith(f"tiny-gold-seed-{key[:12]}")
    assert not list((store.root / ".wip").iterdir())


def test_the_digest_is_of_the_outcome_and_not_of_logs(store):
    first = store.ref("train", publish(store, {"lr": 1})).digest
    same = store.ref("train", publish(store, {"lr": 2})).digest
    other = store.ref("train", publish(store, {"lr": 3}, content="y")).digest
    assert first == same != other


def flip(path):
    """Change one byte and leave size and modification time as they were."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def changed(change):
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


HARMS = {
    "deleted": ("model.txt", Path.unlink),
    "another text": ("model.txt", lambda path: path.write_text("y")),
    "longer": ("model.txt", lambda path: path.write_text("{}")),
    "one bit under its old time": ("model.txt", flip),
    "no manifest": (MANIFEST, Path.unlink),
    "no object": (MANIFEST, lambda path: path.write_text("[]")),
    "no UTF-8": (MANIFEST, lambda path: path.write_bytes(b"\xff")),
    "nested": (MANIFEST, lambda path: path.write_text('{"files": ' * 20_000)),
    "other inputs": (MANIFEST, changed(lambda manifest: manifest | {"inputs": {"lr": 1, "beta": 2}})),
    "not finite": (MANIFEST, changed(lambda manifest: manifest | {"inputs": {"lr": float("nan")}})),
    "a file less": (MANIFEST, changed(lambda manifest: manifest["files"].pop("model.txt") and manifest)),
    "no seal": (MANIFEST, changed(lambda manifest: manifest.pop(SEAL) and manifest)),
    "no key": (MANIFEST, changed(lambda manifest: with_self_digest(manifest.pop("key") and manifest))),
    "a list of files": (MANIFEST, changed(lambda manifest: with_self_digest(manifest | {"files": ["model.txt"]}))),
    "no size": (MANIFEST, changed(lambda manifest: with_self_digest(manifest | {"files": {"model.txt": {}}}))),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_seen_and_named_and_mended_by_publishing_again(store, harm):
    key, whole = publish(store, {"lr": 1}), publish(store, {"lr": 2})
    name, do = HARMS[harm]
    target = store.find("train", key) / name
    do(target)
    assert store.status("train", key).state == "corrupt"
    found = dict(store.verify())
    assert str(target) in found.pop(target.parent)
    assert found == {store.find("train", whole): None}
    assert store.status("train", key).state == "corrupt"
    assert str(target) in store.status("train", key).damage
    if name == MANIFEST:
        with pytest.raises(StoreError):
            store.ref("train", key)
    publish(store, {"lr": 1})
    assert set(dict(store.verify()).values()) == {None}


def copied(folder):
    copy = shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    copy.rename(folder)


TOUCHED = {
    "nothing": (lambda folder: None, []),
    "the time of a file": (lambda folder: os.utime(folder / "model.txt", ns=(1, 1)), ["model.txt"]),
    "copied": (copied, ["log.json", "model.txt"]),
    "no times": (lambda folder: (folder / TIMES).unlink(), ["log.json", "model.txt"]),
    "times that are cut": (lambda folder: (folder / TIMES).write_text("{"), ["log.json", "model.txt"]),
    "times of another kind": (lambda folder: (folder / TIMES).write_text("[]"), ["log.json", "model.txt"]),
    "times too deep": (lambda folder: (folder / TIMES).write_text("[" * 100_000), ["log.json", "model.txt"]),
}


@pytest.mark.parametrize(("touch", "expected"), TOUCHED.values(), ids=TOUCHED)
def test_files_are_digested_once_and_only_where_their_time_is_not_the_recorded_one(store, monkeypatch, touch, expected):
    key, digested = publish(store, {"lr": 1}), []
    touch(store.find("train", key))
    monkeypatch.setattr(
        "rmcore.core.manifests.file_digest", lambda path: digested.append(path.name) or file_digest(path)
    )
    assert [store.status("train", key).state for _ in range(2)] == ["valid", "valid"]
    assert sorted(digested) == expected


def test_verifying_leaves_out_what_is_being_made(store):
    verified, made = store.find("train", publish(store, {"lr": 1})), publish(store, {"lr": 2})
    with store.lock(made):
        assert list(Store(store.root).verify()) == [(verified, None)]


def test_a_stage_that_fails_leaves_nothing(store):
    def run_out_of_space():
        with store.publish("train", "t", {"lr": 1}, outcome=("*",)) as out:
            (out / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_out_of_space()
    assert store.find("train", make_key({"lr": 1})) is None
    assert not list((store.root / ".wip").iterdir())


def test_a_stage_that_writes_no_outcome_is_refused(store):
    with pytest.raises(StoreError, match="without writing any of"):
        publish(store, {"lr": 1}, outcome=("*.parquet",))


def test_why_names_the_fields_that_differ_from_the_nearest_earlier_artifact(store):
    first = publish(store, {"config": {"lr": 1, "beta": 1}, "seed": 0})
    near = publish(store, {"config": {"lr": 2, "beta": 1}, "seed": 0})
    last = publish(store, {"config": {"lr": 2, "beta": 3}, "seed": 0})
    nearest, differing = explain(store, store.resolve(last))
    assert nearest.key == near
    assert differing == {"config.beta": (1, 3)}
    assert explain(store, store.resolve(first)) == (None, {})


def test_garbage_collection_keeps_the_most_recently_used(store):
    keys = [publish(Store(store.root), {"lr": lr}) for lr in range(4)]
    for age, key in enumerate(keys):
        os.utime(store.find("train", key) / MANIFEST, (1000 + age, 1000 + age))
    store.ref("train", keys[0])  # used just now
    removed, in_use, _ = Store(store.root).collect_garbage(keep=2)
    assert {entry.key for entry in removed} == {keys[1], keys[2]}
    assert not in_use
    assert {entry.key for entry in store.entries()} == {keys[0], keys[3]}


READER = """
import sys
from pathlib import Path
from rmcore.core.store import Store
store = Store(Path(sys.argv[1]))
{how}
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how",
    ["store.ref('train', sys.argv[2])", "store.hold(sys.argv[2])", "store.hold_around(sys.argv[3] + '/model.txt')"],
)
def test_garbage_collection_spares_what_another_process_reads_until_that_dies(store, how):
    keys = {publish(Store(store.root), {"lr": lr}) for lr in range(3)}
    read = sorted(keys)[1]
    command = [sys.executable, "-c", READER.format(how=how), store.root, read, store.find("train", read)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "holds\n"
        removed, in_use, _ = store.collect_garbage(keep=0)
        assert [entry.key for entry in in_use] == [read]
        assert {entry.key for entry in removed} == keys - {read}
        assert store.status("train", read).state == "valid"
        reader.kill()
    removed, in_use, _ = store.collect_garbage(keep=0)
    assert ([entry.key for entry in removed], in_use) == ([read], [])
    assert not list((store.root / LEASES).iterdir())


def test_a_store_that_is_no_longer_used_holds_nothing(store):
    key = publish(Store(store.root), {"lr": 1})
    reader = Store(store.root)
    reader.ref("train", key)
    assert [entry.key for entry in store.collect_garbage(keep=0)[1]] == [key]
    del reader
    assert [entry.key for entry in store.collect_garbage(keep=0)[0]] == [key]


def test_an_artifact_that_is_being_made_anew_stays(store):
    key = publish(Store(store.root), {"lr": 1})
    with store.lock(key):
        assert [entry.key for entry in Store(store.root).collect_garbage(keep=0)[1]] == [key]
    (store.find("train", key) / MANIFEST).write_text("{}")
    with store.lock(key), store.publish("train", "t", {"lr": 1}, outcome=("*",)) as out:
        (out / "model.txt").write_text("x")
        Store(store.root).collect_garbage(keep=0)
        assert store.find("train", key)
    assert store.status("train", key).state == "valid"


def test_a_damaged_artifact_is_removed_and_none_of_those_that_garbage_collection_keeps(store):
    old, new = (publish(Store(store.root), {"lr": lr}) for lr in (1, 2))
    damaged = store.find("train", new)
    changed(lambda manifest: manifest | {"wall_seconds": 9})(damaged / MANIFEST)
    assert store.collect_garbage(keep=1) == ([], [], [damaged])
    assert store.find("train", new) is None
    assert store.status("train", old).state == "valid"
    assert not list((store.root / UNFINISHED).iterdir())


def test_an_ambiguous_or_unknown_key_is_refused(store):
    publish(store, {"lr": 1})
    with pytest.raises(StoreError, match="0 artifacts match"):
        store.resolve("zzz")


def test_an_unfinished_folder_is_kept_for_the_next_attempt_and_an_old_manifest_is_not_part_of_it(store):
    inputs = {"stage": "train", "lr": 9}
    out = None

    def cut_off():
        nonlocal out
        with store.publish("train", "t", inputs, outcome=("*",), resumable=True) as out:
            (out / "state").write_text("half")
            (out / "MANIFEST.json").write_text("{}")  # as a kill just before the rename leaves it
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_off()
    with store.publish("train", "t", inputs, outcome=("*",), resumable=True) as again:
        assert again == out
        assert (again / "state").read_text() == "half"
    assert store.status("train", make_key(inputs)).state == "valid"


ATTEMPT = """
import os, signal, sys, time
from pathlib import Path
from rmcore.core.store import Store
with Store(Path(sys.argv[1])).publish("train", "t", {"lr": 9}, outcome=("*",), resumable=True) as out:
    (out / "state").write_text("half")
    now = time.time()
    os.utime(out / "state", (now + 50, now + 50))  # as if it had been written that much later
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_time_of_an_artifact_is_that_of_all_attempts_at_it_of_a_killed_one_up_to_its_last_file(store):
    for _ in range(2):
        command = [sys.executable, "-c", ATTEMPT, store.root]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with suppress(KeyboardInterrupt), store.publish("train", "t", {"lr": 9}, outcome=("*",), resumable=True) as out:
        (out / "state").write_text("more")
        raise KeyboardInterrupt
    with store.publish("train", "t", {"lr": 9}, outcome=("*",), resumable=True):
        pass
    manifest = store.manifest("train", make_key({"lr": 9}))
    assert 100 < manifest["wall_seconds"] < 140
    assert manifest["files"].keys() == {"state"}
    publish(store, {"lr": 8})
    assert store.manifest("train", make_key({"lr": 8}))["wall_seconds"] < 20


@pytest.mark.parametrize("left", [".training.json.0123456789abcdef.tmp", "best/.a.0123456789abcdef.tmp", ".b.tmp/c"])
@pytest.mark.parametrize("writes", [False, True])
def test_what_a_killed_writer_left_is_no_part_of_an_artifact(store, left, writes):
    """Nor is what a living one writes, but that stays."""
    inputs = {"stage": "train", "lr": 9}
    with store.publish("train", "t", inputs, outcome=("**/*",), resumable=True) as out:
        (out / left).parent.mkdir(exist_ok=True)
        (out / left).write_text("half")
        (out / "model.txt").write_text("x")
        temporary = next(path for path in (out / left, (out / left).parent) if path.name.endswith(".tmp"))
        lock = os.open(temporary, os.O_RDONLY)
        if writes:
            fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)
    key = make_key(inputs)
    assert store.manifest("train", key)["files"].keys() == {"model.txt"}
    assert (store.find("train", key) / left).exists() == writes
    assert store.status("train", key).state == "valid"


@pytest.mark.parametrize("name", ["replace", "rename"])
def test_a_finished_stage_that_dies_while_it_is_published_is_published_by_its_next_attempt(store, name):
    """While the times are written, or the folder gets its name."""
    inputs = {"stage": "train", "lr": 9}
    program = (
        "import os, signal, sys; from pathlib import Path; from rmcore.core.store import Store\n"
        f"Path.{name} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"publishing = Store(Path(sys.argv[1])).publish('train', 't', {inputs}, outcome=('*',), resumable=True)\n"
        "with publishing as out: (out / 'model.txt').write_text('x')"
    )
    assert subprocess.run([sys.executable, "-c", program, store.root]).returncode == -signal.SIGKILL
    with store.publish("train", "t", inputs, outcome=("*",), resumable=True) as out:
        assert (out / "model.txt").read_text() == "x"
    assert store.status("train", make_key(inputs)).state == "valid"
    assert store.manifest("train", make_key(inputs))["files"].keys() == {"model.txt"}


def test_an_artifact_whose_successor_cannot_take_its_place_stays(store, monkeypatch):
    key, rename = publish(store, {"lr": 1}), Path.rename

    def fail(path, target):
        if not path.name.startswith(("removed-", "tiny-")):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        publish(store, {"lr": 1}, content="y")
    assert store.status("train", key).state == "valid"
