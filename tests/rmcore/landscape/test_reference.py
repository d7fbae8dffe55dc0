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

ROUNDING = exact_models.ROUNDING
relative_error, random_vectors = exact_models.relative_error, exact_models.random_vectors

NUM_PAIRS = 12
ROWS = exact_models.draw_rows(NUM_PAIRS)


@cache
def model_of(architecture):
    return exact_models.exact(exact_models.make_model(architecture))


@cache
def truth_of(architecture, beta=1.0):
    """Loss and Hessian, dense and in float64, of the loss with this beta that a training minimises."""
    function = exact_models.functional(model_of(architecture), ROWS)

    def loss(flat):
        margins = function.margins(flat)
        return PairLoss(beta=beta)(margins, torch.zeros_like(margins)) / NUM_PAIRS

    hessian = torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(function.flat).detach()
    return float(loss(function.flat)), hessian


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "beta"), [("qwen2", 0.25), ("llama", 1.0), ("llama", 2.5), ("bert", 1.0), ("bert", 1 / 30)]
)
def test_loss_and_products_are_those_of_the_dense_matrix(architecture, beta):
    """Of a reward model with its beta, and of a bare module, which has none, at the temperature 1 / beta."""
    model, (loss, truth) = model_of(architecture), truth_of(architecture, beta)
    vectors = random_vectors(3, len(truth))
    for hessian in (
        LossHessian.from_loader(SimpleNamespace(model=model, beta=beta), [ROWS]),
        LossHessian(model, [ROWS], **({} if beta == 1.0 else {"temperature": 1 / beta})),
    ):
        assert relative_error(hessian.products(vectors), vectors @ truth) < ROUNDING
        assert hessian.loss() == pytest.approx(loss, rel=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "attention"), [("llama", "sdpa"), ("bert", "eager")])
def test_the_float32_model_that_is_used_in_practice_has_the_same_extremes(architecture, attention):
    values = torch.linalg.eigvalsh(truth_of(architecture)[1]).numpy()
    model = exact_models.make_model(architecture, attention=attention)
    found = HessianAnalyzer(model).compute_spectrum([ROWS], top_k=1, num_steps=60, trace_probes=2)
    assert np.allclose(found.eigenvalues, values[[-1, 0]], rtol=1e-4, atol=0)
