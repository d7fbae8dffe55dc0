"""Both curvatures against the dense float64 truth of torch.func, on the architectures that reward models have."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exact_models
from rmcore.landscape.analyzer import HessianAnalyzer
from rmcore.landscape.operators import LossHessian
from rmcore.training.losses import PairLoss

ARCHITECTURES, ROUNDING = exact_models.ARCHITECTURES, exact_models.ROUNDING
relative_error, random_vectors = exact_models.relative_error, exact_models.random_vectors

NUM_PAIRS = 12
ROWS = exact_models.draw_rows(NUM_PAIRS)
few = settings(max_examples=10)
seeds = st.integers(0, 10_000)


@cache
def model_of(architecture):
    return exact_models.exact(exact_models.make_model(architecture))


@cache
def truth_of(architecture, temperature=1.0):
    function = exact_models.functional(model_of(architecture), ROWS)
    return function.hessian(temperature)


def partitions(total):
    cuts = st.sets(st.integers(1, total - 1), max_size=5)
    return cuts.map(lambda chosen: [b - a for a, b in zip([0, *sorted(chosen)], [*sorted(chosen), total], strict=True)])


# The truth.


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_truth_is_float64_throughout_and_not_degenerate(architecture):
    """A cast to float32 anywhere would show as asymmetry of about 1e-7."""
    truth = truth_of(architecture)
    assert 500 < len(truth) < 2500
    assert relative_error(truth.T, truth) < ROUNDING
    ends = torch.linalg.eigvalsh(truth)[[0, -1]]
    assert ends[0] < -1
    assert ends[1] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "temperature"), [("qwen2", 1.0), ("llama", 1.0), ("bert", 1.0), ("llama", 0.4), ("bert", 30.0)]
)
def test_products_are_those_of_the_dense_matrix(architecture, temperature):
    truth = truth_of(architecture, temperature)
    operator = LossHessian(model_of(architecture), [ROWS], temperature=temperature)
    vectors = random_vectors(3, len(truth))
    assert relative_error(operator.products(vectors), vectors @ truth) < ROUNDING


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_margins_loss_and_gradient_are_those_of_the_function(architecture, world):
    function = exact_models.functional(model_of(architecture), ROWS)
    operator = LossHessian(model_of(architecture), world.cut_rows(ROWS, [5, 1, 6]), temperature=0.4)

    def loss(flat):
        return -torch.nn.functional.logsigmoid(function.margins(flat) / 0.4).mean()

    assert relative_error(operator.margins(), function.margins(function.flat)) < ROUNDING
    assert operator.loss() == pytest.approx(float(loss(function.flat)), rel=1e-13)
    assert relative_error(operator.gradient(), torch.func.grad(loss)(function.flat)) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "bert"])
@pytest.mark.parametrize("beta", [0.25, 3.0])
def test_the_curvature_of_a_reward_model_is_that_of_the_loss_it_was_trained_with(architecture, beta):
    """The Hessian of `PairLoss` with this beta, dense and in float64, for all that is asked of the model itself."""
    model = model_of(architecture)
    function = exact_models.functional(model, ROWS)

    def loss(flat):
        margins = function.margins(flat)
        return PairLoss(beta=beta)(margins, torch.zeros_like(margins)) / NUM_PAIRS

    truth = torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(function.flat).detach()
    trained = SimpleNamespace(model=model, beta=beta)
    hessian = LossHessian.from_loader(trained, [ROWS])
    vectors = random_vectors(3, len(truth))
    assert relative_error(hessian.products(vectors), vectors @ truth) < ROUNDING
    assert hessian.loss() == pytest.approx(float(loss(function.flat)), rel=1e-13)
    assert LossHessian(model, [ROWS]).temperature == 1.0  # a bare module has no beta


# What the analyzer makes of them.


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lanczos_finds_both_extremes_and_the_trace_within_its_error(architecture, world):
    truth = truth_of(architecture)
    values = torch.linalg.eigvalsh(truth).numpy()
    micro_batches = world.cut_rows(ROWS, [4, 7, 1])
    probes = 64
    found = HessianAnalyzer(model_of(architecture)).compute_spectrum(
        micro_batches, top_k=2, num_steps=60, trace_probes=probes, seed=0
    )
    assert found.converged
    assert np.allclose(found.eigenvalues, values[[-1, -2, 1, 0]], rtol=1e-4, atol=0)
    assert (found.lambda_max, found.lambda_min) == (found.eigenvalues[0], found.eigenvalues[-1])
    assert abs(found.trace_estimate - float(truth.trace())) < 4 * found.trace_standard_error
    true_error = float((truth - truth.diag().diag()).norm()) * np.sqrt(2 / probes)  # Hutchinson 1990
    assert found.trace_standard_error == pytest.approx(true_error, rel=0.5)  # five deviations of 64 probes' own


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_float32_model_that_is_used_in_practice_has_the_same_extremes(architecture, attention):
    values = torch.linalg.eigvalsh(truth_of(architecture)).numpy()
    model = exact_models.make_model(architecture, attention=attention)
    found = HessianAnalyzer(model).compute_spectrum([ROWS], top_k=1, num_steps=60, trace_probes=2)
    assert np.allclose(found.eigenvalues, values[[-1, 0]], rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_casts_to_float32_inside_a_float64_model_cost_less_than_the_promised_accuracy(architecture):
    values = torch.linalg.eigvalsh(truth_of(architecture)).numpy()
    model = exact_models.make_model(architecture).double()
    found = HessianAnalyzer(model).compute_spectrum([ROWS], top_k=1, num_steps=60, trace_probes=2)
    assert np.allclose(found.eigenvalues, values[[-1, 0]], rtol=1e-4, atol=0)
    assert not np.allclose(found.eigenvalues, values[[-1, 0]], rtol=1e-10, atol=0)  # the casts are real


# Properties of both matrices.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrix_is_symmetric(architecture):
    operator = LossHessian(model_of(architecture), [ROWS])
    for seed in range(4):
        x, y = vectors = random_vectors(2, operator.num_parameters, seed)
        image_x, image_y = operator.products(vectors)
        assert abs(x @ image_y - y @ image_x) < ROUNDING * float(x.norm() * image_y.norm())


@pytest.mark.slow
@few
@given(
    sizes=partitions(NUM_PAIRS),
    seed=seeds,
    architecture=st.sampled_from(ARCHITECTURES),
)
def test_no_cut_changes_a_product(sizes, seed, architecture):
    truth = truth_of(architecture)
    halves = {name: tensor.chunk(2) for name, tensor in ROWS.items()}
    cut = {name: list(zip(c.split(sizes), r.split(sizes), strict=True)) for name, (c, r) in halves.items()}
    micro_batches = [
        SimpleNamespace(**{name: torch.cat(sides[k]) for name, sides in cut.items()}) for k in range(len(sizes))
    ]
    operator = LossHessian(model_of(architecture), micro_batches)
    vectors = random_vectors(2, len(truth), seed)
    together = operator.products(vectors)
    assert relative_error(together, vectors @ truth) < ROUNDING
    assert torch.equal(operator.products(vectors), together)
    assert torch.equal(torch.stack([operator.product(vector) for vector in vectors]), together)


def test_products_are_linear_and_of_nothing_nothing():
    operator = LossHessian(model_of("qwen2"), [ROWS])
    x, y = random_vectors(2, operator.num_parameters)
    images = operator.products(torch.stack([x, y, 1e3 * x - y / 7, torch.zeros_like(x)]))
    assert relative_error(images[2], 1e3 * images[0] - images[1] / 7) < ROUNDING
    assert not images[3].any()
    assert operator.products(images[:0]).shape == (0, operator.num_parameters)


@pytest.mark.slow
@few
@given(scale=st.floats(1e-3, 1e3), seed=seeds)
def test_a_temperature_of_the_margins_size_makes_the_size_of_rewards_irrelevant(scale, seed):
    """With T = RMS(m), multiplying every reward by c changes neither the loss at T nor its curvature."""
    model = model_of("bert")

    def scaled_forward(**rows):
        return SimpleNamespace(logits=scale * model(**rows).logits)

    scaled = torch.nn.Module()
    scaled.inner, scaled.forward = model, scaled_forward
    products = []
    for candidate in (model, scaled):
        margins = LossHessian(candidate, [ROWS]).margins()
        temperature = float(margins.square().mean().sqrt())
        operator = LossHessian(candidate, [ROWS], temperature=temperature)
        products.append(operator.product(random_vectors(1, operator.num_parameters, seed)[0]))
    assert relative_error(products[1], products[0]) < ROUNDING
