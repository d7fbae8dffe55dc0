"""Attention in batches against one fused call a sequence, and its second derivative against a dense mask."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.models.packing import attention, buckets
from rmcore.models.packing.layout import AttentionPlan

GROUP = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=3))
HEADS = st.sampled_from([(2, 2), (4, 2), (4, 1)])
DIM = 4


def plan_of(groups, *, causal):
    # A lone side shares nothing, and an encoder's groups are lone sides.
    if not causal:
        return AttentionPlan(tuple((0, length) for _, lengths in groups for length in lengths), causal=False)
    return AttentionPlan(tuple((prefix if len(own) > 1 else 0, *own) for prefix, own in groups), causal=True)


def draw(plan, heads, dtype=torch.float64, width=DIM):
    tokens = sum(map(sum, plan.groups))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, count, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(tensor.transpose(1, 2).requires_grad_() for tensor in drawn[:3]), drawn[3]]


def attend(plan, tensors, most_keys, *, batch_bytes=buckets.BATCH_BYTES):
    fresh = AttentionPlan(plan.groups, plan.causal)
    with (
        patch.object(attention, "LONGEST", dict.fromkeys((torch.float64, torch.bfloat16), most_keys)),
        patch.object(buckets, "BATCH_BYTES", batch_bytes),
    ):
        return attention.packed_attention(SimpleNamespace(), *tensors[:3], None, packing=fresh, scaling=0.7)[0]


def results(plan, tensors, most_keys, **options):
    output = attend(plan, tensors, most_keys, **options)
    return [output, *torch.autograd.grad(output, tensors[:3], tensors[3])]


@settings(max_examples=25, deadline=None)
@given(st.lists(GROUP, min_size=1, max_size=6), st.booleans(), HEADS, st.sampled_from([20, 10**6]), st.booleans())
def test_batches_give_what_one_call_a_sequence_gives_forwards_and_backwards(groups, causal, heads, most, one_each):
    plan = plan_of(groups, causal=causal)
    tensors = draw(plan, heads)
    found = results(plan, tensors, most, batch_bytes=1 if one_each else buckets.BATCH_BYTES)
    for one, other in zip(found, results(plan, tensors, 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_the_second_derivative_is_that_of_the_plain_formula(causal):
    plan = plan_of([(5, [3, 17]), (0, [4]), (2, [1, 2])], causal=causal)
    tensors = draw(plan, (4, 2))

    def second(most_keys, kernel):
        with torch.nn.attention.sdpa_kernel(kernel):
            output = attend(plan, tensors, most_keys)
            first = torch.autograd.grad(output.square().sum(), tensors[:3], create_graph=True)
            return torch.autograd.grad(sum(one.pow(3).sum() for one in first), tensors[:3])

    # The fused kernel has none, so the second derivative comes from the batches alone in the first call.
    found = second(10**6, torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    for one, other in zip(found, second(0, torch.nn.attention.SDPBackend.MATH), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_scores_in_bfloat16_cost_little_beside_what_rounding_queries_and_keys_costs(causal):
    plan = plan_of([(60, [90, 120]), (0, [200]), (30, [25, 40])], causal=causal)
    wide = draw(plan, (4, 2), width=32)
    narrow = [tensor.detach().bfloat16() for tensor in wide]
    narrow[:3] = [tensor.requires_grad_() for tensor in narrow[:3]]
    exact = results(plan, wide, 0)

    def errors(most_keys):
        found = zip(results(plan, narrow, most_keys), exact, strict=True)
        return [float(((one.double() - other).norm() / other.norm()).detach()) for one, other in found]

    for batched, fused in zip(errors(10**6), errors(0), strict=True):
        assert batched < 2 * fused


def test_a_float32_row_under_autocast_is_computed_in_bfloat16():
    plan = plan_of([(3, [4, 5])], causal=True)
    tensors = draw(plan, (2, 2), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(plan, tensors, 10**6).dtype == torch.bfloat16
        assert attend(plan, tensors, 0).dtype == torch.bfloat16


def test_nothing_of_row_by_row_is_kept():
    plan = plan_of([(40, [20, 24])] * 50, causal=True)
    tensors = draw(plan, (2, 2), dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda one: one):
        attend(plan, tensors, 10**6)
    tokens, keys = sum(map(sum, plan.groups)), 80  # the longest of 64, rounded up with some room
    assert sum(kept) < 2 * tokens * 2 * (keys + 6 * DIM)
