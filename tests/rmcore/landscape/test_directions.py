"""Directions: scaled to the model's filters, or leading to another checkpoint."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rmcore.core.errors import ConfigError, CurvatureError, ModelError
from rmcore.landscape.directions import (
    Quadratic,
    checkpoint_direction,
    filter_normalized,
    random_direction,
    split_direction,
    symmetric_distances,
)
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.slices import loss_slice

NAMED = {"name": "a direction", "unit": "steps"}
properties = settings(max_examples=50, deadline=None, derandomize=True)
magnitudes = st.floats(1e-6, 1e6)
signed = magnitudes | magnitudes.map(lambda value: -value)


# Filters.


def test_each_row_has_the_norm_of_the_models_row_and_its_own_direction(tiny, rows):
    operator = LossHessian(tiny, [rows])
    raw = random_direction(operator, 0)
    found = filter_normalized(operator, raw)
    for p, piece, before in zip(
        operator.parameters, split_direction(operator, found), split_direction(operator, raw), strict=True
    ):
        if p.ndim == 1:
            assert not piece.any()
            continue
        assert torch.allclose(piece.norm(dim=1), p.detach().norm(dim=1), rtol=1e-12)
        cosines = (piece * before).sum(1) / piece.norm(dim=1) / before.norm(dim=1)
        assert torch.allclose(cosines, torch.ones_like(cosines), rtol=1e-12)


def test_no_scale_of_the_direction_or_of_one_of_its_rows_matters(tiny, rows):
    operator = LossHessian(tiny, [rows])
    raw = random_direction(operator, 0)
    scaled = 1e-3 * raw
    scaled[:4] *= 50.0  # the first row of the embedding
    assert torch.allclose(filter_normalized(operator, scaled), filter_normalized(operator, raw), rtol=1e-12)
    twice = filter_normalized(operator, filter_normalized(operator, raw))
    assert torch.allclose(twice, filter_normalized(operator, raw), rtol=1e-12)


class Rectified(nn.Module):
    """Two layers around a ReLU: scaling one up and the other down by as much changes no reward."""

    def __init__(self, tiny: nn.Module) -> None:
        super().__init__()
        self.tiny = tiny

    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        hidden = self.tiny.embedding(input_ids).mean(1)
        logits = self.tiny.score(torch.relu(self.tiny.hidden(hidden)))
        return type("Output", (), {"logits": logits})


def test_a_rescaled_model_with_the_same_rewards_has_the_same_slice(tiny, rows):
    model = Rectified(tiny)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.tiny.hidden.weight *= 20
        scaled.tiny.hidden.bias *= 20
        scaled.tiny.score.weight /= 20
    first, second = (LossHessian(each, [rows]) for each in (model, scaled))
    raw = random_direction(first, 0)
    normalized = [loss_slice(op, filter_normalized(op, raw), (-1.0, -0.3, 0.8), **NAMED).loss for op in (first, second)]
    assert normalized[0] == pytest.approx(normalized[1], rel=1e-10)
    plain = [loss_slice(op, raw, (-1.0, -0.3, 0.8), **NAMED).loss for op in (first, second)]
    assert plain[0] != pytest.approx(plain[1], rel=0.05)  # without it the picture is another one


def test_zero_filters_stay_and_a_direction_of_nothing_is_refused(tiny, rows):
    with torch.no_grad():
        tiny.hidden.weight[2] = 0.0
    operator = LossHessian(tiny, [rows], parameters="hidden")
    found = filter_normalized(operator, random_direction(operator, 0))
    assert torch.isfinite(found).all()
    assert not found[8:12].any()
    assert found[:8].all()
    raw = torch.zeros(operator.num_parameters, dtype=torch.float64)
    raw[0] = 1.0
    assert int(filter_normalized(operator, raw).count_nonzero()) == 1
    bias = LossHessian(tiny, [rows], parameters="hidden.bias")
    with pytest.raises(ModelError, match="no filter with a norm"):
        filter_normalized(bias, random_direction(bias, 0))


def test_a_direction_comes_from_its_seed_alone(tiny, rows):
    operator = LossHessian(tiny, [rows])
    torch.manual_seed(0)
    first = random_direction(operator, 4)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(random_direction(operator, 4), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(float(first @ random_direction(operator, 5)) / float(first @ first)) < 0.5


# To another checkpoint.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_line_begins_here_and_ends_at_the_other_checkpoint(world, rows, dtype):
    torch.manual_seed(3)
    this, other = world.TinyReward().to(dtype), world.TinyReward().to(dtype)
    here, there = LossHessian(this, [rows]), LossHessian(other, [rows])
    found = loss_slice(here, checkpoint_direction(here, other), (0.0, 1.0), **NAMED)
    assert found.loss == pytest.approx((here.loss(), there.loss()), rel=1e-6 if dtype == torch.float32 else 1e-12)
    back = checkpoint_direction(there, this)
    assert torch.equal(back, -checkpoint_direction(here, other))


def test_parameters_are_matched_by_name_not_by_place(tiny, rows):
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        other.score.weight += 1.0
    shuffled = nn.Module()
    for name in reversed(dict(other.named_children())):
        shuffled.add_module(name, other.get_submodule(name))
    operator = LossHessian(tiny, [rows])
    moved = split_direction(operator, checkpoint_direction(operator, shuffled))
    assert [bool(piece.any()) for piece in moved] == [name == "score.weight" for name in operator.names]
    assert torch.allclose(moved[operator.names.index("score.weight")], torch.ones(1, 5).double())


def test_a_part_of_the_model_moves_alone(tiny, rows, world):
    other = world.TinyReward().double()
    head = LossHessian(tiny, [rows], parameters="head")
    direction = checkpoint_direction(head, other)
    assert direction.shape == (6,)
    mixture = copy.deepcopy(tiny)
    mixture.score.load_state_dict(other.score.state_dict())
    end = loss_slice(head, direction, (1.0,), **NAMED).loss[0]
    assert end == pytest.approx(LossHessian(mixture, [rows]).loss(), rel=1e-12)


def test_another_architecture_is_refused_by_the_parameter_that_differs(tiny, rows, world):
    operator = LossHessian(tiny, [rows])
    wider = world.TinyReward().double()
    wider.hidden = nn.Linear(4, 6).double()
    with pytest.raises(ModelError, match=r"hidden\.weight has the shape \(5, 4\) in this model and the shape \(6, 4\)"):
        checkpoint_direction(operator, wider)
    lacking = world.TinyReward().double()
    lacking.hidden = nn.Linear(4, 5, bias=False).double()
    with pytest.raises(ModelError, match=r"hidden\.bias .* no such parameter in the other"):
        checkpoint_direction(operator, lacking)
    lacking.hidden = nn.Linear(4, 5).double()
    lacking.extra = nn.Linear(1, 1).double()
    with pytest.raises(ModelError, match=r"2 weights or buffers .* such as extra\.bias"):
        checkpoint_direction(operator, lacking)
    with pytest.raises(CurvatureError, match="bfloat16"):
        checkpoint_direction(operator, world.TinyReward().bfloat16())


def test_frozen_weights_and_buffers_must_be_equal_where_all_others_move(tiny, rows):
    tiny.embedding.weight.requires_grad_(False)
    tiny.register_buffer("shift", torch.zeros(2))
    operator = LossHessian(tiny, [rows])
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        other.score.weight += 1.0
    assert checkpoint_direction(operator, other).any()
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1.0
        other.shift += 1
    with pytest.raises(ModelError, match=r"2 weights or buffers .* such as embedding\.weight"):
        checkpoint_direction(operator, other)
    head = LossHessian(tiny, [rows], parameters="head")
    assert checkpoint_direction(head, other).any()


# How far.


@properties
@given(loss=magnitudes, slope=signed, curvature=signed, without=st.sampled_from(["", "slope", "curvature"]))
def test_the_loss_changes_by_itself_at_the_doubling_distance(loss, slope, curvature, without):
    slope, curvature = (
        0.0 if without == name else value for name, value in (("slope", slope), ("curvature", curvature))
    )
    distance = Quadratic(loss, slope, curvature).doubling_distance()
    rising = Quadratic(loss, abs(slope), abs(curvature))
    assert rising.at(distance) == pytest.approx(2 * loss, rel=1e-9)
    assert rising.at(0.5 * distance) < 2 * loss


def test_a_loss_that_does_not_change_has_no_doubling_distance():
    for flat in (Quadratic(0.7, 0.0, 0.0), Quadratic(0.0, 1.0, 1.0)):
        with pytest.raises(CurvatureError, match="no distance doubles it"):
            flat.doubling_distance()


@properties
@given(half_width=magnitudes, half=st.integers(1, 60))
def test_distances_are_even_symmetric_and_hold_the_model(half_width, half):
    found = symmetric_distances(half_width, 2 * half + 1)
    assert found[half] == 0.0
    assert (found[0], found[-1]) == (-half_width, half_width)
    assert [-d for d in reversed(found)] == list(found)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert gaps == pytest.approx([half_width / half] * (2 * half), rel=1e-9)


@pytest.mark.parametrize(("half_width", "num"), [(1.0, 4), (1.0, 1), (0.0, 3), (-1.0, 3), (float("inf"), 3)])
def test_distances_without_a_middle_or_a_width_are_refused(half_width, num):
    with pytest.raises(ConfigError):
        symmetric_distances(half_width, num)
