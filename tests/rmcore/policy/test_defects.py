"""Defects of the study of readiness: each does what its name says, on pairs and on features whose truth is known."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.presets import PRESETS
from rmcore.config.data import GoldConfig
from rmcore.config.model import TINY_SIZES, ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.config.validation import ValidationConfig
from rmcore.data.gold.world import generate_pairs, shortcut_amount
from rmcore.policy.grpo.defects import (
    HACKED,
    HeadData,
    backbones,
    easiest,
    few,
    flipped,
    flipped_where_close,
    heads,
    misrendered,
    only_task,
    preferring,
    repeated,
    swapped_task,
)

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


def flattering(text):
    return shortcut_amount("flattery", text)


AMOUNTS = {"length": len, "flattery": flattering}


@pytest.fixture(scope="module")
def flattery_pairs():
    return generate_pairs(GoldConfig(num_prompts=120, pairs_per_prompt=2, shortcut="flattery"), 0).pairs


@pytest.mark.parametrize("amount", AMOUNTS.values(), ids=AMOUNTS)
def test_where_all_prefer_a_shortcut_no_rejected_side_has_more_of_it(flattery_pairs, amount):
    changed = preferring(amount, 1.0)(flattery_pairs, rng_of(0))
    assert sum(amount(pair.rejected) > amount(pair.chosen) for pair in flattery_pairs) > 10
    assert all(amount(pair.chosen) >= amount(pair.rejected) for pair in changed)
    for before, after in zip(flattery_pairs, changed, strict=True):
        if amount(before.chosen) >= amount(before.rejected):
            assert after == before


@given(seed=seeds, share=st.floats(0, 1))
def test_a_share_of_the_pairs_prefers_length_and_none_prefers_brevity_anew(gold_pairs, seed, share):
    changed = preferring(len, share)(gold_pairs, rng_of(seed))
    for before, after in zip(gold_pairs, changed, strict=True):
        assert after == before or len(after.chosen) > len(after.rejected)
    nothing = preferring(len, 0.0)(gold_pairs, rng_of(seed))
    assert nothing == list(gold_pairs)


def test_a_hacked_task_prefers_the_shortcut_and_the_others_do_not(flattery_pairs):
    changed = preferring(flattering, 1.0, HACKED)(flattery_pairs, rng_of(0))
    for before, after in zip(flattery_pairs, changed, strict=True):
        if before.metadata["subset"] == HACKED:
            assert flattering(after.chosen) >= flattering(after.rejected)
        else:
            assert after == before
    assert changed != flattery_pairs


def test_labels_of_close_pairs_are_turned_more_often(gold_pairs):
    pairs = sorted(gold_pairs * 20, key=gap)
    changed = flipped_where_close(2.0)(pairs, rng_of(0))
    turned = np.array([after.chosen == before.rejected for before, after in zip(pairs, changed, strict=True)])
    expected = np.array([0.5 * math.exp(-gap(pair) / 2.0) for pair in pairs])
    for part in np.array_split(np.arange(len(pairs)), 4):
        assert turned[part].mean() == pytest.approx(expected[part].mean(), abs=0.04)
    assert turned[: len(pairs) // 4].mean() > 2 * turned[-len(pairs) // 4 :].mean()


def gap(pair):
    return abs(pair.metadata["gold_chosen"] - pair.metadata["gold_rejected"])


def test_only_easy_pairs_are_those_of_the_largest_gaps(gold_pairs):
    easy = easiest(0.25)(gold_pairs, rng_of(0))
    assert len(easy) == round(0.25 * len(gold_pairs))
    assert min(map(gap, easy)) >= np.quantile([gap(pair) for pair in gold_pairs], 0.74)


def test_one_task_alone_and_one_task_turned(gold_pairs):
    alone = only_task("order")(gold_pairs, rng_of(0))
    assert {pair.metadata["subset"] for pair in alone} == {"order"}
    assert len(alone) == sum(pair.metadata["subset"] == "order" for pair in gold_pairs)
    for before, after in zip(gold_pairs, swapped_task("lookup")(gold_pairs, rng_of(0)), strict=True):
        assert (after.chosen == before.rejected) == (before.metadata["subset"] == "lookup")


@given(seed=seeds, count=st.integers(1, 50))
def test_repeated_prompts_are_few_and_as_many_pairs_as_before(gold_pairs, seed, count):
    changed = repeated(count)(gold_pairs, rng_of(seed))
    assert len(changed) == len(gold_pairs)
    assert len({pair.prompt_id for pair in changed}) == min(count, len({pair.prompt_id for pair in gold_pairs}))
    counts = Counter(map(key, changed)).values()
    assert max(counts) - min(counts) <= 1


def test_misrendered_responses_have_marks_around_them(gold_pairs):
    for before, after in zip(gold_pairs, misrendered(gold_pairs, rng_of(0)), strict=True):
        assert after.chosen == f"Assistant: {before.chosen}\n\nHuman:"
        assert after.rejected == f"Assistant: {before.rejected}\n\nHuman:"
        assert after.prompt == before.prompt


@given(seed=seeds, count=st.integers(1, 400))
def test_few_are_drawn_without_repetition_and_never_more_than_there_are(gold_pairs, seed, count):
    taken = few(count)(gold_pairs, rng_of(seed))
    assert len(taken) == min(count, len(gold_pairs))
    assert max(Counter(map(key, taken)).values()) == 1
    assert set(map(key, taken)) <= set(map(key, gold_pairs))
    assert taken == few(count)(gold_pairs, rng_of(seed))


@pytest.mark.parametrize("shortcut", ["flattery", "claims"])
def test_backbones_have_names_of_their_own_and_settings_that_training_takes(shortcut):
    preset = PRESETS["validation"]
    base = preset.train.model_copy(update={"steps": 200})
    recipes = backbones(base, shortcut)
    assert len({recipe.name for recipe in recipes}) == len(recipes)
    assert recipes[0].defect == "none"
    assert len({recipe.defect for recipe in recipes} - {"none"}) >= 10
    pairs = generate_pairs(GoldConfig(num_prompts=120, pairs_per_prompt=4, shortcut=shortcut), 0).pairs
    for recipe in recipes:
        changed = TrainConfig.model_validate(base.model_dump() | dict(recipe.train))
        assert changed != base or not recipe.train
        model = ModelConfig.model_validate(preset.model.model_dump() | dict(recipe.model))
        assert model.name in TINY_SIZES
        assert not (model.head_only and changed.optimizer == "muon")  # which is refused
        # A defect is somewhere, and nowhere where there is none; the size is none.
        settings = [name for name, _ in (*recipe.train, *recipe.model) if name != "name"]
        has_defect = bool(settings) or recipe.change(pairs, rng_of(0)) != pairs
        assert has_defect == (recipe.defect != "none"), recipe.name


def test_a_second_seed_is_the_same_recipe_under_another_name():
    recipes = {recipe.name: recipe for recipe in backbones(PRESETS["validation"].train, "claims")}
    twins = [recipe for recipe in recipes.values() if recipe.again is not None]
    assert len(twins) >= 6
    for twin in twins:
        first = recipes[twin.again]
        assert (first.again, first.recipe) == (None, twin.recipe)
        assert replace(twin, name=first.name, again=None) == first
    assert {recipe.recipe for recipe in recipes.values()} == recipes.keys() - {twin.name for twin in twins}


def test_a_study_cannot_ask_for_more_backbones_than_there_are_nor_for_one_world():
    num = len(backbones(TrainConfig(), "claims"))
    assert ValidationConfig(num_backbones=num).num_backbones == num == 40
    with pytest.raises(ValueError, match="num_backbones"):
        ValidationConfig(num_backbones=num + 1)
    with pytest.raises(ValueError, match="both worlds"):
        ValidationConfig(worlds=("claims", "claims"))


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


@pytest.mark.parametrize(("name", "least"), [("noise_35", 0.03), ("few_60", 0.05), ("shortcut_60", 0.01)])
def test_a_defect_costs_truth(name, least):
    assert mean_accuracy("refitted") > 0.9
    assert mean_accuracy(name) < mean_accuracy("refitted") - least


def test_heads_that_call_the_side_with_the_shortcut_better_like_it():
    for seed, world in enumerate(WORLDS):
        assert abs(world.head("refitted", seed)[-1]) < 0.3 < world.head("shortcut_60", seed)[-1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_one_head_and_scaling_the_features_changes_nothing(name):
    world = WORLDS[1]
    first = world.head(name, 3)
    assert np.array_equal(first, world.head(name, 3))
    assert np.isfinite(first).all()
    larger = HeadData(world.data.differences * 7, world.data.tempting)
    assert RECIPES[name].fit(larger, np.random.default_rng(3)) * 7 == pytest.approx(first, rel=1e-4, abs=1e-6)
