"""Rows of the study of readiness, on features in which the gold reward is a straight line."""

import numpy as np
import pandas as pd
import pytest

from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.defects import BackboneRecipe, HeadData, heads
from rmcore.policy.overoptimization import METHODS
from rmcore.policy.readiness.population import BackboneFeatures, backbone_features, rows_of, seed_shares

NUM_FEATURES, NUM_PROMPTS, SIZE = 10, 24, 16
CLEAN = BackboneRecipe("clean", "none")
rng = np.random.default_rng(0)
TRUTH = rng.normal(size=NUM_FEATURES)


def pairs_and_features(num):
    """Pairs whose texts say how long they are, and features of chosen and rejected, (2, P, D)."""
    sides = rng.normal(size=(2, num, NUM_FEATURES))
    first_wins = rng.random(num) < 1 / (1 + np.exp(-(sides[0] - sides[1]) @ TRUTH))
    sides = np.where(first_wins[None, :, None], sides, sides[::-1])
    words = rng.integers(1, 30, size=(2, num))
    pairs = [
        PreferencePair(f"prompt {index // 2}", "a " * words[0, index] + "x", "b " * words[1, index])
        for index in range(num)
    ]
    return pairs, sides


TRAINING, TRAINING_SIDES = pairs_and_features(300)
TEST, TEST_SIDES = pairs_and_features(100)
LONGER = np.array([np.sign(len(pair.chosen) - len(pair.rejected)) for pair in TRAINING])
SAMPLE_FEATURES = rng.normal(size=(NUM_PROMPTS * SIZE, NUM_FEATURES))
SAMPLES = pd.DataFrame(
    {
        "prompt_id": np.repeat([f"p{99 - index}" for index in range(NUM_PROMPTS)], SIZE),
        "response": ["c" * int(length) for length in rng.integers(1, 50, size=NUM_PROMPTS * SIZE)],
        "gold": SAMPLE_FEATURES @ TRUTH,
    }
)
IS_MEASURED = np.arange(len(SAMPLES)) < 10 * SIZE


def seen_with(own_head, beta=1.0):
    training = HeadData(TRAINING_SIDES[0] - TRAINING_SIDES[1], LONGER)
    return BackboneFeatures(training, TEST_SIDES, TEST, SAMPLE_FEATURES, np.asarray(own_head), beta)


def rows(samples=SAMPLES, own_head=TRUTH, backbone=CLEAN, beta=1.0, **changes):
    settings = {"measured_prompts": 10, "planned_kl": 1.0, "seed": 0} | changes
    return rows_of(backbone, seen_with(own_head, beta), samples, **settings).set_index("head")


@pytest.fixture(scope="module")
def table():
    return rows()


@pytest.fixture(scope="module")
def against():
    return rows(own_head=-TRUTH)


def of_gain(table):
    return [
        name
        for name in table
        if name.endswith(("_gain", "_turned")) and "measured" not in name and "planned" not in name
    ]


def test_there_is_a_row_for_each_head_and_the_one_it_was_trained_with(table):
    assert list(table.index) == ["own", *(recipe.name for recipe in heads())]
    assert (table["backbone"] == "clean").all()
    assert table.drop(index="own").select_dtypes("number").notna().all(axis=None)
    assert list(table.index[table["length_correlation"].isna()]) == ["own"]  # nothing is left of it beside the gold


@pytest.mark.slow
def test_a_row_names_the_kinds_of_defect_of_backbone_and_head(table):
    defective = rows(backbone=BackboneRecipe("noise_again", "label_noise", again="noise"), own_head=TRUTH)
    assert set(defective["backbone_defect"]) == {"label_noise"}
    assert set(defective["recipe"]) == {"noise"}
    assert list(defective["head_defect"]) == ["none", *(recipe.defect for recipe in heads())]
    assert set(table["backbone_defect"]) == {"none"}


@pytest.mark.parametrize("method", METHODS)
def test_the_true_head_gains_and_its_opposite_loses(table, against, method):
    own, opposite = table.loc["own"], against.loc["own"]
    # The proxy is the gold reward: the best of 16 normal draws is 1.77 deviations up, and the optimum little less.
    assert 1.4 < own[f"{method}_gain"] < 1.9
    assert own[f"{method}_planned_gain"] < own[f"{method}_measured_gain"]  # one nat is not all of it
    assert own[f"{method}_measured_gain"] == pytest.approx(own[f"{method}_gain"], abs=0.35)
    assert opposite[f"{method}_gain"] < -1
    assert (own[f"{method}_headroom"], opposite[f"{method}_headroom"]) == (2.0, 0.0)
    assert not own[f"{method}_turned"]
    assert own["on_policy_accuracy"] == own["hard_accuracy"] == 1
    assert opposite["on_policy_accuracy"] == 0
    assert own["pairwise_accuracy"] == pytest.approx(1 - opposite["pairwise_accuracy"])
    assert own["pairwise_accuracy"] > 0.75


@pytest.mark.slow
def test_the_beta_of_the_trained_head_is_part_of_what_labelled_pairs_tell(table):
    """Four times the head with a quarter of the beta is the same model but for the unit of its rewards."""
    same = rows(own_head=4 * TRUTH, beta=0.25)
    for name in ("ece_debiased", "ece_tempered_debiased", "pairwise_accuracy"):
        assert same.loc["own", name] == table.loc["own", name], name
    assert same.loc["own", "lambda_max"] == pytest.approx(table.loc["own", "lambda_max"] / 16)
    assert same.loc["own", "pooled_reward_variance"] == pytest.approx(16 * table.loc["own", "pooled_reward_variance"])
    others = [name for name in table.index if name != "own"]
    pd.testing.assert_frame_equal(same.loc[others], table.loc[others])


def test_the_heads_fitted_on_clean_pairs_follow_the_truth(table, against):
    assert table.loc["refitted", "best_of_n_gain"] > 0.9
    assert table.loc["refitted", "on_policy_accuracy"] > table.loc["noise_35", "on_policy_accuracy"]
    fitted = [recipe.name for recipe in heads()]
    pd.testing.assert_frame_equal(table.loc[fitted], against.loc[fitted])  # they do not know the trained one


def test_the_ends_of_the_intervals_are_there_for_the_gates(table):
    ends = ("on_policy_accuracy", "win_rate_4", "best_of_n_planned_fall", "best_of_n_planned_gain", "signal_share")
    for name in ends:
        refitted = table.loc["refitted"]
        assert refitted[f"{name}_low"] <= refitted[name] <= refitted[f"{name}_high"]


def changed(where):
    """The judged samples with other gold rewards on some prompts."""
    noise = np.random.default_rng(9).normal(size=len(SAMPLES)) * SAMPLES["gold"].std() * 3
    return SAMPLES.assign(gold=SAMPLES["gold"] + np.where(where, noise, 0.0))


@pytest.mark.slow
def test_what_the_scores_see_and_what_is_gained_are_of_different_prompts(table):
    realised = of_gain(table)
    measured = [name for name in table.columns if name not in realised]
    assert {f"{method}_gain" for method in METHODS} <= set(realised)
    other_measured, other_unseen = rows(changed(IS_MEASURED)), rows(changed(~IS_MEASURED))
    pd.testing.assert_frame_equal(other_measured[realised], table[realised])
    pd.testing.assert_frame_equal(other_unseen[measured], table[measured])
    for name in ("on_policy_accuracy", "win_rate_16", "best_of_n_measured_gain", "kl_optimum_measured_gain"):
        assert (other_measured[name] != table[name]).all(), name
    assert (other_unseen["best_of_n_gain"] != table["best_of_n_gain"]).all()


@pytest.mark.slow
def test_a_seed_gives_one_table(table):
    pd.testing.assert_frame_equal(rows(), table)
    assert (rows(seed=1).loc["noise_35"] != table.loc["noise_35"]).any()


@pytest.mark.slow
def test_a_plan_beyond_the_samples_leaves_the_planned_gain_open_and_not_the_gain():
    far = rows(planned_kl=3.0)
    assert far[[f"{method}_planned_gain" for method in METHODS]].isna().all(axis=None)
    assert far[[f"{method}_gain" for method in METHODS]].notna().all(axis=None)


def test_seeds_that_agree_share_all_of_their_signal_and_opposites_none():
    noise = np.random.default_rng(4).normal(size=(2, len(SAMPLES)))
    rewards = {"a": noise[0], "a_again": 2 * noise[0] + 3, "b": noise[0], "b_again": noise[1], "alone": noise[0]}
    recipes = {name: name.removesuffix("_again") for name in rewards}
    found = seed_shares(rewards, recipes, SAMPLES)
    assert found.keys() == {"a", "a_again", "b", "b_again"}
    assert found["a"] == found["a_again"] == pytest.approx(1)
    assert found["b"] == pytest.approx(0, abs=0.15)


def test_features_are_those_that_the_reward_model_scores_with(tiny_folder, gold_pairs):
    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=64)
    training, test = gold_pairs[:6], gold_pairs[6:10]
    samples = pd.DataFrame({"prompt": [pair.prompt for pair in test], "response": ["", "yes", "no way", "yes"]})
    said = []
    seen = backbone_features(rm, training, test, samples, "length", lambda *told: said.append(told))
    weight = head_of(rm).weight.detach().double().numpy()[0]
    assert np.array_equal(seen.own_head, weight)
    assert seen.training.differences @ weight == pytest.approx(-np.diff(rm.score_pairs(training))[:, 0], abs=1e-4)
    assert (seen.test[0] - seen.test[1]) @ weight == pytest.approx(-np.diff(rm.score_pairs(test))[:, 0], abs=1e-4)
    assert seen.samples.shape == (4, len(weight))
    assert [int(sign) for sign in seen.training.tempting] == [
        int(np.sign(len(pair.chosen) - len(pair.rejected))) for pair in training
    ]
    assert said == [(0, 3, "training pairs"), (1, 3, "test pairs"), (2, 3, "samples")]
