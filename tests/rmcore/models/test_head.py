"""The reward head: found under the names Hugging Face gives it, and computed in float32 whatever autocast says."""

from functools import partial

import numpy as np
import pytest
import torch

from rmcore.config.model import LoraSettings
from rmcore.models.layers import is_reward_head
from rmcore.models.precision import float32_head, reward_heads
from tests.support.random_models import adapted, model_of

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


KINDS = {
    "qwen2": partial(adapted, "tiny"),
    "qwen2 with LoRA": partial(adapted, "tiny", LoraSettings()),
    **{kind: partial(model_of, kind) for kind in ("gpt2", "bert", "roberta")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_head_alone_is_computed_in_float32(kind):
    model = KINDS[kind]().model.eval()
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
