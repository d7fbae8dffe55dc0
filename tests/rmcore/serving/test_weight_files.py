"""What is known of a model folder: its tensors from headers alone, its digest, and which folders are refused."""

import json
import struct

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rmcore.core.errors import ModelError
from rmcore.models.weight_files import INDEX_FILE, WEIGHTS_FILE
from rmcore.serving.weight_files import DTYPES, WeightLayout, folder_digest


@pytest.fixture
def folder(tmp_path):
    """Two shards with an index."""
    torch.manual_seed(0)
    save_file({"a": torch.randn(4, 3), "b": torch.randn(2)}, tmp_path / "one.safetensors", {"format": "pt"})
    save_file({"score.weight": torch.randn(1, 4)}, tmp_path / "two.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    write_map(tmp_path, a="one.safetensors", b="one.safetensors", **{"score.weight": "two.safetensors"})
    return tmp_path


def write_map(folder, **places):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_the_layout_is_the_models_own(tmp_path):
    """Of a model in several files."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = hf.AutoModelForSequenceClassification.from_config(hf.BertConfig(vocab_size=64, num_labels=1, **small))
    model.save_pretrained(folder := tmp_path, max_shard_size="4KB")
    layout = WeightLayout.read(folder)
    state = model.state_dict()
    assert {name: spec.shape for name, spec in layout.tensors.items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert {DTYPES[spec.dtype] for spec in layout.tensors.values()} == {torch.float32}
    assert layout.files == sorted(path.name for path in folder.glob("*.safetensors"))
    for file in layout.files:
        assert layout.names(file) == set(load_file(folder / file))


def test_only_headers_are_read(tmp_path):
    """A file of 64 GB that is a hole on disk: reading it would take minutes."""
    size = 64 << 30
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert WeightLayout.read(tmp_path).tensors["w"].shape == (size // 2,)


def cut(folder):
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lead_out(folder):
    """The second shard is a link to someone else's file, as an unpacked archive may bring one."""
    outside = folder.parent / f"{folder.name}-outside.safetensors"
    (folder / "two.safetensors").rename(outside)
    (folder / "two.safetensors").symlink_to(outside)


def only(suffix):
    def damage(folder):
        for path in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:
            path.unlink()
        if suffix:
            (folder / f"pytorch_model{suffix}").write_bytes(b"x")

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(cut, "two.safetensors cannot be read", id="truncated"),
        pytest.param(lambda f: (f / "two.safetensors").write_bytes(b"\xff" * 64), "cannot be read", id="no header"),
        pytest.param(lambda f: (f / "two.safetensors").unlink(), "cannot be read", id="shard gone"),
        pytest.param(only(".bin"), r"\.bin files, which can run code", id="bin"),
        pytest.param(only(None), "has neither model.safetensors", id="nothing"),
        pytest.param(lambda f: (f / INDEX_FILE).unlink(), "neither model.safetensors nor", id="no index"),
        pytest.param(lambda f: save_file({"a": torch.ones(1)}, f / WEIGHTS_FILE), "has both", id="index and whole"),
        pytest.param(lambda f: write_map(f, a="../one.safetensors"), r"names '\.\./one.safetensors'", id="outside"),
        pytest.param(lead_out, "two.safetensors, which the index names, is a link to .*outside", id="link out"),
        pytest.param(lambda f: write_map(f, a="model.bin"), "no safetensors file", id="bin in the index"),
        pytest.param(lambda f: (f / INDEX_FILE).write_text("{}"), "damaged", id="no map"),
        pytest.param(lambda f: write_map(f, c="one.safetensors"), "names c, which", id="absent name"),
        pytest.param(
            lambda f: write_map(f, a="two.safetensors", b="one.safetensors"), "names a, which", id="wrong file"
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, damage, says):
    damage(folder)
    with pytest.raises(ModelError, match=says):
        WeightLayout.read(folder)


def test_a_name_in_two_files_of_the_index_is_refused(folder):
    save_file({"score.weight": torch.ones(1, 4), "a": torch.ones(4, 3)}, folder / "two.safetensors")
    with pytest.raises(ModelError, match="holds a twice"):
        WeightLayout.read(folder)


def test_a_file_that_nobody_loads_is_no_part_of_the_model(folder):
    before = WeightLayout.read(folder), folder_digest(folder)
    save_file({"a": torch.ones(4, 3)}, folder / "old.safetensors")
    (folder / "README.md").write_text("x")
    (folder / "training_args.bin").write_bytes(b"x")
    (folder / "adapter").mkdir()
    assert (WeightLayout.read(folder), folder_digest(folder)) == before


@pytest.mark.parametrize("name", ["config.json", "one.safetensors", INDEX_FILE, "tokenizer.json", "rm_rendering.json"])
def test_every_file_of_the_model_counts_in_its_digest(folder, name):
    before = folder_digest(folder)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert folder_digest(folder) != before
