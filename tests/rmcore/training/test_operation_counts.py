"""How often kernels are called and how much they compute for one packed micro-batch: no clock, so no noise.

Bounds follow from the shapes. What would break them: one attention call a sequence, a prompt computed once for each
side, rows padded to the longest, logits or states computed twice.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, BertConfig, Qwen2Config

from rmcore.models.layers import transformer_layers
from rmcore.models.packing.buckets import ROUNDED_TO
from rmcore.models.packing.forward import find_packing, rewards_of
from rmcore.models.packing.layout import pack_sides
from rmcore.models.precision import float32_head, precision_context

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 64, 4, 128
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_labels": 1,
    "pad_token_id": 0,
}
NUM_PAIRS, PROMPT, LONGEST_OWN = 24, 40, 15
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
CPU = torch.device("cpu")


def make_model(kind):
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_key_value_heads=HEADS) if kind == "causal" else BertConfig(**SHAPE)
    return AutoModelForSequenceClassification.from_config(config).eval()


def make_sides():
    """Pairs with a prompt of 40 tokens and sides of 8 to 15 of their own."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()

    sides = []
    for number in range(NUM_PAIRS):
        prompt = draw(PROMPT)
        sides += [[*prompt, 1, *draw(7 + number % 8)], [*prompt, 2, *draw(14 - number % 8)]]
    return sides


def counted(kind, precision):
    """Calls by kernel, FLOPs, the row and the model, of one forward and backward pass."""
    model = make_model(kind)
    packing = find_packing(model, longest_side=64, precision=precision, pad_id=0)
    row = pack_sides(make_sides(), [(at, at + 1) for at in range(0, 2 * NUM_PAIRS, 2)], packing)

    def work():
        with float32_head(model), precision_context(precision, CPU):
            rewards = rewards_of(model, row)
        rewards.sum().backward()

    # One after the other: the profiler sees the counter's own dispatch of each operation as a second call.
    with FlopCounterMode(display=False) as flops:
        work()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    calls = Counter({event.key: event.count for event in profiler.key_averages()})
    return calls, flops.get_total_flops(), row, model


def backbone_linears(model):
    return [module for module in model.base_model.modules() if isinstance(module, nn.Linear)]


def most_flops(model, row):
    """Of each weight and token 6, of each query and key (padded as batches pad them) 12 a unit of the width.

    Of the last layer that is keys and values, and no more than 2 of the query projection; of what is read, the rest.
    """
    weights = sum(module.weight.numel() for module in backbone_linears(model))
    last = sum(
        module.weight.numel() for module in transformer_layers(model)[-1].modules() if isinstance(module, nn.Linear)
    )
    matrices = 6 * row.num_tokens * (weights - last + 2 * WIDTH**2) + 2 * row.num_tokens * WIDTH**2
    matrices += 6 * len(row.read_at) * last
    side = PROMPT + LONGEST_OWN + ROUNDED_TO
    own = LONGEST_OWN + ROUNDED_TO if row.plan.causal else side
    attended = NUM_PAIRS * side * (side + own)
    return matrices + 12 * WIDTH * ((LAYERS - 1) * attended + NUM_PAIRS * 2 * 2 * side)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_each_weight_is_multiplied_three_times_and_attention_is_a_few_calls(kind, precision):
    calls, flops, row, model = counted(kind, precision)
    # Forwards, and the gradients of input and weight; the head and a pooler are a few rows more. Queries of the last
    # layer are computed once more, on the way to its keys.
    assert calls["aten::mm"] + calls["aten::addmm"] <= 3 * (len(backbone_linears(model)) + 2) + 1
    assert 0.5 * most_flops(model, row) < flops <= 1.02 * most_flops(model, row)
    if precision == "fp32":  # one a sequence, where it is the faster kernel
        assert calls[FUSED] <= LAYERS * 2 * NUM_PAIRS
        return
    # Lengths of two roundings, for first and further sides: 4 batches at most, each with one product for the scores and
    # five others (values; gradients of weights, values, queries, keys). The last layer has two small products a group,
    # each with two gradients.
    assert calls["aten::baddbmm"] <= 4 * (LAYERS - 1)
    assert calls["aten::bmm"] <= 5 * calls["aten::baddbmm"] + 6 * len(row.plan.groups)
    assert calls[FUSED] == 0
