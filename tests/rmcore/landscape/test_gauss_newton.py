"""The Gauss-Newton matrix: J^T D J, positive semidefinite, and the Hessian exactly where margins are linear."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import exact_models
from rmcore.core.errors import CurvatureError
from rmcore.landscape.eigensolvers import dense_matrix
from rmcore.landscape.operators import LossGaussNewton, LossHessian, gauss_newton_weights

ARCHITECTURES, ROUNDING = exact_models.ARCHITECTURES, exact_models.ROUNDING
relative_error, random_vectors = exact_models.relative_error, exact_models.random_vectors

NUM_PAIRS = 7
ROWS = exact_models.draw_rows(NUM_PAIRS)
some = settings(max_examples=15)
seeds = st.integers(0, 10_000)
temperatures = st.floats(0.2, 20)
INNER = {
    "qwen2": "model.layers.1.self_attn.v_proj",
    "llama": "model.layers.0.mlp",
    "bert": "bert.encoder.layer.0.attention",
}


@cache
def model_of(architecture):
    return exact_models.exact(exact_models.make_model(architecture))


@cache
def linearised(architecture):
    """(n, N) gradients of the margins, and the (n,) margins."""
    function = exact_models.functional(model_of(architecture), ROWS)
    return torch.func.jacrev(function.margins)(function.flat).detach(), function.margins(function.flat).detach()


def dense(operator):
    return dense_matrix(operator.product, operator.num_parameters, operator.dtype, operator.device)


@some
@given(architecture=st.sampled_from(ARCHITECTURES), temperature=temperatures, seed=seeds)
def test_a_product_is_jacobian_times_weights_times_jacobian(architecture, temperature, seed):
    jacobian, margins = linearised(architecture)
    weights = 1 / (temperature**2 * (2 + 2 * torch.cosh(margins / temperature)))  # sigmoid'(x) = 1 / (2 + 2 cosh x)
    operator = LossGaussNewton(model_of(architecture), [ROWS], temperature=temperature)
    vector = random_vectors(1, operator.num_parameters, seed)[0]
    expected = jacobian.T @ (weights * (jacobian @ vector)) / NUM_PAIRS
    assert relative_error(operator.product(vector), expected) < ROUNDING


@some
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    seed=seeds,
    scale=st.floats(1e-3, 1e3),
    temperature=temperatures,
    towards_null=st.booleans(),
)
def test_it_is_positive_semidefinite(architecture, seed, scale, temperature, towards_null):
    operator = LossGaussNewton(model_of(architecture), [ROWS], temperature=temperature)
    vector = scale * random_vectors(1, operator.num_parameters, seed)[0]
    image = operator.product(vector)
    if towards_null:  # where the quadratic form is zero, and a wrong sign would show first
        jacobian, _ = linearised(architecture)
        vector = vector - torch.linalg.pinv(jacobian) @ (jacobian @ vector)
        assert operator.product(vector).norm() < 1e-9 * image.norm()
    else:
        assert vector @ image > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_rank_is_at_most_the_number_of_pairs_and_no_eigenvalue_is_negative(architecture):
    rows = exact_models.draw_rows(3, seed=5)
    operator = LossGaussNewton(model_of(architecture), [rows], parameters=INNER[architecture])
    assert operator.num_parameters > 20
    values = torch.linalg.eigvalsh(dense(operator)).flip(0)
    assert values[2] > 1e-6 * values[0]
    assert values[3:].abs().max() < 1e-13 * values[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_it_is_the_hessian_in_a_linear_head_and_nowhere_else(architecture, temperature):
    def both(parameters):
        setting = {"parameters": parameters, "temperature": temperature}
        operators = [kind(model_of(architecture), [ROWS], **setting) for kind in (LossGaussNewton, LossHessian)]
        vectors = random_vectors(4, operators[0].num_parameters)
        return [operator.products(vectors) for operator in operators]

    assert relative_error(*both("head")) < ROUNDING
    assert relative_error(*both("all")) > 0.01
    assert relative_error(*both(INNER[architecture])) > 0.01


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrix_of_one_module_is_the_sub_block_of_the_whole(architecture):
    whole = LossGaussNewton(model_of(architecture), [ROWS])
    part = LossGaussNewton(model_of(architecture), [ROWS], parameters=INNER[architecture])
    inside = torch.cat(
        [torch.full((p.numel(),), name in part.names) for name, p in zip(whole.names, whole.parameters, strict=True)]
    )
    vectors = random_vectors(3, part.num_parameters)
    padded = torch.zeros(3, whole.num_parameters, dtype=torch.float64)
    padded[:, inside] = vectors
    assert relative_error(part.products(vectors), whole.products(padded)[:, inside]) < ROUNDING


# Where margins are large, as they are after training.


@given(margin=st.floats(-30, 30), temperature=st.floats(0.5, 3))
def test_weights_are_even_and_at_most_a_quarter(margin, temperature):
    pair = torch.tensor([margin, -margin], dtype=torch.float64)
    weights = gauss_newton_weights(pair, temperature)
    assert weights[0] == pytest.approx(float(weights[1]), rel=1e-9, abs=0)
    assert 0 < weights.max() <= 0.25 / temperature**2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("margin", [1.0, 5.0, 10.0, 15.0, 20.0, 40.0])
def test_weights_keep_their_digits_in_float32(margin, sign):
    """sigmoid'(m) = sigmoid(m) sigmoid(-m); with 1 - sigmoid(m) nothing is left of it from m = 17 on."""
    found = float(gauss_newton_weights(torch.tensor([sign * margin]))[0])
    exact = torch.tensor([margin], dtype=torch.float64)
    assert found == pytest.approx(float(1 / (2 + 2 * torch.cosh(exact))), rel=1e-5, abs=0)


class Certain(nn.Module):
    """Rewards of chosen sides 15 logits higher: every pair is right and sure."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **rows):
        logits = self.inner(**rows).logits
        half = len(logits) // 2
        return SimpleNamespace(logits=logits + torch.tensor([[15.0]] * half + [[0.0]] * half, dtype=logits.dtype))


def test_a_float32_model_with_large_margins_has_the_gauss_newton_product_of_the_float64_one():
    model = exact_models.make_model("qwen2")
    with torch.no_grad():
        model.score.weight.mul_(0.1)  # the model's own margins stay well below 15
    wide = LossGaussNewton(Certain(exact_models.exact(exact_models.make_model("qwen2"))), [ROWS], parameters="head")
    with torch.no_grad():
        wide.module.inner.score.weight.copy_(model.score.weight)
    narrow = LossGaussNewton(Certain(model), [ROWS], parameters="head")
    vector = random_vectors(1, wide.num_parameters)[0]
    assert wide.margins().min() > 10
    assert relative_error(narrow.product(vector.float()), wide.product(vector)) < 1e-4


# Edges.


@pytest.mark.parametrize("operator_class", [LossGaussNewton, LossHessian])
def test_parameters_that_no_margin_depends_on_have_zero_curvature(operator_class):
    model = exact_models.make_model("qwen2")
    model.spare = nn.Linear(3, 2)
    everything = operator_class(model, [ROWS])
    inside = torch.cat([torch.full((p.numel(),), "spare" in n) for n, p in model.named_parameters()])
    image = everything.product(random_vectors(1, everything.num_parameters, dtype=torch.float32)[0])
    assert inside.sum() == 8
    assert not image[inside].any()
    assert image[~inside].any()
    alone = operator_class(model, [ROWS], parameters="spare")
    assert torch.equal(alone.products(torch.eye(8)), torch.zeros(8, 8))
    assert torch.equal(alone.gradient(), torch.zeros(8))


@pytest.mark.parametrize("operator_class", [LossGaussNewton, LossHessian])
def test_a_shift_of_all_rewards_is_flat(operator_class):
    bert = operator_class(model_of("bert"), [ROWS], parameters="classifier.bias")
    assert bert.num_parameters == 1
    assert abs(float(bert.product(torch.ones(1, dtype=torch.float64)))) < 1e-15


def test_overflow_and_nan_are_reported():
    model = exact_models.make_model("llama")
    operator = LossGaussNewton(model, [ROWS], keep_graphs=False)
    vector = random_vectors(1, operator.num_parameters, dtype=torch.float32)[0]
    with pytest.raises(CurvatureError, match="NaN or infinite"):
        operator.product(vector * 1e38)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(CurvatureError, match="NaN or infinite"):
        operator.product(vector)
    with pytest.raises(CurvatureError, match="mean loss over 7 pairs is nan"):
        LossGaussNewton.from_loader(model, [ROWS])
