"""Peaks of tensors whose sizes and lives are known."""

import pytest
import torch
from torch import nn

from rmcore.training.profiling import TensorPeak

KIB = 256  # float32 numbers


def zeros(kib):
    return torch.zeros(kib * KIB)


def test_the_peak_is_the_most_that_was_alive_at_once():
    with TensorPeak() as peak:
        a, b = zeros(10), zeros(3)
        assert peak.num_bytes == 13 * 1024
        del a
        c = zeros(4)
        assert peak.num_bytes == 13 * 1024  # 7 now
        d = zeros(7)
        assert peak.num_bytes == 14 * 1024
    del b, c, d
    assert peak.num_bytes == 14 * 1024


def test_views_and_changes_in_place_add_nothing():
    with TensorPeak() as peak:
        a = zeros(8)
        b = a.view(2, -1).t()[1:].add_(1).unsqueeze(0).detach()
        a.zero_()
        torch.add(a, 1, out=a)
        torch._foreach_add_([a], 1.0)
        c = a.split(KIB)
    assert peak.num_bytes == 8 * 1024
    assert len(c) == 8
    assert b.untyped_storage() is a.untyped_storage()


def test_activations_live_until_the_backward_pass_has_used_them():
    """exp keeps its output: three of them at once, and in the backward pass one gradient, or two in turn, on top."""
    start = zeros(4).requires_grad_()
    with TensorPeak() as peak:
        end = start.exp().exp().exp()
        assert peak.num_bytes == 3 * 4 * 1024
        end.backward(torch.ones_like(end))
        del end
        high = peak.num_bytes
        assert 5 * 4 * 1024 <= high <= 6 * 4 * 1024
        other = zeros(high // 1024 - 4)  # beside the gradient of start
        assert peak.num_bytes == high
    assert other.nbytes + start.grad.nbytes == high


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_counts_what_it_makes_and_not_what_it_changes(optimizer):
    weight = nn.Parameter(zeros(16))
    fused = optimizer([weight], lr=0.1, fused=True)
    for is_first in (True, False):
        weight.grad = zeros(16)
        with TensorPeak() as peak:
            fused.step()
        moments = 2 if optimizer is torch.optim.AdamW and is_first else 0
        assert moments * 16 * 1024 <= peak.num_bytes <= moments * 16 * 1024 + 64  # a step count or two
