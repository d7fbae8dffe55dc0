"""Folders of a shared place: whole or not there, whatever fails, and cleaned without touching what someone writes."""

import errno
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from full_disk import largest_file
from rmcore.core.errors import StoreError
from rmcore.core.files import link_or_copy
from rmcore.serving.folders import drop_stale, published
from rmcore.serving.staging import stage_checkpoint, stage_update
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.update_check import check_update
from rmcore.serving.updates import write_update
from rmcore.serving.weight_files import WeightLayout

STATE = {f"layer.{i}": torch.full((60_000,), float(i)) for i in range(6)} | {"score.weight": torch.ones(4)}
"""1.4 MB: more than the small disk has, and less than two of them."""


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(STATE, folder / "model.safetensors")
    return folder


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 1 MB; skips where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("shard_bytes", [300_000, 1 << 30])
def test_an_update_that_does_not_fit_the_disk_leaves_nothing(full_disk, model, shard_bytes):
    with pytest.raises(StoreError, match=re.escape(os.strerror(errno.ENOSPC))):
        write_update(full_disk, STATE, Mode.FULL, WeightLayout.read(model), shard_bytes=shard_bytes)
    assert not names(full_disk)


def test_a_checkpoint_that_does_not_fit_the_disk_leaves_nothing(full_disk, model):
    with pytest.raises(StoreError, match="disk is full"):
        stage_checkpoint(model, full_disk / "served-000001")
    assert not names(full_disk)


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, model, limit):
    weights = tmp_path / "weights"
    stage_checkpoint(model, weights / "served-000001")
    layout = WeightLayout.read(weights / "served-000001")
    ref = write_update(weights, STATE, Mode.HEAD_ONLY, layout)
    checked = check_update(weights, ref.folder_name, ref.digest, Mode.HEAD_ONLY, layout)
    before = names(weights)
    with largest_file(limit), pytest.raises(StoreError, match="could not be written"):
        write_update(weights, STATE, Mode.FULL, layout)
    with largest_file(limit), pytest.raises(StoreError, match="could not be written"):
        stage_update(weights / "served-000001", checked, weights / "served-000002")
    assert names(weights) == before
    stage_update(weights / "served-000001", checked, weights / "served-000002")


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_whatever_ends_the_writing_leaves_nothing(tmp_path, error):
    def write_half():
        with published(tmp_path / "served-1") as folder:
            (folder / "file").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert not names(tmp_path)


def test_a_folder_has_no_name_before_it_is_whole(tmp_path):
    with published(tmp_path / "served-1") as folder:
        (folder / "file").write_text("whole")
        assert names(tmp_path) == [folder.name]
        assert folder.name.startswith(".served-1.")
    assert (tmp_path / "served-1" / "file").read_text() == "whole"
    assert names(tmp_path) == ["served-1"]


def test_a_link_that_is_refused_for_another_reason_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "absent", tmp_path / "target")


def test_stale_folders_go_and_nothing_else(tmp_path):
    for name in ("served-1", "served-2", "update-a", "update-b", ".served-3.tmp", "checkpoint", ".cache.tmp", ".other"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "update-file").write_text("x")
    (tmp_path / "served-link").symlink_to(tmp_path / "checkpoint")
    removed = drop_stale(tmp_path, keep=["served-2", "update-b", "served-9"])
    assert removed == [".served-3.tmp", "served-1", "update-a"]
    left = [".cache.tmp", ".other", "checkpoint", "served-2", "served-link", "update-b", "update-file"]
    assert names(tmp_path) == left
    assert drop_stale(tmp_path, keep=["served-2", "update-b"]) == []


def test_what_someone_writes_stays_and_what_a_killed_writer_left_goes(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from rmcore.serving.folders import published\n"
        "with published(Path(sys.argv[1])): time.sleep(600)"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, tmp_path / "update-x"])
    try:
        deadline = time.monotonic() + 60
        while not (left := [path.name for path in tmp_path.glob(".update-x.*")]) and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "served-1").mkdir()
        assert drop_stale(tmp_path, keep=[]) == ["served-1"]
        assert names(tmp_path) == left
    finally:
        writer.kill()
        writer.wait()
    assert drop_stale(tmp_path, keep=[]) == left
    assert not names(tmp_path)
