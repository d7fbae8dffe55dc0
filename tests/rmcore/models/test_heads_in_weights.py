"""Whether a checkpoint has a reward head is read from its weights; its configuration may say little of it."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rmcore.config.model import ModelConfig
from rmcore.core.errors import ModelError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer

CPU = torch.device("cpu")
PROMPTS, RESPONSES = ["What is 2 + 2?", "Hello"], ["It is 4.", "no"]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIGS = {
    "qwen2": lambda **more: hf.Qwen2Config(**SHAPE, num_key_value_heads=1, **more),
    "llama": lambda **more: hf.LlamaConfig(**SHAPE, num_key_value_heads=1, **more),
    "roberta": lambda **more: hf.RobertaConfig(**SHAPE, max_position_embeddings=140, initializer_range=0.2, **more),
}
NAMES = {
    "its own class, without num_labels": {},
    "a language model": {"architectures": ["XForCausalLM"]},
    "a backbone": {"architectures": ["XModel"]},
    "OpenRLHF": {"architectures": ["LLMForSequenceRegression"], "value_head_prefix": "score"},
    "no class": {"architectures": None},
}


def make(folder, kind, labels=1):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = CONFIGS[kind](vocab_size=len(tokenizer), num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rename(folder, changes):
    """Leave out all that the configuration says of labels, and make the changes."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_labels", "id2label", "label2id", "problem_type"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewards_of(folder):
    return BradleyTerryRM.from_pretrained(folder, device="cpu", max_seq_len=64).score(PROMPTS, RESPONSES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_head_of_one_row_is_a_reward_head_whatever_the_configuration_calls_it(tmp_path, kind, name):
    folder = make(tmp_path, kind)
    expected = rewards_of(folder)
    rename(folder, NAMES[name])
    assert np.array_equal(rewards_of(folder), expected)
    config = ModelConfig(name=str(folder), max_seq_len=64)
    for defer in (False, True):  # the same head is trained on, and none is drawn
        rm = BradleyTerryRM.new(config, seed=1, device=CPU, defer=defer)
        assert not rm._origin.fresh


@pytest.mark.parametrize("kind", ["qwen2", "roberta"])
@pytest.mark.parametrize("name", NAMES)
def test_a_head_of_several_rows_is_refused_by_their_number(tmp_path, kind, name):
    folder = make(tmp_path, kind, labels=5)
    rename(folder, NAMES[name])
    with pytest.raises(ModelError, match="5 labels"):
        rewards_of(folder)


@pytest.mark.parametrize("name", NAMES)
def test_weights_without_a_head_are_refused(tmp_path, name):
    folder = make(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("score.weight").repeat(4, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rename(folder, NAMES[name])
    with pytest.raises(ModelError, match=r"no reward head|lacks the weights score|2 labels"):
        rewards_of(folder)


def test_a_classifier_of_tokens_is_no_reward_model(tmp_path):
    tokenizer = tiny_tokenizer()
    config = CONFIGS["roberta"](vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    hf.AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no reward head"):
        rewards_of(tmp_path)
