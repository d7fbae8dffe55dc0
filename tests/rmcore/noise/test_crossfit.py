"""Folds and margins: no model sees a prompt that it scores, and finished folds are not computed again."""

import numpy as np
import pytest

from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.splits import conversation
from rmcore.noise.crossfit import Heads, cross_fit, deal_folds, in_one_unit

PAIRS = generate_pairs(GoldConfig(num_prompts=40, pairs_per_prompt=3), 0).pairs


class Counting:
    """Remembers what it was asked for, and gives each pair its place as a margin."""

    def __init__(self, value=1.0):
        self.asked, self.value = [], value

    def margins(self, learn, score):
        self.asked.append((learn, score))
        return np.full(len(score), self.value)

    def settings(self):
        return {"kind": "counting"}


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


def test_each_pair_is_scored_once_by_a_model_of_the_others_and_finished_folds_are_kept(tmp_path):
    folds, scorer = deal_folds(PAIRS, 3, seed=0), Counting()
    margins = cross_fit(PAIRS, scorer, folds, folder=tmp_path)
    assert sorted(np.concatenate([score for _, score in scorer.asked])) == list(range(len(PAIRS)))
    for learn, score in scorer.asked:
        assert not {PAIRS[place].prompt for place in learn} & {PAIRS[place].prompt for place in score}
    (tmp_path / "fold_1.npy").unlink()
    again = Counting(2.0)
    other = cross_fit(PAIRS, again, folds, folder=tmp_path)
    assert len(again.asked) == 1
    np.testing.assert_array_equal(np.sign(other), np.sign(margins))


def test_folds_of_other_pairs_or_models_are_not_mixed(tmp_path):
    folds = deal_folds(PAIRS, 3, seed=0)
    cross_fit(PAIRS, Counting(), folds, folder=tmp_path)
    turned = [PreferencePair(PAIRS[0].prompt, PAIRS[0].rejected, PAIRS[0].chosen), *PAIRS[1:]]
    with pytest.raises(DataError, match="pairs_and_folds differ"):
        cross_fit(turned, Counting(), folds, folder=tmp_path)
    with pytest.raises(DataError, match="backbone, kind differ"):
        cross_fit(PAIRS, Heads(np.ones((len(PAIRS), 2)), folds, {"backbone": "x"}), folds, folder=tmp_path)


def test_a_diverged_fold_is_refused_and_not_kept(tmp_path):
    with pytest.raises(ModelError, match="are not finite"):
        cross_fit(PAIRS, Counting(np.nan), deal_folds(PAIRS, 2, seed=0), folder=tmp_path)
    assert not list(tmp_path.glob("fold_*"))


def test_folds_come_in_one_unit_without_a_look_at_labels():
    rng = np.random.default_rng(0)
    folds = rng.integers(3, size=600)
    margins = rng.normal(size=600) * np.array([1.0, 5.0, 0.1])[folds]
    signs = rng.choice([-1, 1], size=600)
    found = in_one_unit(margins, folds)
    sizes = [np.sqrt(np.mean(found[folds == fold] ** 2)) for fold in range(3)]
    assert sizes == pytest.approx([np.sqrt(np.mean(margins**2))] * 3)
    np.testing.assert_allclose(in_one_unit(margins * signs, folds), found * signs)


def test_heads_find_a_linear_preference_in_noise(tmp_path):
    rng = np.random.default_rng(1)
    features = rng.normal(size=(len(PAIRS), 6))
    features[:, 0] = np.abs(features[:, 0]) + 0.5
    folds = deal_folds(PAIRS, 4, seed=0)
    margins = cross_fit(PAIRS, Heads(features, folds, {}), folds, folder=tmp_path)
    assert (margins > 0).mean() > 0.9


def test_too_few_folds_or_prompts_are_refused():
    with pytest.raises(ConfigError, match="at least two"):
        deal_folds(PAIRS, 1, seed=0)
    with pytest.raises(DataError, match="1 prompts for 3 folds"):
        deal_folds(PAIRS[:3], 3, seed=0)
