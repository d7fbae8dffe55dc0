"""The study's analysis, on tables in which it was planted what predicts the gain."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.stats import spearmanr

from rmcore.core.errors import DataError
from rmcore.policy.readiness import validation
from rmcore.policy.readiness.validation import COMPOSED, L2, PLAIN, SCORES, _left_out, analyse, fit_probability

NUM_RESAMPLES = 60
DEFECTS = ("none", "label_noise", "few_pairs", "shortcut", "overtrained")


def planted(seed=0, *, of_extra=0.0, num_backbones=8, per_backbone=11):
    """Reward models whose gain is accuracy, and `of_extra` times the share of signal, with a little noise."""
    rng = np.random.default_rng(seed)
    num = num_backbones * per_backbone
    accuracy, extra = rng.uniform(0.5, 0.9, size=num), rng.uniform(0, 1, size=num)
    gain = 3 * (accuracy - 0.7) + of_extra * (extra - 0.5) + 0.02 * rng.normal(size=num)
    table = pd.DataFrame(
        {
            "backbone": np.repeat([f"b{index}" for index in range(num_backbones)], per_backbone),
            "head": [f"h{index}" for index in range(num)],
            "defect": rng.choice(DEFECTS, size=num),
            "on_policy_accuracy": accuracy,
            "signal_share": extra,
            "best_of_n_gain": gain,
            "kl_optimum_gain": gain + 0.02 * rng.normal(size=num),
        }
    )
    for name in ("v1", "pairwise_accuracy", "hard_accuracy", "skill_16", "win_rate_16", "length_correlation"):
        table[name] = rng.normal(size=num)
    table["ece_tempered_debiased"], table["lambda_max"] = rng.uniform(0, 0.1, size=num), rng.uniform(1, 99, size=num)
    for method in ("best_of_n", "kl_optimum"):
        table[f"{method}_headroom"] = rng.uniform(0, 2, size=num)
        table[f"{method}_measured_gain"] = gain + 0.3 * rng.normal(size=num)
        table[f"{method}_turned"] = rng.random(num) < 0.2
    return table


def judged(table, **changes):
    return analyse(table, **{"optimizer": "best_of_n", "min_gain": 0.05, "seed": 0} | changes)


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Intervals of the study are over a thousand; a few show the same here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "NUM_RESAMPLES", NUM_RESAMPLES)
        yield


@pytest.fixture(scope="module")
def by_extra(few_resamples):
    return judged(planted(of_extra=3.0))


@pytest.fixture(scope="module")
def by_accuracy(few_resamples):
    return judged(planted(of_extra=0.0))


def test_where_another_part_predicts_the_gain_v2_is_the_score(by_extra):
    assert by_extra["score"] == by_extra["fit"]["score"] == "v2"
    assert by_extra["differences"]["v2"]["ci_low"] > 0
    assert by_extra["fit"]["features"] == list(COMPOSED)
    assert by_extra["verdict"].startswith("v2 ranks the models better than on-policy accuracy")
    coefficients = dict(zip(COMPOSED, by_extra["fit"]["coefficients"], strict=True))
    deviation = planted(of_extra=3.0).std(numeric_only=True)
    assert max(COMPOSED, key=lambda name: coefficients[name] * deviation.get(name, 0)) == "signal_share"
    assert by_extra["brier"]["v2"] < by_extra["brier"]["on_policy_accuracy"]


def test_where_accuracy_alone_predicts_it_accuracy_is_the_score(by_accuracy):
    assert by_accuracy["score"] == by_accuracy["fit"]["score"] == "on_policy_accuracy"
    assert by_accuracy["fit"]["features"] == list(PLAIN)
    assert by_accuracy["fit"]["coefficients"][0] > 0
    assert "v2 does not rank the models better" in by_accuracy["verdict"]
    assert by_accuracy["correlations"]["on_policy_accuracy"]["best_of_n"]["value"] > 0.95
    assert by_accuracy["brier"]["on_policy_accuracy"] < by_accuracy["brier"]["always the share"]


def test_a_difference_that_may_be_chance_does_not_make_v2_the_score():
    """The rule wants the interval above zero, not the value."""
    found = judged(planted(0, of_extra=0.3))
    assert found["differences"]["v2"]["ci_low"] < 0 < found["differences"]["v2"]["value"]
    assert found["score"] == "on_policy_accuracy"


def test_correlations_are_spearmans_of_all_models_and_differences_are_theirs(by_extra):
    table = planted(of_extra=3.0)
    for score in SCORES:
        if score in table:
            for method in ("best_of_n", "kl_optimum"):
                expected = spearmanr(table[score], table[f"{method}_gain"]).statistic
                assert by_extra["correlations"][score][method]["value"] == pytest.approx(expected)
    flatness = spearmanr(-table["lambda_max"], table["best_of_n_gain"]).statistic
    assert by_extra["correlations"]["flatness"]["best_of_n"]["value"] == pytest.approx(flatness)
    assert set(by_extra["differences"]) == set(SCORES) - {"on_policy_accuracy"}
    base = by_extra["correlations"]["on_policy_accuracy"]["best_of_n"]["value"]
    for score, gap in by_extra["differences"].items():
        assert gap["value"] == pytest.approx(by_extra["correlations"][score]["best_of_n"]["value"] - base)
        assert gap["ci_low"] <= gap["value"] <= gap["ci_high"]


def test_the_record_is_json_and_counts_what_there_is(by_extra):
    table = planted(of_extra=3.0)
    assert json.loads(json.dumps(by_extra, allow_nan=False))["num_models"] == len(table) == len(by_extra["models"])
    assert by_extra["num_backbones"] == 8
    assert by_extra["num_worthwhile"] == int((table["best_of_n_gain"] >= 0.05).sum())
    assert by_extra["num_turned"] == int(table["best_of_n_turned"].sum())
    assert judged(table) == by_extra


def test_which_optimizer_is_planned_decides_whose_gain_and_headroom_count():
    table = planted(of_extra=0.0)
    table["kl_optimum_gain"] = -table["best_of_n_gain"]
    for optimizer, sign in (("best_of_n", 1), ("kl_optimum", -1)):
        found = judged(table, optimizer=optimizer)
        assert found["fit"]["coefficients"][0] * sign > 0
        assert found["num_worthwhile"] == int((table[f"{optimizer}_gain"] >= 0.05).sum())
        assert found["num_turned"] == int(table[f"{optimizer}_turned"].sum())
        table[f"{optimizer}_headroom"] = table[f"{optimizer}_gain"]
        again = judged(table, optimizer=optimizer)
        assert again["correlations"]["v2"][optimizer]["value"] > 0.9


def with_worth(table):
    return table.assign(worthwhile=table["best_of_n_gain"] >= 0.05, headroom=table["best_of_n_headroom"])


@pytest.mark.parametrize("features", [PLAIN, COMPOSED])
def test_a_type_of_defect_has_no_say_in_its_own_prediction(features):
    table = with_worth(planted(of_extra=1.0))
    plain = _left_out(table, features)
    for defect in DEFECTS:
        inside = (table["defect"] == defect).to_numpy()
        turned = _left_out(table.assign(worthwhile=table["worthwhile"] ^ inside), features)
        assert np.array_equal(turned[inside], plain[inside])
        assert not np.allclose(turned[~inside], plain[~inside])


def test_a_planted_pattern_of_one_type_is_not_learnt_from_it():
    """Where one type turns the relation around, its own models are predicted as the others are, so wrongly."""
    table = planted(of_extra=0.0)
    inside = (table["defect"] == "shortcut").to_numpy()
    table.loc[inside, "best_of_n_gain"] *= -1
    found = pd.DataFrame(judged(table)["models"])
    assert spearmanr(found["plain"][inside], table["best_of_n_gain"][inside]).statistic < -0.9
    assert spearmanr(found["plain"][~inside], table["best_of_n_gain"][~inside]).statistic > 0.9


def test_where_only_one_type_is_worthless_the_others_share_is_all_that_is_known_of_it():
    table = with_worth(planted()).assign(worthwhile=lambda rows: rows["defect"] != "none")
    found = _left_out(table, PLAIN)
    assert (found[(table["defect"] == "none").to_numpy()] == 1.0).all()


@pytest.mark.parametrize("features", [PLAIN, COMPOSED])
def test_the_fit_is_the_optimum_of_the_penalised_likelihood(features):
    table = with_worth(planted(of_extra=0.6))
    parts = table[list(features)].to_numpy()
    centred = parts - parts.mean(axis=0)
    scale = np.sqrt((centred**2).mean(axis=0))
    signs = np.where(table["worthwhile"], 1.0, -1.0)

    def loss(both):
        logits = centred @ both[:-1] + both[-1]
        return np.logaddexp(0, -signs * logits).sum() + L2 / 2 * (((scale * both[:-1]) ** 2).sum() + both[-1] ** 2)

    fit = fit_probability(table, features)
    ours = np.array([*fit["coefficients"], fit["intercept"]])
    found = minimize(
        loss, ours + np.random.default_rng(0).normal(size=len(ours)), method="BFGS", options={"gtol": 1e-8}
    )
    assert ours == pytest.approx(found.x, rel=1e-3, abs=1e-3)
    assert loss(ours) <= found.fun + 1e-9
    assert fit["means"] == pytest.approx(parts.mean(axis=0))
    assert fit["features"] == list(features)


def test_parts_in_other_units_give_the_same_probabilities():
    table = planted(of_extra=1.0)
    moved = table.assign(signal_share=100 * table["signal_share"] - 7, hard_accuracy=-table["hard_accuracy"])
    for one, other in zip(judged(table)["models"], judged(moved)["models"], strict=True):
        assert other["v2"] == pytest.approx(one["v2"], abs=1e-6)


@pytest.mark.parametrize("min_gain", [-100.0, 100.0])
def test_nothing_to_tell_apart_is_refused(min_gain):
    with pytest.raises(DataError, match="nothing to tell apart"):
        judged(planted(), min_gain=min_gain)


@pytest.mark.parametrize("name", ["skill_16", "win_rate_16"])
def test_a_part_that_was_not_measured_says_nothing_and_stops_nothing(by_accuracy, name):
    """skill_16 is a part of v2, win_rate_16 a score of its own; neither is there with fewer than 16 samples."""
    table = planted()
    gone = judged(table.drop(columns=name))
    assert gone == judged(table.assign(**{name: None}))
    json.dumps(gone, allow_nan=False)
    if name in COMPOSED:
        assert gone["brier"]["v2"] != by_accuracy["brier"]["v2"]
    else:
        assert gone["correlations"][name]["best_of_n"]["value"] == 0
        assert gone["brier"] == by_accuracy["brier"]


def test_a_model_without_a_part_takes_the_mean_of_the_others():
    table = with_worth(planted())
    some = table.assign(signal_share=table["signal_share"].where(table.index % 2 == 0))
    filled = some.assign(signal_share=some["signal_share"].fillna(some["signal_share"].mean()))
    assert fit_probability(some, COMPOSED) == fit_probability(filled, COMPOSED)


@pytest.mark.parametrize("value", [None, math.nan])
def test_gains_that_no_sample_reaches_are_refused_with_what_to_change(value):
    table = planted().assign(best_of_n_gain=value, kl_optimum_gain=value)
    with pytest.raises(DataError, match=r"readiness\.planned_kl"):
        judged(table)


def test_models_whose_gain_is_not_known_are_left_out():
    table = planted()
    unknown = table.index % 5 == 0
    some = judged(table.assign(best_of_n_gain=table["best_of_n_gain"].mask(unknown)))
    assert some["num_models"] == (~unknown).sum()
    json.dumps(some, allow_nan=False)
    rest = judged(table[~unknown].reset_index(drop=True))
    assert some["correlations"]["v2"] == rest["correlations"]["v2"]
