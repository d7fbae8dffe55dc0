"""A checkpoint that was changed after it was written is refused by name; one that was moved or copied is not."""

import os
import shutil
import struct
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core import files
from rmcore.core.errors import ModelError
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.score import score_pairs_table
from rmcore.models.attributes import save_attributes
from rmcore.models.lora import ADAPTER_FOLDER
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import SEAL_FILE, check_seal
from rmcore.models.trained import load_renderer
from rmcore.training.saving import copy_checkpoint, save_checkpoint

CPU = torch.device("cpu")
PROMPTS, RESPONSES = ["What is 2 + 2?", "Hello"], ["It is 4.", "no"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a training with adapters leaves: the merged model, and the adapter in a folder of it."""
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=32, lora=LoraSettings(rank=2)), seed=0, device=CPU)
    folder = tmp_path_factory.mktemp("trained") / "best"
    save_checkpoint(rm, folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "best")
    return tmp_path / "best"


def load(folder):
    return BradleyTerryRM.from_pretrained(folder, device="cpu")


def rewards_of(folder):
    return load(folder).score(PROMPTS, RESPONSES)


def flip_a_bit(folder, name="model.safetensors"):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def relabel(folder):
    """Numbers of four bytes become numbers of another kind of four bytes, as the header says it."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"F32"', b'"I32"')
    path.write_bytes(content[:8] + header + content[8 + length :])


def more_templates(folder):
    """Add a template for dialogues with tools, as transformers stores several of them."""
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages[-1].content }}")


TEXTS = ["chat_template.jinja", "rm_rendering.json", "tokenizer.json", "tokenizer_config.json"]
"""Files that are read where only text is."""
DAMAGES = {
    **{
        name: partial(flip_a_bit, name=name)
        for name in (*TEXTS, "model.safetensors", "config.json", "rm_preference.json")
    },
    SEAL_FILE: partial(flip_a_bit, name=SEAL_FILE),
    "a file more": lambda folder: (folder / "added_tokens.json").write_text("{}"),
    "a template more": more_templates,
    "weights more": lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-00002.safetensors"),
    "a file less": lambda folder: (folder / "rm_rendering.json").unlink(),
    "a cut seal": lambda folder: (folder / SEAL_FILE).write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_was_changed_is_refused_by_all_that_load_it(folder, damage):
    DAMAGES[damage](folder)
    with pytest.raises(ModelError, match=str(folder)):
        load(folder)
    with pytest.raises(ModelError, match=str(folder)):  # as the beginning of another training
        BradleyTerryRM.new(ModelConfig(name=str(folder), max_seq_len=32), seed=0, device=CPU)
    if damage in (*TEXTS, "a file less"):
        with pytest.raises(ModelError, match=str(folder)):  # where only text is read
            load_renderer(str(folder), max_seq_len=None, render_fn=None)


def test_a_changed_adapter_and_a_changed_base_are_refused(folder, tmp_path):
    adapter = folder / ADAPTER_FOLDER
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="adapter_model"):
        load(adapter)
    shutil.rmtree(adapter)
    rm = BradleyTerryRM.new(
        ModelConfig(name=str(folder), max_seq_len=32, lora=LoraSettings(rank=2)), seed=0, device=CPU
    )
    save_checkpoint(rm, tmp_path / "on it")
    flip_a_bit(folder)
    load(tmp_path / "on it")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path / "on it" / ADAPTER_FOLDER)


def copied(place):
    shutil.copytree(place, place.with_name("copied"))
    return place.with_name("copied")


def touched(place):
    for path in place.iterdir():
        os.utime(path, ns=(1, 1))
    return place


def linked(place):
    copy_checkpoint(place, place.with_name("step_1"))
    return place.with_name("step_1")


def with_a_card(place):
    (place / "README.md").write_text("# A model")
    (place / "soup.json").write_text("{}")
    (place / "modeling_own.py").write_text("")
    (place / "._model.safetensors").write_bytes(b"\0\5\x16\7")  # as archives of macOS have it next to a file
    return place


def test_all_of_several_chat_templates_are_in_the_seal(folder):
    rm = load(folder)
    rm.tokenizer.chat_template = {"default": rm.tokenizer.chat_template, "tool_use": "{{ messages[-1].content }}"}
    rm.save(folder.with_name("several"))
    again = load(folder.with_name("several"))
    assert again.tokenizer.chat_template == rm.tokenizer.chat_template
    for path in folder.with_name("several").rglob("*"):
        if path.is_file() and "tool_use" in path.name + path.read_text(errors="replace"):
            path.write_text(path.read_text().replace("[-1]", "[0]"))
    with pytest.raises(ModelError, match="several"):
        load(folder.with_name("several"))


@pytest.mark.slow
@pytest.mark.parametrize("move", [copied, touched, linked, with_a_card])
def test_what_changes_no_reward_is_loaded(folder, move):
    expected = rewards_of(folder)
    assert np.array_equal(rewards_of(move(folder)), expected)
    assert np.isfinite(rewards_of(folder / ADAPTER_FOLDER)).all()


def test_weights_are_read_once_and_then_known_by_size_and_time(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(files.DIGESTS_VARIABLE, str(tmp_path / "digests.jsonl"))
    monkeypatch.setattr(files, "REMEMBERED_FROM", 2**16)
    monkeypatch.setattr(files, "SETTLED_NS", -1)
    reads, original = [], files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda path: reads.append(path.name) or original(path))
    check_seal(folder)
    check_seal(folder)
    assert reads.count("model.safetensors") == 1
    assert reads.count("config.json") == 2
    copied(folder)
    check_seal(folder.with_name("copied"))
    assert reads.count("model.safetensors") == 2


def test_attributes_are_sealed_with_the_checkpoint(tmp_path):
    state = {"score.weight": torch.ones(2, 3), "score.combination": torch.ones(2)}
    save_attributes(state, ["help", "style"], tmp_path)
    check_seal(tmp_path / "attributes")
    save_file({"weight": torch.zeros(2, 3), "combination": torch.ones(2)}, tmp_path / "attributes/heads.safetensors")
    with pytest.raises(ModelError, match=r"heads\.safetensors"):
        check_seal(tmp_path / "attributes")


@pytest.mark.parametrize("kind", ["I32", "U32"])
def test_weights_that_are_no_fractions_are_refused_without_a_seal_too(folder, kind):
    relabel(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"I32"', f'"{kind}"'.encode()))
    (folder / SEAL_FILE).unlink()
    with pytest.raises(ModelError, match=kind):
        load(folder)


def test_rewards_that_are_all_equal_are_warned_of(folder, capfd):
    pairs = [PreferencePair(pair_id=str(n), prompt=f"Say {n}", chosen=f"{n}", rejected="no") for n in range(3)]
    score_pairs_table(load(folder), pairs)
    assert "rewards are" not in capfd.readouterr().err
    path = folder / "model.safetensors"
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
    save_file(zeros, path, metadata={"format": "pt"})
    (folder / SEAL_FILE).unlink()
    score_pairs_table(load(folder), pairs)
    assert "warning: all 6 rewards are 0" in capfd.readouterr().err
