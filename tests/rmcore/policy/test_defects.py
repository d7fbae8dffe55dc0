"""Defects of the validation study: each does what its name says, on pairs and on features whose truth is known."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.presets import PRESETS
from rmcore.config.pipeline import TrainConfig, ValidationConfig
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.linear_probes import fit_head
from rmcore.policy.grpo.defects import HeadData, backbones, few, flipped, heads, preferring_length

seeds = st.integers(0, 10_000)
RECIPES = {recipe.name: recipe for recipe in heads()}


def rng_of(seed):
    return random.Random(seed)  # noqa: S311


def key(pair):
    return (pair.pair_id, pair.prompt)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_as_many_labels_are_turned_as_the_share_says_and_nothing_else_changes(gold_pairs, share):
    pairs = gold_pairs * 10
    changed = flipped(share)(pairs, rng_of(0))
    turned = sum(after.chosen == before.rejected for before, after in zip(pairs, changed, strict=True))
    assert turned / len(pairs) == pytest.approx(share, abs=0.03)  # three standard errors
    for before, after in zip(pairs, changed, strict=True):
        assert key(after) == key(before)
        assert {after.chosen, after.rejected} == {before.chosen, before.rejected}


def test_where_all_prefer_length_no_rejected_side_is_the_longer_one(gold_pairs):
    changed = preferring_length(1.0)(gold_pairs, rng_of(0))
    assert sum(len(pair.rejected) > len(pair.chosen) for pair in gold_pairs) > 10
    assert all(len(pair.chosen) >= len(pair.rejected) for pair in changed)
    for before, after in zip(gold_pairs, changed, strict=True):
        if len(before.chosen) >= len(before.rejected):
            assert after == before


@given(seed=seeds, share=st.floats(0, 1))
def test_a_share_of_the_pairs_prefers_length_and_none_prefers_brevity_anew(gold_pairs, seed, share):
    changed = preferring_length(share)(gold_pairs, rng_of(seed))
    for before, after in zip(gold_pairs, changed, strict=True):
        assert after == before or len(after.chosen) > len(after.rejected)
    nothing = preferring_length(0.0)(gold_pairs, rng_of(seed))
    assert nothing == list(gold_pairs)


@given(seed=seeds, count=st.integers(1, 400))
def test_few_are_drawn_without_repetition_and_never_more_than_there_are(gold_pairs, seed, count):
    taken = few(count)(gold_pairs, rng_of(seed))
    assert len(taken) == min(count, len(gold_pairs))
    assert max(Counter(map(key, taken)).values()) == 1
    assert set(map(key, taken)) <= set(map(key, gold_pairs))
    assert taken == few(count)(gold_pairs, rng_of(seed))


def test_backbones_have_names_of_their_own_and_settings_that_training_takes():
    base = PRESETS["validation"].train
    recipes = backbones(base)
    assert len({recipe.name for recipe in recipes}) == len(recipes)
    assert recipes[0].defect == "none"
    for recipe in recipes:
        changed = TrainConfig.model_validate(base.model_dump() | dict(recipe.train))
        assert changed != base or not recipe.train
    pair = PreferencePair("p", "long answer", "short")
    for recipe in recipes:  # a defect is somewhere, and nowhere where there is none
        is_changed = recipe.change([pair] * 400, rng_of(0)) != [pair] * 400
        is_changed |= (
            recipe.change([PreferencePair("p", "a", "longer")] * 99, rng_of(0))
            != [PreferencePair("p", "a", "longer")] * 99
        )
        has_defect = is_changed or bool(recipe.train) or recipe.max_seq_len is not None
        assert has_defect == (recipe.defect != "none"), recipe.name


def test_a_study_cannot_ask_for_more_backbones_than_there_are():
    num = len(backbones(TrainConfig()))
    assert ValidationConfig(num_backbones=num).num_backbones == num
    with pytest.raises(ValueError, match="num_backbones"):
        ValidationConfig(num_backbones=num + 1)


class World:
    """Features in which quality is the direction `truth` and length the last feature, which truth does not see."""

    def __init__(self, seed, num_pairs=800, num_features=12):
        rng = np.random.default_rng(seed)
        self.truth = np.append(rng.normal(size=num_features - 1), 0.0)
        plain = rng.normal(size=(num_pairs, num_features))
        is_first = rng.random(num_pairs) < 1 / (1 + np.exp(-plain @ self.truth))
        differences = np.where(is_first, 1.0, -1.0)[:, None] * plain
        self.data = HeadData(differences, np.sign(differences[:, -1]).astype(int))
        self.test = rng.normal(size=(4000, num_features))

    def head(self, name, seed=0):
        return RECIPES[name].fit(self.data, np.random.default_rng(seed))

    def accuracy(self, head):
        """Against the truth, without noise."""
        return np.mean((self.test @ head > 0) == (self.test @ self.truth > 0))


WORLDS = [World(seed) for seed in range(6)]


def mean_accuracy(name):
    return np.mean([world.accuracy(world.head(name, seed)) for seed, world in enumerate(WORLDS)])


@pytest.mark.parametrize("names", [("refitted", "noise_20", "noise_35", "noise_45"), ("refitted", "few_100", "few_20")])
def test_the_more_of_a_defect_the_less_of_the_truth(names):
    accuracies = [mean_accuracy(name) for name in names]
    assert accuracies[0] > 0.9
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[-1] < accuracies[0] - 0.1


def test_heads_that_call_the_longer_side_better_like_length():
    for seed, world in enumerate(WORLDS):
        taste = [world.head(name, seed)[-1] for name in ("refitted", "length_30", "length_80")]
        assert taste == sorted(taste)
        assert abs(taste[0]) < 0.3 < taste[2]
    assert mean_accuracy("length_80") < mean_accuracy("length_30") < mean_accuracy("refitted")


def test_an_overfitted_head_tells_a_hundred_pairs_apart_with_huge_margins():
    world = World(0, num_features=160)
    overfitted, refitted = world.head("overfitted"), world.head("refitted")
    margins = np.sort(world.data.differences @ overfitted)
    taken = np.random.default_rng(0).choice(800, 100, replace=False)  # as the recipe draws them
    assert (world.data.differences[taken] @ overfitted > 0).all()
    assert (margins < 0).sum() > 50
    assert np.abs(margins).mean() > 3 * np.abs(world.data.differences @ refitted).mean()
    assert world.accuracy(overfitted) < world.accuracy(refitted)


def test_a_scaled_head_ranks_as_the_refitted_one():
    world = WORLDS[0]
    factors = {
        round(float(np.mean(world.head("scaled", seed) / fit_head(world.data.differences))), 9) for seed in range(12)
    }
    assert factors == {0.1, 10.0}
    found = world.head("scaled") / fit_head(world.data.differences)
    assert found == pytest.approx(found[0])


@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_one_head_and_scaling_the_features_changes_nothing(name):
    world = WORLDS[1]
    first = world.head(name, 3)
    assert np.array_equal(first, world.head(name, 3))
    assert np.isfinite(first).all()
    larger = HeadData(world.data.differences * 7, world.data.longer)
    assert RECIPES[name].fit(larger, np.random.default_rng(3)) * 7 == pytest.approx(first, rel=1e-4, abs=1e-6)
