"""Both curvatures against the dense float64 truth of torch.func, on the architectures that reward models have."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import exact_models
from rmcore.landscape.analyzer import HessianAnalyzer
from rmcore.landscape.operators import LossHessian
from rmcore.training.losses import PairLoss

ARCHITECTURES, ROUNDING = exact_models.ARCHITECTURES, exact_models.ROUNDING
relative_error, random_vectors = exact_models.relative_error, exact_models.random_vectors

NUM_PAIRS = 12
ROWS = exact_models.draw_rows(NUM_PAIRS)


@cache
def model_of(architecture):
    return exact_models.exact(exact_models.make_model(architecture))


@cache
def truth_of(architecture, temperature=1.0):
    function = exact_models.functional(model_of(architecture), ROWS)
    return function.hessian(temperature)


# The truth.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "temperature"), [("qwen2", 1.0), ("llama", 1.0), ("bert", 1.0), ("llama", 0.4), ("bert", 30.0)]
)
def test_products_are_those_of_the_dense_matrix(architecture, temperature):
    truth = truth_of(architecture, temperature)
    operator = LossHessian(model_of(architecture), [ROWS], temperature=temperature)
    vectors = random_vectors(3, len(truth))
    assert relative_error(operator.products(vectors), vectors @ truth) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "beta"), [("qwen2", 0.25), ("bert", 3.0)])
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
@pytest.mark.parametrize(("architecture", "attention"), [("qwen2", "sdpa"), ("bert", "eager")])
def test_the_float32_model_that_is_used_in_practice_has_the_same_extremes(architecture, attention):
    values = torch.linalg.eigvalsh(truth_of(architecture)).numpy()
    model = exact_models.make_model(architecture, attention=attention)
    found = HessianAnalyzer(model).compute_spectrum([ROWS], top_k=1, num_steps=60, trace_probes=2)
    assert np.allclose(found.eigenvalues, values[[-1, 0]], rtol=1e-4, atol=0)
