"""Attention of packed rows against a dense mask written down from the definition; the varlen kernel's index as well.

The kernel itself runs on a GPU only. Here `tests.support.varlen_kernel` is what it calls on a CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rmcore.models.packing.attention as module
from rmcore.core.errors import ModelError
from rmcore.models.packing.attention import kernel_groups_heads, packed_attention
from rmcore.models.packing.layout import Packing, pack_sides
from tests.support import varlen_kernel  # noqa: F401  (registers it)

DIM, VALUE_DIM = 4, 3
SIDE = st.lists(st.integers(0, 1), min_size=1, max_size=6)
GROUPS = st.lists(st.lists(SIDE, min_size=1, max_size=4), min_size=1, max_size=4)


def row_of(groups, packing):
    sides = [side for group in groups for side in group]
    places = iter(range(len(sides)))
    return pack_sides(sides, [[next(places) for _ in group] for group in groups], packing)


def plan_of(groups, *, causal, kernel="varlen", grouped=True):
    return row_of(groups, Packing(causal, kernel, grouped)).plan


def visible(plan):
    """(T, T) bool: a token sees what precedes it in its own group that is shared prefix or its own side."""
    owners = []  # (group, side) of each token; side -1 is the prefix
    for number, (prefix, *lengths) in enumerate(plan.groups):
        owners += [(number, -1)] * prefix
        owners += [(number, side) for side, length in enumerate(lengths) for _ in range(length)]
    sees = torch.zeros(len(owners), len(owners), dtype=torch.bool)
    for i, (group, side) in enumerate(owners):
        for j, (other_group, other_side) in enumerate(owners):
            sees[i, j] = group == other_group and other_side in (-1, side) and (j <= i or not plan.causal)
    return sees


def dense(query, key, value, sees, scaling):
    """(1, T, heads, D) of (1, heads, T, D) with keys of fewer heads, in the tensors' own precision."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(-1, -2)) * (DIM**-0.5 if scaling is None else scaling)
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def draw(tokens, heads, key_heads, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, DIM), (1, key_heads, tokens, DIM), (1, key_heads, tokens, VALUE_DIM)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def results(function, tensors):
    """Output and the gradient of a fixed random function of it."""
    output = function(*tensors)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), tensors)]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "grouped"), [("sdpa", True), ("varlen", True), ("varlen", False)])
@settings(max_examples=50)
@given(GROUPS, st.booleans(), st.sampled_from([(2, 2), (4, 2), (4, 1)]), st.sampled_from([None, 0.7]))
def test_attention_is_that_under_the_dense_mask_of_all_tokens_and_of_those_whose_rewards_are_read(
    kernel, grouped, groups, causal, heads, scaling
):
    row = row_of(groups, Packing(causal, kernel, grouped, pad_id=0, reads_last=True))
    at, sees = row.plan.reading.at, visible(row.plan)
    assert torch.equal(at[row.plan.reading.of_side], row.read_at)
    tensors = draw(row.num_tokens, *heads)
    options = {"packing": row.plan, "scaling": scaling}

    def everywhere(query, key, value):
        return packed_attention(SimpleNamespace(), query, key, value, None, **options)[0]

    def where_read(query, key, value):
        kept = {"kept": [key, value]}
        return packed_attention(SimpleNamespace(), query[:, :, at], key[:, :, :0], value, None, **options, **kept)[0]

    for computed, places in ((everywhere, slice(None)), (where_read, at)):
        expected = results(lambda *t, places=places: dense(*t, sees, scaling)[:, places], tensors)
        for one, other in zip(results(computed, tensors), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_keys_reach_the_kernel_once_for_each_key_head_where_it_takes_that(monkeypatch):
    seen = []

    def kernel(query, key, value, *rest, **options):
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return varlen_attn(query, key, value, *rest, **options)

    varlen_attn = module.varlen_attn
    monkeypatch.setattr(module, "varlen_attn", kernel)
    for grouped in (True, False):
        plan = plan_of([[[1, 1], [1, 0]]], causal=True, grouped=grouped)
        packed_attention(SimpleNamespace(), *draw(3, 4, 2), None, packing=plan)
    assert seen == [(4, 2, 2), (4, 4, 4)]


def test_whether_the_kernel_groups_heads_is_found_by_its_output_and_gradient(monkeypatch):
    """torch 2.11's has no argument for it: it may compute such heads all the same, refuse them, or mistake them."""
    cpu = torch.device("cpu")
    assert kernel_groups_heads(4, 2, DIM, cpu)
    varlen_attn = module.varlen_attn

    def without_argument(query, key, value, *rest, **options):
        assert "enable_gqa" not in options
        return varlen_attn(query, key, value, *rest, enable_gqa=query.shape[1] != key.shape[1], **options)

    def refusing(query, key, *rest, **options):
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("number of heads")
        return varlen_attn(query, key, *rest, **options)

    def mistaken(query, key, value, *rest, **options):
        repeats = query.shape[1] // key.shape[1]
        return varlen_attn(query, key.repeat(1, repeats, 1), value.repeat(1, repeats, 1), *rest, **options)

    monkeypatch.setattr(module, "ENABLES_GROUPS", False)
    for kernel, expected in ((without_argument, True), (refusing, False), (mistaken, False)):
        monkeypatch.setattr(module, "varlen_attn", kernel)
        assert kernel_groups_heads(4, 2, DIM, cpu) is expected


def test_under_autocast_the_kernel_gets_bfloat16_whatever_the_layer_hands_over(monkeypatch):
    """FlashAttention takes narrow floats only, and rotary positions leave float32 behind."""
    seen = []

    def kernel(query, key, value, *rest, **options):
        seen.append({tensor.dtype for tensor in (query, key, value)})
        return varlen_attn(query, key, value, *rest, **options)

    varlen_attn = module.varlen_attn
    plan = plan_of([[[1, 1, 0], [1, 1, 1, 0]], [[0, 1]]], causal=True)
    query, key, value = draw(len(visible(plan)), 2, 2, dtype=torch.float32)
    monkeypatch.setattr(module, "varlen_attn", kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = packed_attention(SimpleNamespace(), query, key, value.bfloat16(), None, packing=plan)
    assert seen == [{torch.bfloat16}]
    expected = dense(query, key, value, visible(plan), None)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("term", ["softcap", "s_aux", "position_bias"])
def test_a_term_that_is_not_computed_is_refused(term):
    plan = plan_of([[[1, 0]]], causal=True, kernel="sdpa")
    with pytest.raises(ModelError, match=term):
        packed_attention(SimpleNamespace(), *draw(2, 2, 2), None, packing=plan, **{term: torch.ones(1)})


@pytest.mark.slow
def test_dropout_of_attention_weights_is_computed_by_sequence_and_refused_by_the_varlen_kernel():
    tensors = [tensor.detach() for tensor in draw(4, 2, 2)]
    groups = [[[1, 1, 0], [1, 1, 1]]]
    by_sequence = plan_of(groups, causal=True, kernel="sdpa")
    torch.manual_seed(0)
    drops = [packed_attention(SimpleNamespace(), *tensors, None, packing=by_sequence, dropout=0.5)[0] for _ in range(2)]
    assert not torch.equal(*drops)
    mean = sum(
        packed_attention(SimpleNamespace(), *tensors, None, packing=by_sequence, dropout=0.5)[0] for _ in range(2000)
    ) / 2000  # fmt: skip
    torch.testing.assert_close(mean, dense(*tensors, visible(by_sequence), None), rtol=0.1, atol=0.1)
    with pytest.raises(ModelError, match="dropout"):
        packed_attention(SimpleNamespace(), *tensors, None, packing=plan_of(groups, causal=True), dropout=0.5)
