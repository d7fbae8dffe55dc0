"""The folders that vLLM loads: whole or not there, whatever fails; exactly the base and what travelled, by links."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from machine import largest_file
from rmcore.core.errors import ModelError, StoreError
from rmcore.models.layers import is_reward_head
from rmcore.models.seal import read_beta
from rmcore.models.weight_files import INDEX_FILE
from rmcore.serving import updates
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.updates import check_update, drop_stale, stage_checkpoint, write_update
from rmcore.serving.weight_files import WHOLE_FILE, WeightLayout, folder_digest

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
        ref = write_update(self.folder, state, mode, changed=changed, beta=beta, shard_bytes=3000)
        self.folder = check_update(self.folder, ref.folder_name, ref.digest)
        heads = {name for name in self.expected if is_reward_head(name)}
        for name in self.expected if mode is Mode.FULL else heads | (set(changed) if mode is Mode.LORA else set()):
            self.expected[name] = state[name].to(self.expected[name].dtype)

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
    monkeypatch.setattr(updates, "copy_without", None)  # a file written again would fail
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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model_of_folders(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(STATE, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("limit", [100, 100_000])
@pytest.mark.parametrize("mode", [Mode.HEAD_ONLY, Mode.FULL])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, model_of_folders, limit, mode):
    served = tmp_path / "weights" / "served-000001"
    stage_checkpoint(model_of_folders, served)
    with largest_file(limit), pytest.raises(StoreError, match="could not be written"):
        write_update(served, STATE, mode)
    assert names(tmp_path / "weights") == [served.name]
    ref = write_update(served, STATE, mode)
    assert check_update(served, ref.folder_name, ref.digest).is_dir()


def test_what_an_earlier_server_left_goes_and_nothing_else(tmp_path):
    left = ["served-1", "update-a", ".served-3.0123.tmp", ".update-b.0123.tmp", ".merged"]
    for name in (*left, "checkpoint", ".cache.tmp", ".other"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "update-file").write_text("x")
    (tmp_path / "served-link").symlink_to(tmp_path / "checkpoint")
    drop_stale(tmp_path)
    assert names(tmp_path) == [".cache.tmp", ".other", "checkpoint", "served-link", "update-file"]
