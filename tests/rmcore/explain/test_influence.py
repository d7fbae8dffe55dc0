"""Influence through a real model, where the truth can be computed another way: at the head, margins are linear."""

import numpy as np
import pytest
import torch

from rmcore.core.errors import CurvatureError, DataError
from rmcore.ensembles.features import head_of, pair_features
from rmcore.explain.influence import FEWEST_HELD_OUT, influences
from rmcore.explain.linearized import MarginLoss, fit_coefficients

NUM_TRAIN, NUM_TARGETS = 24, 3


@pytest.fixture
def pairs(gold_pairs):
    """Training pairs, targets, held-out pairs."""
    cut = NUM_TRAIN + NUM_TARGETS
    return gold_pairs[:NUM_TRAIN], gold_pairs[NUM_TRAIN:cut], gold_pairs[cut : cut + FEWEST_HELD_OUT]


@pytest.fixture
def trained(rm, pairs):
    """A model whose head is at the optimum of its training pairs; the features of all, and the damping."""
    rm.beta = 2.0
    differences = np.concatenate([np.subtract(*pair_features(rm, part)) for part in pairs])
    own = differences[:NUM_TRAIN]
    kernel = own @ own.T
    damping = 10**-1.5 * float(kernel.diagonal().mean())  # one of those that are tried
    head = own.T @ fit_coefficients(kernel, damping, MarginLoss(2.0, 0.1))
    with torch.no_grad():
        head_of(rm).weight.copy_(torch.tensor(head[None]))
    return rm, differences, damping


def test_at_the_head_it_is_the_dense_truth(trained, pairs):
    rm, differences, damping = trained
    found = influences(rm, *pairs, parameters="head", label_smoothing=0.1)
    assert found.damping == pytest.approx(damping, rel=1e-4)
    assert found.held_out_correlation > 0.9999
    assert found.held_out_error < 1e-6
    assert found.num_held_out == FEWEST_HELD_OUT
    assert found.num_parameters == differences.shape[1]
    own, targets = differences[:NUM_TRAIN], differences[NUM_TRAIN:][:NUM_TARGETS]
    margins, loss = own @ head_of(rm).weight[0].detach().double().numpy(), MarginLoss(2.0, 0.1)
    np.testing.assert_allclose(found.train_margins, margins, atol=1e-4)
    hessian = own.T @ (loss.curvature(margins)[:, None] * own) / NUM_TRAIN + damping * np.eye(own.shape[1])
    effect = -(targets @ np.linalg.solve(hessian, own.T)) * loss.slope(margins) / NUM_TRAIN
    np.testing.assert_allclose(found.effect, effect, atol=2e-3 * np.abs(effect).max())
    smaller = hessian - np.einsum("pd,pe->de", own[:2] * loss.curvature(margins)[:2, None], own[:2]) / NUM_TRAIN
    without = targets @ np.linalg.solve(smaller, own[:2].T @ loss.slope(margins)[:2]) / NUM_TRAIN
    np.testing.assert_allclose(found.without([0, 1]), without, atol=2e-3 * np.abs(without).max())


def test_a_pair_that_helped_is_missed(trained, pairs):
    """Positive effect: the head that is trained without the pair gives the target a smaller margin."""
    rm, differences, damping = trained
    found = influences(rm, *pairs, parameters="head", label_smoothing=0.1)
    place = int(found.effect[0].argmax())
    rest = np.delete(differences[:NUM_TRAIN], place, axis=0)
    loss = MarginLoss(2.0, 0.1)
    coefficients = fit_coefficients(rest @ rest.T, damping * NUM_TRAIN / (NUM_TRAIN - 1), loss)
    change = differences[NUM_TRAIN] @ rest.T @ coefficients - found.margins[0]
    assert found.effect[0, place] > 0 > change
    assert found.without([place])[0] == pytest.approx(change, rel=0.25)


def test_each_pair_costs_one_gradient_and_the_model_is_left_as_it_was(rm, pairs):
    before = {name: value.clone() for name, value in rm.model.state_dict().items()}
    rm.model.train()
    told = []
    whole = influences(rm, *pairs, report=lambda done, total, text: told.append((done, total)))
    num = NUM_TRAIN + NUM_TARGETS + FEWEST_HELD_OUT
    assert told[-1] == (num, num)
    assert rm.model.training
    assert all(torch.equal(value, before[name]) for name, value in rm.model.state_dict().items())
    assert whole.num_parameters == rm.num_parameters
    np.testing.assert_allclose(whole.margins, np.subtract(*rm.score_pairs(pairs[1]).T), atol=1e-4)


def test_what_cannot_be_said_is_refused(rm, pairs):
    train, targets, held_out = pairs
    with pytest.raises(DataError, match="held-out"):
        influences(rm, train, targets, held_out[:-1], parameters="head")
    with pytest.raises(DataError, match="0 targets"):
        influences(rm, train, [], held_out, parameters="head")
    with pytest.raises(CurvatureError, match="the memory leaves"):
        influences(rm, *pairs, memory_bytes=1000)
    found = influences(rm, *pairs, parameters="head")
    for wrong in ([1, 1], [-1], [NUM_TRAIN]):
        with pytest.raises(DataError, match="positions"):
            found.without(wrong)
