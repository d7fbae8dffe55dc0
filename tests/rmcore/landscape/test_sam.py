"""SAM's sharpness: predicted by slope and curvature, and the rise along the gradient."""

from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from rmcore.core.errors import ConfigError
from rmcore.landscape.directions import random_direction
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.sam import sam_sharpness
from rmcore.landscape.slices import loss_slice

NAMED = {"name": "a direction", "unit": "steps"}


def test_sam_sharpness_is_the_slope_to_first_order_and_the_curvature_to_second(tiny, rows):
    operator = LossHessian(tiny, [rows])
    norm = float(operator.gradient().norm())
    large, small = sam_sharpness(operator, 0.02), sam_sharpness(operator, 0.01)
    assert small.first_order == pytest.approx(0.01 * norm)
    assert large.sharpness > small.sharpness > 0
    assert 3 < (large.sharpness - large.first_order) / (small.sharpness - small.first_order) < 5  # error of order 2^2
    assert 6 < (large.sharpness - large.second_order) / (small.sharpness - small.second_order) < 10  # of order 2^3
    assert large.loss_at_radius == pytest.approx(large.loss + large.sharpness)


def test_sam_sharpness_is_the_end_of_the_slice_along_the_gradient(tiny, rows):
    operator = LossHessian(tiny, [rows], temperature=2.0)
    gradient = operator.gradient()
    end = loss_slice(operator, gradient / gradient.norm(), (0.3,), **NAMED).loss[0]
    found = sam_sharpness(operator, 0.3)
    assert found.loss_at_radius == pytest.approx(end, rel=1e-12)
    assert (found.num_pairs, found.temperature) == (9, 2.0)


def test_no_step_of_that_length_in_a_sample_rises_more_at_first_order(tiny, rows):
    """The gradient is the steepest way: at a radius where curvature does not count, nothing rises more."""
    operator = LossHessian(tiny, [rows])
    best = sam_sharpness(operator, 1e-4).sharpness
    for seed in range(20):
        direction = random_direction(operator, seed)
        rise = loss_slice(operator, direction / direction.norm(), (-1e-4, 1e-4), **NAMED)
        assert max(rise.loss) - rise.loss_at_model < best


class Steep(nn.Module):
    """The tiny model with exponential rewards: not finite when its weights are large."""

    def __init__(self, tiny: nn.Module) -> None:
        super().__init__()
        self.tiny = tiny

    def forward(self, **rows: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.tiny(**rows).logits.exp())


def test_sam_without_a_gradient_or_a_finite_loss_says_so(tiny, rows):
    far = sam_sharpness(LossHessian(Steep(tiny), [rows]), 1e6)
    assert far.sharpness is None
    assert far.second_order is not None
    assert "not finite" in far.reasons["sharpness"]
    nn.init.zeros_(tiny.score.weight)  # then nothing below the head changes a reward
    flat = sam_sharpness(LossHessian(tiny, [rows], parameters="hidden"))
    assert (flat.sharpness, flat.second_order, flat.first_order) == (None, None, 0.0)
    assert set(flat.reasons) == {"loss_at_radius", "sharpness", "second_order"}


@pytest.mark.parametrize("radius", [0.0, -1.0, float("inf"), float("nan")])
def test_a_radius_that_is_no_length_is_refused(tiny, rows, radius):
    with pytest.raises(ConfigError, match="no length"):
        sam_sharpness(LossHessian(tiny, [rows]), radius)
