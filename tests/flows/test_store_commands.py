"""`rm-opt store verify` over a store with and without damage."""

import json
import os

import pytest

from flows.cli import app
from rmcore.core.errors import ConfigError
from rmcore.core.store import Store
from tasks.home import digests_file


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    store = Store(tmp_path / "store")
    for seed in range(2):
        with store.publish("train", f"seed{seed}", {"seed": seed}, outcome=("weights",)) as out:
            (out / "weights").write_text("0.5")
    return store


def verify(capsys):
    with pytest.raises(SystemExit) as left:
        app(["store", "verify"])
    return left.value.code, capsys.readouterr().out


def test_a_whole_store_is_verified_and_digests_of_other_files_are_taken_anew(store, capsys):
    digests_file().write_text("")
    assert verify(capsys) == (0, "2 artifacts verified, 0 damaged\n")
    assert not digests_file().exists()


def test_a_damaged_file_is_named_and_the_exit_status_is_1(store, capsys):
    [file] = store.root.glob("train/seed1-*/weights")
    before = file.stat()
    file.write_text("0.6")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    status, said = verify(capsys)
    assert status == 1
    assert f"damaged: train {file.parent.name}: {file} has sha256" in said
    assert said.endswith("2 artifacts verified, 1 damaged\n")


@pytest.fixture
def explained(store):
    """The artifacts of the store in the record of a run whose third stage was collected."""
    stages = [{"name": "train", "key": entry.key} for entry in reversed(store.entries())]
    folder = store.root.parent / "reports" / "mine-seed0-0123456789ab"
    folder.mkdir(parents=True)
    record = {"stages": [*stages, {"name": "evaluate", "key": "f" * 64}]}
    (folder / "summary.json").write_text(json.dumps(record))
    return store


def why(capsys, name):
    with pytest.raises(SystemExit) as left:
        app(["store", "why", name])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_why_takes_the_key_and_the_folder_of_an_artifact(explained, capsys):
    for entry in explained.entries():
        assert why(capsys, entry.key[:9]) == why(capsys, entry.path.name)
    assert "seed: 0 -> 1" in why(capsys, max(explained.entries(), key=lambda entry: entry.created).key)


@pytest.mark.parametrize("name", ["mine-seed0-0123456789ab", "mine", "0123456"])
def test_why_takes_a_run_and_explains_each_of_its_stages(explained, capsys, name):
    said = why(capsys, name)
    assert said.startswith("run mine-seed0-0123456789ab\n")
    assert said.count("\ntrain ") == 2
    assert "seed: 0 -> 1" in said
    assert "evaluate ffffffffffff: no longer in the store" in said


def test_why_names_what_it_looked_for(explained):
    with pytest.raises(ConfigError, match=r"no run 'none'; the newest are mine.*no artifact of .* has that key"):
        app(["store", "why", "none"], standalone_mode=False)
