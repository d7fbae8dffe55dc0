"""Folds and margins: no head is fitted on a prompt that it scores, and features are computed once."""

import numpy as np
import pytest
import torch

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.splits import conversation
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.noise.crossfit import FEATURES_FILE, cross_fit, deal_folds, in_one_unit, kept_differences

PAIRS = generate_pairs(GoldConfig(num_prompts=40, pairs_per_prompt=3), 0).pairs


def test_no_conversation_is_learned_from_and_scored():
    turns = [
        PreferencePair((Message("user", "hello there"), Message("assistant", "yes?"), Message("user", text)), "a", "b")
        for text in ("one", "two")
    ]
    pairs = [*PAIRS, *turns, PreferencePair("Hello  there", "a", "b")]
    folds = deal_folds(pairs, 4, seed=1)
    by_conversation = {}
    for pair, fold in zip(pairs, folds, strict=True):
        assert by_conversation.setdefault(conversation(pair.prompt), fold) == fold
    assert sorted(np.unique(folds)) == [0, 1, 2, 3]


def test_a_label_enters_no_margin_of_its_own_fold():
    """Turned round, it turns its own margin and leaves the others of its fold as they are."""
    rng = np.random.default_rng(0)
    folds, differences = deal_folds(PAIRS, 3, seed=0), rng.normal(size=(len(PAIRS), 5)) + 0.5
    margins = cross_fit(differences, folds)
    turned = differences.copy()
    turned[7] *= -1
    other, own = cross_fit(turned, folds), folds == folds[7]
    expected = np.where(np.arange(len(PAIRS)) == 7, -margins, margins)[own]
    np.testing.assert_allclose(other[own] / np.abs(other[own]).max(), expected / np.abs(expected).max())
    assert not np.allclose(other[~own], margins[~own])


def test_features_are_computed_once_and_those_of_other_pairs_are_not_mixed(tiny_folder, tmp_path):
    rm = BradleyTerryRM.new(ModelConfig(name=str(tiny_folder), max_seq_len=64), seed=0, device=torch.device("cpu"))
    first = kept_differences(rm, PAIRS[:9], {"backbone": "x"}, tmp_path)
    written = (tmp_path / FEATURES_FILE).stat().st_mtime_ns
    np.testing.assert_array_equal(kept_differences(rm, PAIRS[:9], {"backbone": "x"}, tmp_path), first)
    assert (tmp_path / FEATURES_FILE).stat().st_mtime_ns == written
    turned = [PreferencePair(PAIRS[0].prompt, PAIRS[0].rejected, PAIRS[0].chosen), *PAIRS[1:9]]
    with pytest.raises(DataError, match=r"something else \(pairs differ\)"):
        kept_differences(rm, turned, {"backbone": "x"}, tmp_path)
    with pytest.raises(DataError, match=r"something else \(backbone differ\)"):
        kept_differences(rm, PAIRS[:9], {"backbone": "y"}, tmp_path)


def test_folds_come_in_one_unit_without_a_look_at_labels():
    rng = np.random.default_rng(0)
    folds = rng.integers(3, size=600)
    margins = rng.normal(size=600) * np.array([1.0, 5.0, 0.1])[folds]
    signs = rng.choice([-1, 1], size=600)
    found = in_one_unit(margins, folds)
    sizes = [np.sqrt(np.mean(found[folds == fold] ** 2)) for fold in range(3)]
    assert sizes == pytest.approx([np.sqrt(np.mean(margins**2))] * 3)
    np.testing.assert_allclose(in_one_unit(margins * signs, folds), found * signs)


def test_heads_find_a_linear_preference_in_noise():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(len(PAIRS), 6))
    features[:, 0] = np.abs(features[:, 0]) + 0.5
    folds = deal_folds(PAIRS, 4, seed=0)
    margins = cross_fit(features, folds)
    assert (margins > 0).mean() > 0.9


def test_too_few_folds_or_prompts_are_refused():
    with pytest.raises(ConfigError, match="at least two"):
        deal_folds(PAIRS, 1, seed=0)
    with pytest.raises(DataError, match="1 prompts for 3 folds"):
        deal_folds(PAIRS[:3], 3, seed=0)
