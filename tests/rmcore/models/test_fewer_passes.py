"""Norms and rotations in fewer passes against the classes of transformers, gradients included, in float64."""

from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from rmcore.models import fewer_passes
from rmcore.models.fewer_passes import FewerPasses
from tests.support.exact_models import NoFloat32

WIDTH, HEADS, LENGTH = 8, 2, 5
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 9}
GROUPED = {"num_key_value_heads": 2}


def drawn(*shape, dtype=torch.float64):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_()


@contextmanager
def fewer(model):
    """Fewer passes inside the block, and none of it left afterwards."""
    with FewerPasses(model).active():
        assert any("forward" in vars(module) for module in model.modules())
        yield
    assert not any("forward" in vars(module) for module in model.modules())


def norm_of_its_class():
    norm = qwen2.Qwen2RMSNorm(WIDTH, eps=0.3).double()
    norm.weight.data = drawn(WIDTH).detach()
    return norm


def results(function, inputs):
    output = function(*inputs)
    given = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * given).sum(), inputs)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_norm_in_fewer_passes_is_that_of_its_class(frozen):
    norm, states = norm_of_its_class(), drawn(2, LENGTH, WIDTH)
    norm.weight.requires_grad_(not frozen)
    wanted = (states,) if frozen else (states, norm.weight)
    with NoFloat32():
        expected = results(lambda x, *_: norm(x), wanted)
    with fewer(norm), NoFloat32():
        found = results(lambda x, *_: norm(x), wanted)
    assert_same(found, expected)


def test_a_rotation_in_fewer_passes_is_that_of_transformers():
    rotate = fewer_passes._rotating_forward(qwen2.Qwen2Attention).__globals__["apply_rotary_pos_emb"]
    assert rotate is not qwen2.apply_rotary_pos_emb
    # Not in memory as they are by shape: a layer hands over transposed rows.
    query, key = (drawn(1, LENGTH, heads, WIDTH).transpose(1, 2).detach().requires_grad_() for heads in (HEADS, 1))
    cos, sin = (drawn(1, LENGTH, WIDTH).detach() + shift for shift in (0, 1))
    both = [
        results(lambda *rows, f=f: torch.cat([one.square() for one in f(*rows, cos, sin)], 1), (query, key))
        for f in (rotate, qwen2.apply_rotary_pos_emb)
    ]
    assert_same(*both)


KINDS = {
    "qwen2": (hf.Qwen2Config, GROUPED, 5, 2),
    "llama": (hf.LlamaConfig, GROUPED, 5, 2),
    "mistral": (hf.MistralConfig, GROUPED, 5, 2),
    "qwen3": (hf.Qwen3Config, GROUPED | {"head_dim": 4}, 9, 2),
    "gemma": (hf.GemmaConfig, GROUPED | {"head_dim": 4}, 0, 2),  # its weight is what is added to one
    "cohere": (hf.CohereConfig, GROUPED, 0, 0),  # its rotation has pairs of neighbours
    "bert": (hf.BertConfig, {}, 0, 0),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_computes_another_formula_is_left_alone_and_states_stay_the_same(name):
    kind, more, num_norms, num_rotating = KINDS[name]
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(kind(**SHAPE, **more, pad_token_id=0)).double().eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    expected = model(input_ids=ids).last_hidden_state
    with FewerPasses(model).active():
        replaced = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
        found = model(input_ids=ids).last_hidden_state
    assert sum("Norm" in one for one in replaced) == num_norms
    assert sum("Attention" in one for one in replaced) == num_rotating
    assert len(replaced) == num_norms + num_rotating
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected, rtol=0, atol=0)


def test_a_bfloat16_norm_is_that_of_the_class_to_the_bit():
    norm = qwen2.Qwen2RMSNorm(WIDTH).bfloat16()
    states = drawn(1, 64, WIDTH, dtype=torch.bfloat16).detach()
    with fewer(norm):
        found = norm(states)
    assert torch.equal(found, norm(states))
