"""Adapters: where they go, what of the user's configuration is kept, and that saving loses and moves nothing."""

import copy
import json
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.models.layers import is_reward_head
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import write_seal
from tests.support.random_models import adapted

CPU = torch.device("cpu")
PROMPTS = ["What is 2 + 2?", "Sort: pear, fig", "Name a fruit " * 6]
RESPONSES = ["4", "fig, pear. Of course, gladly.", "lemon"]
TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}


def adapted_layers(rm: BradleyTerryRM) -> set[str]:
    """Names of the layers with an adapter, as the plain model calls them."""
    named = rm.model.get_base_model().named_modules()
    return {name for name, module in named if isinstance(module, LoraLayer)}


def build(config: hf.PretrainedConfig, tiny_folder: Path, folder: Path) -> Path:
    model = hf.AutoModelForSequenceClassification.from_config(config)
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "blocks", "each"),
    [
        (hf.BertConfig(**TWO, num_labels=1), "bert.encoder.layer", 6),
        (
            hf.DebertaV2Config(**TWO, num_labels=1, relative_attention=True, share_att_key=True, pos_att_type=["p2c"]),
            "deberta.encoder.layer",
            6,
        ),
        (hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, num_labels=1), "transformer.h", 4),  # Conv1D
        (hf.Qwen2Config(**TWO, num_key_value_heads=1, num_labels=1), "model.layers", 7),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_default_targets_are_all_linear_layers_of_the_blocks_and_no_other(config, blocks, each, tiny_folder, tmp_path):
    layers = adapted_layers(adapted(build(config, tiny_folder, tmp_path), LoraSettings()))
    assert all(name.startswith(f"{blocks}.") for name in layers)
    assert len(layers) == 2 * each


def test_rank_alpha_dropout_and_targets_reach_the_layers(tiny_folder):
    rm = adapted(tiny_folder, LoraSettings(rank=3, alpha=12, dropout=0.25, targets=("q_proj", "1.mlp.down_proj")))
    layers = adapted_layers(rm)
    expected = {f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)} | {"model.layers.1.mlp.down_proj"}
    assert layers == expected
    for name in layers:
        layer = rm.model.get_base_model().get_submodule(name)
        assert layer.scaling["default"] == 4
        assert layer.lora_A["default"].weight.shape[0] == layer.lora_B["default"].weight.shape[1] == 3
        assert layer.lora_dropout["default"].p == 0.25


@pytest.mark.parametrize(
    "config", [LoraSettings(targets=("q_proj", "query")), LoraConfig(target_modules=["query"])], ids=["ours", "PEFT's"]
)
def test_targets_that_match_nothing_are_refused_with_what_exists(config, tiny_folder):
    with pytest.raises(ConfigError, match=r"that exist: down_proj \(2\).* q_proj \(2\)") as caught:
        adapted(tiny_folder, config)
    assert "score" not in str(caught.value)


USERS = LoraConfig(
    r=3, lora_alpha=7, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], layers_to_transform=[1],
    rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 5}, use_rslora=True, init_lora_weights="gaussian",
    modules_to_save=["norm"], bias="lora_only", exclude_modules=["model.layers.1.mlp.down_proj"],
)  # fmt: skip


def test_a_full_configuration_is_kept_attribute_by_attribute(tiny_folder, tmp_path):
    given = copy.deepcopy(USERS)
    rm = adapted(tiny_folder, given)
    assert given == USERS  # the user's object is left alone
    filled = {"task_type": "SEQ_CLS", "modules_to_save": ["norm", "score"], "base_model_name_or_path": str(tiny_folder)}
    rm.save(tmp_path)
    saved = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    for field in fields(LoraConfig):
        expected = filled.get(field.name, getattr(USERS, field.name))
        assert getattr(rm.model.peft_config["default"], field.name) == expected, field.name
        on_disk = getattr(saved, field.name)
        if field.name == "inference_mode":
            assert on_disk is True
        else:
            assert (set(on_disk) if isinstance(expected, set) else on_disk) == expected, field.name
    assert adapted_layers(rm) == {"model.layers.1.self_attn.q_proj"}


@pytest.mark.parametrize("saved", [None, [], ["norm"], ["score"]])
def test_the_head_is_trained_whatever_modules_to_save_says(saved, tiny_folder):
    rm = adapted(tiny_folder, LoraConfig(modules_to_save=saved))
    trained = {name for name, parameter in rm.model.named_parameters() if parameter.requires_grad}
    assert any(is_reward_head(name) for name in trained)
    assert all("lora_" in name or is_reward_head(name) or "norm" in name for name in trained)
    assert any(".norm." in name for name in trained) == (saved == ["norm"])
    assert rm.num_trained_parameters < 0.2 * rm.num_parameters


def test_the_seed_alone_decides_and_the_callers_random_numbers_are_left_alone(tiny_folder):
    def draw(seed):
        rm = BradleyTerryRM.new(
            ModelConfig(name=str(tiny_folder), max_seq_len=96, lora=LoraSettings()), seed=seed, device=CPU
        )
        return {name: tensor for name, tensor in rm.model.state_dict().items() if "lora_A" in name}

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = draw(1)
    assert torch.equal(torch.rand(3), expected)
    again, other = draw(1), draw(2)
    assert first
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


CONFIGS = {
    "ours": LoraSettings(dropout=0.2),
    "a user's": USERS,
    "DoRA": LoraConfig(use_dora=True),
    "all linear": LoraConfig(target_modules="all-linear"),
    "a pattern": LoraConfig(target_modules=r".*\.[02]\..*_proj"),
    "embeddings": LoraConfig(target_modules=["embed_tokens", "q_proj"]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`"
)  # the reward model has no second use of them
@pytest.mark.parametrize("name", CONFIGS)
def test_live_reloaded_and_merged_agree_and_saving_touches_nothing(name, tiny_folder, tmp_path):
    rm = adapted(tiny_folder, copy.deepcopy(CONFIGS[name]))
    live = rm.score(PROMPTS, RESPONSES)
    before = {key: tensor.clone() for key, tensor in rm.model.state_dict().items()}
    gradients = {key: parameter.requires_grad for key, parameter in rm.model.named_parameters()}
    plain = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu").score(PROMPTS, RESPONSES)
    assert np.abs(live - plain).max() > 1e-2  # the adapters do something
    rm.save(tmp_path)
    after = rm.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert gradients == {key: parameter.requires_grad for key, parameter in rm.model.named_parameters()}
    assert np.array_equal(rm.score(PROMPTS, RESPONSES), live)
    reloaded = BradleyTerryRM.from_pretrained(tmp_path / "adapter", device="cpu")
    assert np.array_equal(reloaded.score(PROMPTS, RESPONSES), live)
    assert reloaded.num_trained_parameters == rm.num_trained_parameters
    merged = BradleyTerryRM.from_pretrained(tmp_path, device="cpu")
    np.testing.assert_allclose(merged.score(PROMPTS, RESPONSES), live, atol=1e-5, rtol=1e-5)
    assert not any("lora_" in key or "modules_to_save" in key for key in load_file(tmp_path / "model.safetensors"))
    assert isinstance(merged.model, hf.Qwen2ForSequenceClassification)


def test_given_the_whole_state_the_live_weights_are_not_read(tiny_folder, tmp_path):
    rm = adapted(tiny_folder, LoraSettings())
    rm.save(tmp_path / "live")
    state = {key: tensor.clone() for key, tensor in rm.model.state_dict().items()}
    for parameter in rm.model.parameters():
        parameter.data.zero_()
    rm.save(tmp_path / "given", state=state)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        live, given = (load_file(tmp_path / name / file) for name in ("live", "given"))
        assert live.keys() == given.keys()
        assert all(torch.equal(live[key], given[key]) for key in live)
    listed = [
        sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
        for name in ("live", "given")
    ]
    assert listed[0] == listed[1]


def test_adapter_dropout_is_on_in_training_mode_only(tiny_folder):
    rm = adapted(tiny_folder, LoraSettings(dropout=0.5))
    ids = torch.arange(3, 20)[None]
    drawn = [rm.model(input_ids=ids).logits.item() for _ in range(2)]
    assert drawn[0] == drawn[1]
    rm.model.train()
    drawn = [rm.model(input_ids=ids).logits.item() for _ in range(2)]
    assert drawn[0] != drawn[1]
    rewards = [rm.score(PROMPTS, RESPONSES) for _ in range(2)]
    assert np.array_equal(*rewards)
    assert rm.model.training  # as it was before scoring


def other_base(base, adapter):
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    write_seal(base)  # another model, as a training into the same folder leaves it


def fewer_weights(base, adapter):
    kept = {key: one for key, one in load_file(adapter / "adapter_model.safetensors").items() if "q_proj" not in key}
    save_file(kept, adapter / "adapter_model.safetensors")
    write_seal(adapter)


def no_name_of_a_base(base, adapter):
    (adapter / "rm_base.json").unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    write_seal(adapter)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda base, adapter: shutil.rmtree(base), "{base}.*needs its base model|needs its base model.*{base}"),
        (other_base, "trained on other weights"),
        (fewer_weights, "q_proj"),
        (no_name_of_a_base, "names no base model"),
    ],
)
def test_an_adapter_without_its_own_base_or_weights_is_refused(damage, said, tiny_folder, tmp_path):
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    adapted(base, LoraSettings()).save(tmp_path / "saved")
    damage(base, tmp_path / "saved" / "adapter")
    with pytest.raises(ModelError, match=said.format(base=base)):
        BradleyTerryRM.from_pretrained(tmp_path / "saved" / "adapter", device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task_type": "CAUSAL_LM"}, "sequence classifier"),
        ({"inference_mode": True}, "freezes"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_training(changes, said, tiny_folder):
    with pytest.raises(ConfigError, match=said):
        adapted(tiny_folder, LoraConfig(**changes))
