"""The folders that vLLM loads: whole or not there, whatever fails; exactly the base and what travelled, by links."""

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from full_disk import largest_file
from rmcore.core.errors import ModelError, StoreError
from rmcore.models.preference import read_beta
from rmcore.models.weight_index import INDEX_FILE
from rmcore.serving import staging
from rmcore.serving.folders import drop_stale, published
from rmcore.serving.model_files import WHOLE_FILE, folder_digest
from rmcore.serving.staging import stage_checkpoint, stage_update
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.update_check import check_update
from rmcore.serving.updates import write_update
from rmcore.serving.weight_files import WeightLayout

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}
CONFIGS = {
    "qwen2": hf.Qwen2Config(num_key_value_heads=1, pad_token_id=0, num_labels=1, tie_word_embeddings=True, **SMALL),
    "bert": hf.BertConfig(num_labels=1, **SMALL),
}
MODELS = [("qwen2", "5GB", "float32"), ("qwen2", "4KB", "float32"), ("qwen2", "4KB", "bfloat16")]
MODELS += [("bert", "5GB", "float32"), ("bert", "4KB", "float32")]


class Server:
    """A weights folder with what a server does to it, and what its weights must then be."""

    def __init__(self, source: Path, weights: Path) -> None:
        self.weights, self.folder = weights, weights / "served-000001"
        stage_checkpoint(source, self.folder)
        self.expected = stored(self.folder)

    def update(self, state, mode, changed=(), beta=None):
        layout = WeightLayout.read(self.folder)
        ref = write_update(self.weights, state, mode, layout, changed=changed, beta=beta, shard_bytes=3000)
        checked = check_update(self.weights, ref.folder_name, ref.digest, mode, layout)
        new = self.weights / f"served-{int(self.folder.name[-6:]) + 1:06d}"
        stage_update(self.folder, checked, new)
        for name in checked.tensors:
            self.expected[name] = state[name].to(self.expected[name].dtype)
        self.folder = new
        return checked

    def holds_what_it_must(self):
        """As vLLM reads it: every tensor of every file of the index, where no other file lies about."""
        files = [path.name for path in self.folder.glob("*.safetensors")]
        assert sorted(files) == WeightLayout.read(self.folder).files
        assert files == [WHOLE_FILE] or (WHOLE_FILE not in files and (self.folder / INDEX_FILE).is_file())
        found = stored(self.folder)
        assert found.keys() == self.expected.keys()
        assert all(same(found[name], self.expected[name]) for name in found)

    def inodes(self):
        return {path.stat().st_ino for path in self.folder.glob("*.safetensors")}


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def stored(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def make_model(kind, dtype="float32", seed=0):
    torch.manual_seed(seed)
    return hf.AutoModelForSequenceClassification.from_config(CONFIGS[kind], dtype=getattr(torch, dtype))


def save_model(folder, kind, shard, dtype="float32"):
    make_model(kind, dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "rm_rendering.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"not the model")
    return folder


def adapted(state):
    return [name for name in state if any(part in name for part in ("q_proj.weight", "query.weight"))]


@pytest.fixture(params=MODELS, ids="-".join)
def model(request, tmp_path):
    kind, shard, dtype = request.param
    return kind, save_model(tmp_path / "model", kind, shard, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes", [["full"], ["head_only"], ["lora"], ["head_only", "lora", "full", "head_only"]], ids="-".join
)
def test_transformers_loads_exactly_the_base_and_what_travelled(model, tmp_path, modes):
    kind, source = model
    server = Server(source, tmp_path / "weights")
    for seed, mode in enumerate(modes, start=1):
        state = make_model(kind, seed=seed).state_dict() | {"lm_head.of.another": torch.ones(1)}
        server.update(state, Mode(mode), adapted(state))
        server.holds_what_it_must()
    loaded, info = hf.AutoModelForSequenceClassification.from_pretrained(
        server.folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.state_dict().keys() == server.expected.keys()
    assert all(same(tensor, server.expected[name]) for name, tensor in loaded.state_dict().items())
    assert {path.name for path in server.folder.iterdir()} >= {"config.json", "rm_rendering.json"}
    assert not (server.folder / "optimizer.pt").exists()


def test_an_update_brings_its_beta_and_leaves_the_served_one_alone(tmp_path):
    """Left out, it is the served model's; a folder before it keeps its own, although files are links."""
    server = Server(save_model(tmp_path / "model", "bert", "5GB"), tmp_path / "weights")
    first, state = server.folder, make_model("bert", seed=1).state_dict()
    folders = [first]
    for beta in (0.25, None, 2.0):
        server.update(state, Mode.HEAD_ONLY, beta=beta)
        folders.append(server.folder)
    assert [read_beta(folder) for folder in folders] == [1.0, 0.25, 0.25, 2.0]
    assert folder_digest(folders[2]) != folder_digest(folders[3])


@pytest.mark.slow
@pytest.mark.parametrize("first", Mode)
@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_only_a_first_partial_update_rewrites_a_file(tmp_path, monkeypatch, first, shard):
    server = Server(save_model(tmp_path / "model", "qwen2", shard), tmp_path / "weights")
    state = make_model("qwen2", seed=1).state_dict()
    server.update(state, first, adapted(state))
    monkeypatch.setattr(staging, "copy_without", None)  # a file written again would fail
    for seed in (2, 3):
        state, before = make_model("qwen2", seed=seed).state_dict(), server.inodes()
        server.update(state, Mode.HEAD_ONLY)
        assert len(before - server.inodes()) == len(server.inodes() - before) == 1
    if first == Mode.LORA:
        server.update(state, Mode.LORA, adapted(state))
    server.update(state, Mode.FULL)
    server.holds_what_it_must()


def test_one_file_has_no_index(tmp_path):
    source = save_model(tmp_path / "model", "qwen2", "5GB")
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, source / WHOLE_FILE)  # no head, so an update is one file
    server = Server(source, tmp_path / "weights")
    assert not (server.folder / INDEX_FILE).exists()
    for value in (1.0, 2.0):
        server.update({"a": torch.full((2,), value), "b": torch.full((3,), value)}, Mode.FULL)
        assert [path.name for path in server.folder.glob("model*")] == [WHOLE_FILE]
        server.holds_what_it_must()


@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_a_staged_checkpoint_outlives_what_its_owner_does(tmp_path, tiny_folder, shard):
    source, folder = save_model(tmp_path / "model", "qwen2", shard), tmp_path / "new" / "weights" / "served-000001"
    for path in tiny_folder.glob("tokenizer*"):
        shutil.copy(path, source)
    (source / "old.safetensors").write_bytes(b"of an older model, in no index")
    (source / "modules.json").write_text("[]")
    digest, expected = folder_digest(source), stored_model(source)
    stage_checkpoint(source, folder)
    assert all(os.path.samefile(source / file, folder / file) for file in WeightLayout.read(folder).files)
    left = {path.name for path in source.iterdir()} - {path.name for path in folder.iterdir()}
    assert left == {"old.safetensors", "modules.json", "optimizer.pt"}
    make_model("qwen2", seed=9).save_pretrained(source, max_shard_size=shard)  # replaced
    (source / "config.json").write_text("edited in place")
    assert folder_digest(folder) == digest != folder_digest(source)
    shutil.rmtree(source)
    assert folder_digest(folder) == digest
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored(folder).items())
    assert hf.AutoTokenizer.from_pretrained(folder)("a b").input_ids


def stored_model(folder):
    return {name: t.clone() for file in WeightLayout.read(folder).files for name, t in load_file(folder / file).items()}


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    cached = tmp_path / "models--someone--model"
    blobs, snapshot = save_model(cached / "blobs", "qwen2", "4KB"), cached / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / path.name)
    stage_checkpoint(snapshot, tmp_path / "weights" / "served-000001")
    assert not any(path.is_symlink() for path in (tmp_path / "weights" / "served-000001").iterdir())
    shutil.rmtree(blobs)
    assert folder_digest(tmp_path / "weights" / "served-000001")


def test_across_file_systems_files_are_copied(tmp_path):
    shared = Path("/dev/shm")  # always there on Linux, and of memory
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    weights = shared / f"weights-{os.getpid()}"
    try:
        server = Server(save_model(tmp_path / "model", "qwen2", "4KB"), weights)
        shutil.rmtree(tmp_path / "model")
        server.update(make_model("qwen2", seed=1).state_dict(), Mode.HEAD_ONLY)
        server.holds_what_it_must()
    finally:
        shutil.rmtree(weights)


def test_a_damaged_checkpoint_is_refused_before_a_folder_is_made_and_a_served_one_is_never_overwritten(tmp_path):
    source = save_model(tmp_path / "model", "qwen2", "5GB")
    folder = Server(source, tmp_path / "other").folder
    digest = folder_digest(folder)
    with pytest.raises(StoreError, match="is there already"):
        stage_checkpoint(source, folder)
    assert folder_digest(folder) == digest
    (source / WHOLE_FILE).write_bytes((source / WHOLE_FILE).read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut short"):
        stage_checkpoint(source, tmp_path / "weights" / "served-000001")
    assert not (tmp_path / "weights").exists()


STATE = {f"layer.{i}": torch.full((60_000,), float(i)) for i in range(6)} | {"score.weight": torch.ones(4)}
"""1.4 MB: more than the small disk has, and less than two of them."""


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture
def model_of_folders(tmp_path):
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
def test_an_update_that_does_not_fit_the_disk_leaves_nothing(full_disk, model_of_folders, shard_bytes):
    with pytest.raises(StoreError, match=re.escape(os.strerror(errno.ENOSPC))):
        write_update(full_disk, STATE, Mode.FULL, WeightLayout.read(model_of_folders), shard_bytes=shard_bytes)
    assert not names(full_disk)


def test_a_checkpoint_that_does_not_fit_the_disk_leaves_nothing(full_disk, model_of_folders):
    with pytest.raises(StoreError, match="disk is full"):
        stage_checkpoint(model_of_folders, full_disk / "served-000001")
    assert not names(full_disk)


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, model_of_folders, limit):
    weights = tmp_path / "weights"
    stage_checkpoint(model_of_folders, weights / "served-000001")
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
