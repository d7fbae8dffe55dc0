"""The reward head: found under the names Hugging Face gives it, and computed in float32 whatever autocast says."""

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig
from torch import nn

from rmcore.models.layers import is_reward_head
from rmcore.models.loading import Origin
from rmcore.models.lora import attach
from rmcore.models.precision import float32_head, reward_heads

TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}
IDS = torch.arange(5, 21).reshape(2, 8)
PROMPTS = ["What is 2 + 2?", "Sort: pear, fig", "Name a fruit " * 6]
RESPONSES = ["4", "fig, pear. Of course, gladly.", "lemon"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("score.weight", True),
        ("classifier.out_proj.bias", True),
        ("lm_head.weight", True),
        ("base_model.model.score.modules_to_save.default.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.layers.0.score_proj.weight", False),
        ("bert.pooler.dense.weight", False),
        ("", False),
    ],
)
def test_a_whole_part_of_the_name_decides(name, expected):
    assert is_reward_head(name) is expected


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = {
        "qwen2": hf.Qwen2Config(**TWO, num_key_value_heads=1, pad_token_id=0, num_labels=1),
        "qwen2 with LoRA": hf.Qwen2Config(**TWO, num_key_value_heads=1, pad_token_id=0, num_labels=1),
        "bert": hf.BertConfig(**TWO, num_labels=1),
        "roberta": hf.RobertaConfig(**TWO, num_labels=1),
        "bert with LoRA": hf.BertConfig(**TWO, num_labels=1),
    }[kind]
    model = hf.AutoModelForSequenceClassification.from_config(config).eval()
    if "LoRA" in kind:
        model = attach(model, LoraConfig(lora_dropout=0.0, init_lora_weights=False), seed=0, origin=Origin(""))
    for module in reward_heads(model).values():
        for parameter in module.parameters():
            parameter.data = torch.randn_like(parameter)
    return model


KINDS = ("qwen2", "qwen2 with LoRA", "bert", "roberta", "bert with LoRA")


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_head_alone_is_computed_in_float32(kind):
    model = make(kind)
    [head] = reward_heads(model).values()
    fed = []
    handle = head.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].detach()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        narrow = model(input_ids=IDS).logits
        with float32_head(model):
            wide = model(input_ids=IDS).logits
        again = model(input_ids=IDS).logits
    handle.remove()
    assert wide.dtype == torch.float32
    assert again.dtype == narrow.dtype == torch.bfloat16
    assert torch.equal(again, narrow)  # restored
    assert torch.equal(fed[1], fed[0])  # the backbone is as it was
    with torch.no_grad():
        expected = head(fed[1].float())
    if expected.ndim == 3:  # causal: one of each token, of which the model takes the last
        expected = expected[:, -1]
    assert torch.equal(wide, expected)
    assert not torch.equal(wide, narrow.float())
    assert "forward" not in vars(head)


def test_bf16_rewards_are_close_and_leave_nothing_behind(rm):
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    exact = rm.score_sides(sides)
    narrow = rm.score_sides(sides, precision="bf16")
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, exact, atol=0.03 * max(1, np.abs(exact).max()))
    assert not np.array_equal(narrow, exact)
    as_bf16 = torch.from_numpy(narrow).to(torch.bfloat16).float().numpy()
    assert not np.array_equal(narrow, as_bf16)  # not rounded to 8 bits
    assert np.array_equal(rm.score_sides(sides), exact)
