"""The terms add up to the refitted head's margins, and the agreement says whether that head is the model's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rmcore.core.errors import DataError
from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.explain.influence import FEWEST_HELD_OUT
from rmcore.explain.representer import representers

NUM_TRAIN, NUM_TARGETS = 40, 5


@pytest.fixture
def pairs(gold_pairs):
    cut = NUM_TRAIN + NUM_TARGETS
    return gold_pairs[:NUM_TRAIN], gold_pairs[NUM_TRAIN:cut], gold_pairs[cut : cut + FEWEST_HELD_OUT]


@pytest.mark.parametrize(("beta", "smoothing"), [(1.0, 0.0), (0.5, 0.1)])
def test_the_terms_are_the_margin(rm, pairs, beta, smoothing):
    rm.beta = beta
    found = representers(rm, *pairs, label_smoothing=smoothing)
    assert found.effect.shape == (NUM_TARGETS, NUM_TRAIN)
    np.testing.assert_allclose(found.effect.sum(1), found.margins, atol=1e-6 * np.abs(found.margins).max())
    np.testing.assert_allclose(found.model_margins, np.subtract(*rm.score_pairs(pairs[1]).T), atol=1e-4)


def test_a_pair_among_the_targets_speaks_for_itself_and_its_mirror_against(rm, pairs):
    train, _, held_out = pairs
    mirrored = replace(train[0], chosen=train[0].rejected, rejected=train[0].chosen)
    found = representers(rm, train, [train[0], mirrored], held_out)
    assert found.effect[0, 0] > 0
    np.testing.assert_allclose(found.effect[1], -found.effect[0], atol=1e-6 * np.abs(found.effect).max())


@pytest.mark.parametrize("multiple", [0.1, 1.0])
def test_a_model_with_a_fitted_head_is_recognised_with_its_penalty(rm, pairs, multiple):
    differences = np.subtract(*pair_features(rm, pairs[0]))
    l2 = multiple * differences.shape[1]
    with torch.no_grad():
        head_of(rm).weight.copy_(torch.tensor(fit_head(differences, l2=l2)[None]))
    found = representers(rm, *pairs)
    assert found.l2 == pytest.approx(l2)
    assert found.held_out_correlation > 0.9999
    assert found.held_out_error < 1e-6
    np.testing.assert_allclose(found.margins, found.model_margins, atol=1e-3)


def test_a_model_with_another_head_is_not(rm, pairs):
    with torch.no_grad():
        head_of(rm).weight.copy_(torch.randn(head_of(rm).weight.shape, generator=torch.Generator().manual_seed(3)))
    found = representers(rm, *pairs)
    assert abs(found.held_out_correlation) < 0.7
    assert found.held_out_error > 0.5


def test_too_few_pairs_are_refused(rm, pairs):
    train, targets, held_out = pairs
    with pytest.raises(DataError, match="held-out"):
        representers(rm, train, targets, held_out[1:])
    with pytest.raises(DataError, match="0 training pairs"):
        representers(rm, [], targets, held_out)
