"""A damaged model folder is refused with a named error, or gives the rewards of the whole one: never a traceback."""

import json
import shutil
import struct
from contextlib import suppress

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ModelError, RmcoreError
from rmcore.models.lora import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, BASE_FILE
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import SEAL_FILE
from rmcore.models.tiny import tiny_tokenizer
from rmcore.models.weight_files import INDEX_FILE
from rmcore.training.saving import save_checkpoint

PROMPTS, RESPONSES = ["What is 2 + 2?", "Hello"], ["It is 4.", "no"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A trained model in two shards, of few weights, and an adapter on it in a folder of it; it is loaded often."""
    folder, adapted = (tmp_path_factory.mktemp("checkpoint") / name for name in ("whole", "adapted"))
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=1, num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder, max_shard_size="32KB")
    tokenizer.save_pretrained(folder)
    BradleyTerryRM.from_pretrained(folder, device="cpu", max_seq_len=32).save_records(folder)
    (folder / SEAL_FILE).unlink()  # as a model from elsewhere: what a seal refuses is in test_seal.py
    assert (folder / INDEX_FILE).is_file()
    rm = BradleyTerryRM.new(
        ModelConfig(name=str(folder), max_seq_len=32, lora=LoraSettings(rank=2)), seed=0, device=CPU
    )
    save_checkpoint(rm, adapted)
    (adapted / ADAPTER_FOLDER / SEAL_FILE).unlink()
    (adapted / ADAPTER_FOLDER).rename(folder / ADAPTER_FOLDER)
    return folder


def rewards_of(folder):
    return BradleyTerryRM.from_pretrained(folder, device="cpu").score(PROMPTS, RESPONSES).tolist()


@pytest.fixture(scope="module")
def rewards(whole):
    """Of the model and of its adapter, by the part of its folder."""
    return {part: rewards_of(whole / part) for part in (".", ADAPTER_FOLDER)}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_folder(path):
    path.unlink()
    path.mkdir()


def dangle(path):
    path.unlink()
    path.symlink_to("nowhere")


ADAPTER_FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE]
FILES = ["config.json", "tokenizer_config.json", "rm_rendering.json", "rm_preference.json", INDEX_FILE, "weights"]
DAMAGES = {
    "gone": lambda path: path.unlink(),
    "cut": cut,
    "garbage": lambda path: path.write_bytes(b"\xff\x00garbage\xfe" * 9),
    "list": lambda path: path.write_text("[]"),
    "object": lambda path: path.write_text("{}"),
    "nested": lambda path: path.write_text("[" * 20_000 + "]" * 20_000),
    "a folder": make_folder,
    "link to nothing": dangle,
}
CASES = [(file, damage) for file in FILES for damage in DAMAGES]
# Most texts are templates, and none is: it says how a dialogue is written, and nobody can know that it was another way.
CASES += [("chat_template.jinja", damage) for damage in ("cut", "garbage")]
# A tokenizer.json that is not there makes transformers look for other files for many seconds.
CASES += [("tokenizer.json", damage) for damage in ("cut", "garbage", "list", "object")]


CASES += [(f"{ADAPTER_FOLDER}/{file}", damage) for file in ADAPTER_FILES for damage in DAMAGES]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_file_is_refused_in_words_or_nothing_is_lost(whole, rewards, tmp_path, file, damage):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    DAMAGES[damage](next(folder.glob("model-00001*")) if file == "weights" else folder / file)
    part = ADAPTER_FOLDER if file.startswith(ADAPTER_FOLDER) else "."
    with suppress(RmcoreError):
        assert rewards_of(folder / part) == pytest.approx(rewards[part], abs=1e-5)


def change_header(change):
    def damage(folder):
        path = next(folder.glob("model-00001*"))
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__")
        change(header, next(iter(header)))
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return damage


def map_all_to(place):
    def damage(folder):
        shutil.copy(next(folder.glob("model-00001*")), folder.parent / "outside.safetensors")
        path = folder / INDEX_FILE
        listed = json.loads(path.read_text())
        listed["weight_map"] = dict.fromkeys(listed["weight_map"], place.format(folder.parent))
        path.write_text(json.dumps(listed))

    return damage


def link_out(folder):
    path = next(folder.glob("model-00001*"))
    path.rename(folder.parent / "outside.safetensors")
    path.symlink_to(folder.parent / "outside.safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(change_header(lambda header, name: header[name].update(shape=[1])), id="shape"),
        pytest.param(change_header(lambda header, name: header[name].update(dtype="F99")), id="type"),
        pytest.param(change_header(lambda header, name: header[name].update(data_offsets=[0, 10**18])), id="offsets"),
        pytest.param(change_header(lambda header, name: header.update(other=header.pop(name))), id="name"),
        pytest.param(map_all_to("../outside.safetensors"), id="index leads up"),
        pytest.param(map_all_to("{}/outside.safetensors"), id="index leads to a path"),
        pytest.param(link_out, id="index leads to a link out"),
        pytest.param(map_all_to("absent.safetensors"), id="index names what is not there"),
    ],
)
def test_weights_that_are_not_the_folders_own_are_refused(whole, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage(folder)
    with pytest.raises(ModelError):
        rewards_of(folder)
