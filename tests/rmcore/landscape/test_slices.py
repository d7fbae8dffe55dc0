"""Slices of the loss: right at the points that are known otherwise, and the model untouched afterwards."""

import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.landscape.directions import Quadratic, random_direction, symmetric_distances
from rmcore.landscape.operators import LossGaussNewton, LossHessian
from rmcore.landscape.sam import sam_sharpness
from rmcore.landscape.slices import loss_slice, loss_surface

NAMED = {"name": "a direction", "unit": "steps"}
PLANE = {"name_x": "first", "name_y": "second", "unit": "steps"}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_bits(model: nn.Module, before: list[Tensor]) -> bool:
    after = [p.detach() for p in model.parameters()]
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(after, before, strict=True))


def loss_at(model: nn.Module, rows: dict[str, Tensor], flat: Tensor, temperature: float = 1.0) -> tuple[float, float]:
    """Loss and accuracy of the model with its weights moved by `flat`, by torch.func."""
    model.eval()
    parts = flat.split([p.numel() for p in model.parameters()])
    moved = {name: p + part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}
    chosen, rejected = torch.func.functional_call(model, moved, kwargs=rows).logits[:, 0].chunk(2)
    margins = (chosen - rejected).detach()
    return float(softplus(-margins / temperature).mean()), float((margins > 0).double().mean())


# Along a line.


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_every_point_is_the_loss_and_accuracy_of_the_moved_model(tiny, rows, world, temperature):
    operator = LossHessian(tiny, world.cut_rows(rows, [2, 4, 3]), temperature=temperature)
    direction = random_direction(operator, 3)
    distances = symmetric_distances(0.7, 9)
    found = loss_slice(operator, direction, distances, **NAMED)
    truth = [loss_at(tiny, rows, d * direction, temperature) for d in distances]
    assert found.loss == pytest.approx([loss for loss, _ in truth], rel=1e-12)
    assert found.accuracy == pytest.approx([accuracy for _, accuracy in truth])
    assert len(set(found.accuracy)) > 1
    assert found.loss[4] == pytest.approx(operator.loss(), rel=1e-12)
    assert found.loss_at_model == operator.loss()
    assert found.length == pytest.approx(float(direction.norm()))
    assert (found.num_pairs, found.temperature, found.num_not_finite) == (9, temperature, 0)


@pytest.mark.parametrize("index", [0, 30, -1])
def test_the_second_difference_along_an_eigenvector_is_its_eigenvalue(tiny, rows, truth, index):
    values, vectors = torch.linalg.eigh(truth)
    step = 1e-3
    operator = LossHessian(tiny, [rows])
    below, center, above = loss_slice(operator, vectors[:, index], (-step, 0.0, step), **NAMED).loss
    # The truncation is step^2 / 12 times a fourth derivative of the size of the largest eigenvalue or below 100 of it.
    bound = step**2 / 12 * 100 * float(values.abs().max())
    assert (above - 2 * center + below) / step**2 == pytest.approx(float(values[index]), abs=bound)
    assert float(values[0]) < -bound < bound < float(values[-1])


@pytest.mark.parametrize("index", [0, -1])
def test_the_quadratic_is_left_at_third_order(tiny, rows, truth, world, index):
    values, vectors = torch.linalg.eigh(truth)
    vector = vectors[:, index]
    operator = LossHessian(tiny, [rows])
    slope = float(operator.gradient() @ vector)
    quadratic = Quadratic(operator.loss(), slope, float(values[index]))
    found = loss_slice(operator, vector, (0.0, 0.01, 0.02), **NAMED, quadratic=quadratic)
    errors = [abs(a - b) for a, b in zip(found.loss, found.quadratic, strict=True)]
    assert errors[0] < 1e-14
    assert 6 < errors[2] / errors[1] < 10  # 2^3
    assert (found.slope, found.curvature) == (slope, float(values[index]))
    assert "quadratic" not in found.reasons


def test_the_gauss_newton_operator_sees_the_same_loss(tiny, rows):
    hessian, gauss_newton = LossHessian(tiny, [rows]), LossGaussNewton(tiny, [rows])
    direction = random_direction(hessian, 0)
    first, second = (loss_slice(op, direction, (-0.5, 0.5), **NAMED) for op in (hessian, gauss_newton))
    assert first == second


def test_only_the_chosen_parameters_move(tiny, rows):
    head = LossHessian(tiny, [rows], parameters="head")
    everything = LossHessian(tiny, [rows])
    direction = random_direction(head, 0)
    padded = torch.cat([torch.zeros(everything.num_parameters - head.num_parameters).double(), direction])
    assert loss_slice(head, direction, (1.0,), **NAMED).loss == pytest.approx(
        loss_slice(everything, padded, (1.0,), **NAMED).loss, rel=1e-12
    )


def test_losses_that_are_not_finite_are_left_out_and_counted(tiny, rows):
    operator = LossHessian(tiny, [rows])
    direction = random_direction(operator, 0)
    before = weights_of(tiny)
    found = loss_slice(operator, direction, (-1e308, -0.1, 0.0, 1e308), **NAMED)
    assert [loss is None for loss in found.loss] == [True, False, False, True]
    assert [accuracy is None for accuracy in found.accuracy] == [True, False, False, True]
    assert found.num_not_finite == 2
    assert "2 of 4 points" in found.reasons["loss"]
    assert same_bits(tiny, before)


def test_ties_are_half_right(tiny, rows):
    operator = LossHessian(tiny, [rows], parameters="score.weight")
    direction = -tiny.score.weight.detach().flatten()  # at 1 every reward is the bias
    found = loss_slice(operator, direction, (0.0, 1.0), **NAMED)
    assert found.tie_rate == (0.0, 1.0)
    assert found.accuracy[1] == 0.5
    assert found.loss[1] == pytest.approx(math.log(2))
    assert "accuracy" not in found.reasons


def test_progress_counts_every_point_and_ends_at_the_total(tiny, rows):
    operator = LossHessian(tiny, [rows])
    x, y = random_direction(operator, 0), random_direction(operator, 1)
    seen: list[tuple[int, int]] = []
    loss_slice(operator, x, (-1.0, 0.0, 1.0), **NAMED, report=lambda *now: seen.append(now[:2]))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    loss_surface(operator, x, y, (0.0, 1.0), (0.0, 1.0, 2.0), **PLANE, report=lambda *now: seen.append(now[:2]))
    assert seen == [(done, 6) for done in range(1, 7)]


# The model afterwards.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_is_left_as_it_was_found(world, rows, dtype):
    tiny = world.TinyReward().to(dtype).train()
    tiny.hidden.eval()
    tiny.embedding.weight.requires_grad_(False)
    tiny.hidden.bias.grad = torch.ones_like(tiny.hidden.bias)
    with torch.no_grad():
        tiny.hidden.bias[0] = -0.0  # a zero whose sign a sum would lose
    before = weights_of(tiny)
    operator = LossHessian(tiny, [rows])
    x, y = random_direction(operator, 0), random_direction(operator, 1)
    loss_slice(operator, x, symmetric_distances(1.0, 5), **NAMED)
    loss_surface(operator, x, y, (0.0, 1e30), (0.3,), **PLANE)
    sam_sharpness(operator)
    assert same_bits(tiny, before)
    assert (tiny.training, tiny.hidden.training) == (True, False)
    assert [p.requires_grad for p in tiny.parameters()] == [False, True, True, True, True]
    assert [p.grad is None for p in tiny.parameters()] == [True, True, False, True, True]


def test_an_exception_half_way_leaves_the_weights_as_they_were(tiny, rows):
    operator = LossHessian(tiny, [rows])
    before = weights_of(tiny)

    def stop(done: int, total: int, text: str) -> None:
        assert not same_bits(tiny, before)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_slice(operator, random_direction(operator, 0), (1.0, 2.0), **NAMED, report=stop)
    assert same_bits(tiny, before)


def test_kept_graphs_give_the_same_products_afterwards(tiny, rows):
    operator = LossHessian(tiny, [rows], keep_graphs=True)
    vector = random_direction(operator, 0)
    before = operator.product(vector)
    loss_slice(operator, vector, (-1.0, 1.0), **NAMED)
    assert torch.equal(operator.product(vector), before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_autograd_mode_does_not_matter(world, rows, mode):
    operator = LossHessian(world.TinyReward(), [rows])
    direction = random_direction(operator, 0)
    expected = loss_slice(operator, direction, (-1.0, 1.0), **NAMED)
    with mode():
        assert loss_slice(operator, direction, (-1.0, 1.0), **NAMED) == expected


# Over a plane.


def test_the_surface_holds_the_slices_along_both_axes(tiny, rows):
    operator = LossHessian(tiny, [rows])
    x, y = random_direction(operator, 0), random_direction(operator, 1)
    xs, ys = symmetric_distances(0.5, 5), symmetric_distances(0.25, 3)
    surface = loss_surface(operator, x, y, xs, ys, **PLANE)
    assert (len(surface.loss), {len(row) for row in surface.loss}) == (3, {5})
    assert surface.loss[1] == pytest.approx(loss_slice(operator, x, xs, **NAMED).loss, rel=1e-12)
    upward = y - (x @ y) / (x @ x) * x
    upward *= y.norm() / upward.norm()
    along_y = loss_slice(operator, upward, ys, **NAMED)
    assert [row[2] for row in surface.loss] == pytest.approx(along_y.loss, rel=1e-9)
    assert [row[2] for row in surface.accuracy] == pytest.approx(along_y.accuracy)
    corner = loss_at(tiny, rows, xs[-1] * x + ys[0] * upward)
    assert surface.loss[0][-1] == pytest.approx(corner[0], rel=1e-9)
    assert surface.cosine == pytest.approx(float(x @ y / x.norm() / y.norm()))
    assert (surface.length_x, surface.length_y) == pytest.approx((float(x.norm()), float(y.norm())))


def test_a_second_direction_is_changed_by_no_multiple_of_the_first_but_its_length(tiny, rows):
    """Any two directions of one plane draw the same plane."""
    operator = LossHessian(tiny, [rows])
    x, y = random_direction(operator, 0), random_direction(operator, 1)
    y = y - (x @ y) / (x @ x) * x
    sheared = (y + 3 * x) * y.norm() / (y + 3 * x).norm()
    straight = loss_surface(operator, x, y, (0.1, 0.2), (-0.3, 0.3), **PLANE)
    again = loss_surface(operator, x, sheared, (0.1, 0.2), (-0.3, 0.3), **PLANE)
    for row, other in zip(straight.loss, again.loss, strict=True):
        assert row == pytest.approx(other, rel=1e-9)
    assert abs(straight.cosine) < 1e-12
    assert again.cosine > 0.9


def test_parallel_directions_span_no_plane(tiny, rows):
    operator = LossHessian(tiny, [rows])
    x = random_direction(operator, 0)
    with pytest.raises(ConfigError, match="a line, not a plane"):
        loss_surface(operator, x, -2 * x, (0.0,), (0.0,), **PLANE)


# Records and refusals.


def test_records_are_json(tiny, rows):
    operator = LossHessian(tiny, [rows])
    x, y = random_direction(operator, 0), random_direction(operator, 1)
    line = loss_slice(operator, x, (-1e308, 0.0), **NAMED)
    surface = loss_surface(operator, x, y, (0.0, 0.1), (0.0,), **PLANE)
    for record in (line, surface, sam_sharpness(operator)):
        assert json.loads(json.dumps(record.to_dict(), allow_nan=False)) == record.to_dict()
    assert set(line.reasons) == {"loss", "accuracy", "tie_rate", "quadratic", "slope", "curvature"}


def test_unusable_directions_distances_and_models_are_refused(tiny, rows):
    operator = LossHessian(tiny, [rows])
    good = random_direction(operator, 0)
    for direction, match in ((good[:-1], "a flat one"), (good * 0, "leads nowhere"), (good / 0, "leads nowhere")):
        with pytest.raises(ConfigError, match=match):
            loss_slice(operator, direction, (0.0,), **NAMED)
    for distances in ((), (0.0, float("nan")), (float("inf"),)):
        with pytest.raises(ConfigError, match="no places"):
            loss_slice(operator, good, distances, **NAMED)
    tiny.score.weight.data[0, 0] = float("nan")
    with pytest.raises(CurvatureError, match="go back to an earlier one"):
        loss_slice(operator, good, (0.0,), **NAMED)
