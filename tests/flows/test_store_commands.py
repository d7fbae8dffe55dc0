"""`rm-opt store verify` over a store with and without damage."""

import os

import pytest

from flows.cli import app
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
