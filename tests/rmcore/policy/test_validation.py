"""The study's analysis, on populations in which it was planted what predicts the gain."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.stats import spearmanr

from rmcore.config.readiness import ReadinessConfig
from rmcore.core.errors import DataError
from rmcore.policy.readiness import operating
from rmcore.policy.readiness.claims import CLAIMS, claims_digest
from rmcore.policy.readiness.operating import Clusters, operating_points
from rmcore.policy.readiness.readiness_v2 import conditions, shipped_fit
from rmcore.policy.readiness.validation import (
    COMPOSED,
    FITS,
    L2,
    SCORES,
    _correlations,
    _judge,
    analyse,
    calibration,
    fit_probability,
    left_out,
    spearman,
)
from rmcore.reporting.html.validation import validation_markdown

NUM_RESAMPLES = 200
KINDS = ("none", "label_noise", "few_pairs", "shortcut", "overtrained", "truncated")
WORLDS = ("flattery", "claims")
HEADS = {"own": "none", "refitted": "none", "noise_35": "label_noise", "few_60": "few_pairs", "shortcut_60": "shortcut"}
GATES = conditions(ReadinessConfig())


def planted(seed=0, *, accuracy=0.0, wins=0.0, measured=0.0, signal=0.0, num_recipes=24, shared=0.5):
    """Reward models of two worlds whose gain is a sum of scores, and of a part that heads of one recipe share."""
    rng = np.random.default_rng(seed)
    rows = []
    for world in WORLDS:
        for recipe in range(num_recipes):
            common = rng.normal()
            for head, head_defect in HEADS.items():
                score = dict(zip(("accuracy", "wins", "measured", "signal"), rng.normal(size=4), strict=True))
                gain = accuracy * score["accuracy"] + wins * score["wins"]
                gain += measured * score["measured"] + signal * score["signal"] + shared * common + 0.3 * rng.normal()
                rows.append(
                    {
                        "world": world,
                        "recipe": f"r{recipe}",
                        "backbone": f"r{recipe}",
                        "head": head,
                        "backbone_defect": KINDS[recipe % len(KINDS)],
                        "head_defect": head_defect,
                        "on_policy_accuracy": 0.65 + 0.05 * score["accuracy"],
                        "win_rate_16": 0.6 + 0.05 * score["wins"],
                        "skill_16": 0.2 + 0.1 * score["wins"],
                        "signal_share": score["signal"],
                        "best_of_n_gain": gain,
                        "kl_optimum_gain": gain + 0.02 * rng.normal(),
                        "best_of_n_measured_gain": score["measured"],
                        "kl_optimum_measured_gain": score["measured"],
                    }
                )
    table = pd.DataFrame(rows)
    num = len(table)
    for name in ("v1", "pairwise_accuracy", "hard_accuracy", "length_correlation"):
        table[name] = rng.normal(size=num)
    table["ece_tempered_debiased"], table["lambda_max"] = rng.uniform(0, 0.1, size=num), rng.uniform(1, 99, size=num)
    for method in ("best_of_n", "kl_optimum"):
        table[f"{method}_headroom"] = rng.uniform(0, 2, size=num)
        table[f"{method}_planned_gain"] = table[f"{method}_measured_gain"]
        table[f"{method}_planned_fall"] = np.minimum(0, table[f"{method}_measured_gain"])
        table[f"{method}_turned"] = rng.random(num) < 0.2
        for part in ("headroom", "measured_gain", "planned_fall", "planned_gain"):
            table[f"{method}_{part}_low"] = table[f"{method}_{part}"] - 0.2
            table[f"{method}_{part}_high"] = table[f"{method}_{part}"] + 0.2
    for part in ("on_policy_accuracy", "win_rate_16", "hard_accuracy", "signal_share", "ece_tempered_debiased"):
        table[f"{part}_low"], table[f"{part}_high"] = table[part] - 0.02, table[part] + 0.02
    own = (table["head"] == "own") & table["recipe"].isin(["r0", "r1", "r2", "r3"])
    table["signal_share_seeds"] = table["best_of_n_gain"].where(own)
    return table


def judged(table, **changes):
    settings = {"optimizer": "best_of_n", "min_gain": 0.3, "seed": 0, "conditions": GATES, "shipped": shipped_fit()}
    return analyse(table, **settings | changes)


def verdicts(found):
    return {one["name"]: one["verdict"] for one in found["claims"]}


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Intervals of the study are over two thousand; a few show the same here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operating, "NUM_RESAMPLES", NUM_RESAMPLES)
        yield


@pytest.fixture(scope="module")
def by_wins(few_resamples):
    return judged(planted(wins=1.0))


@pytest.fixture(scope="module")
def by_accuracy(few_resamples):
    return judged(planted(accuracy=1.0))


def test_where_the_win_rate_predicts_the_gain_it_becomes_the_score(by_wins):
    first = by_wins["claims"][0]
    assert (first["name"], first["verdict"], first["replaces"]) == ("H1", "supported", True)
    assert 0 < first["ci_low"] < first["value"] < first["ci_high"]
    assert all(one["ci_low"] > 0 for one in first["worlds"].values())
    assert by_wins["score"] == by_wins["fit"]["score"] == "win_rate_16"
    assert by_wins["fit"]["features"] == ["win_rate_16"]
    assert by_wins["fit"]["coefficients"][0] > 0
    assert "H1 is supported" in by_wins["verdict"]


def test_where_accuracy_predicts_it_the_claim_is_refuted_and_nothing_changes(by_accuracy):
    assert verdicts(by_accuracy)["H1"] == "refuted"
    assert by_accuracy["score"] == "on_policy_accuracy"
    assert by_accuracy["claims"][0]["ci_high"] < 0


def test_where_both_predict_it_alike_nothing_is_decided():
    found = judged(planted(accuracy=0.7, wins=0.7))
    first = found["claims"][0]
    assert first["verdict"] == "inconclusive"
    assert first["ci_low"] < 0 < first["ci_high"]
    assert found["score"] == "on_policy_accuracy"


def test_a_gain_that_the_parts_share_makes_the_composed_score_the_one():
    found = judged(planted(wins=0.8, signal=1.2, shared=0.1))
    assert verdicts(found) == {"H1": "supported", "S1": "supported", "S2": "refuted"}
    assert found["score"] == "v2"
    assert found["fit"]["features"] == list(COMPOSED)


@pytest.mark.slow
def test_a_measured_gain_that_tells_more_becomes_the_score():
    found = judged(planted(wins=1.0, measured=1.8, shared=0.1, num_recipes=40))
    assert verdicts(found)["S2"] == "supported"
    assert found["score"] == "measured_gain"
    assert found["fit"]["features"] == ["planned_gain"]


@pytest.mark.slow
def test_what_holds_in_one_world_only_replaces_nothing():
    table = planted(wins=1.0, num_recipes=40)
    other = planted(7, accuracy=0.6, wins=0.6, num_recipes=40)
    mixed = pd.concat([table[table["world"] == WORLDS[0]], other[other["world"] == WORLDS[1]]])
    first = judged(mixed)["claims"][0]
    assert first["verdict"] == "supported"
    assert first["worlds"][WORLDS[1]]["ci_low"] < 0
    assert not first["replaces"]


def test_secondary_claims_are_corrected_for_there_being_two(by_wins):
    secondary = [one for one in by_wins["claims"] if one["role"] == "secondary"]
    assert len(secondary) == sum(claim.role == "secondary" for claim in CLAIMS) == 2
    least = min(secondary, key=lambda one: one["p"])
    assert least["p_holm"] == pytest.approx(min(1, 2 * least["p"]))
    assert by_wins["claims"][0]["p_holm"] is None


def test_the_record_is_json_names_its_claims_and_counts_what_there_is(by_wins):
    table = planted(wins=1.0)
    found = json.loads(json.dumps(by_wins, allow_nan=False))
    assert found["num_models"] == len(table) == len(found["models"])
    assert (found["num_backbones"], found["num_recipes"]) == (48, 24)
    assert found["claims_digest"] == claims_digest()
    assert [one["name"] for one in found["worlds"]] == list(WORLDS)
    assert found["num_worthwhile"] == int((table["best_of_n_gain"] >= 0.3).sum())
    assert sum(one["num_worthwhile"] for one in found["worlds"]) == found["num_worthwhile"]


def test_the_record_is_shown_with_every_claim_score_and_gate(by_wins):
    shown = validation_markdown(by_wins | {"registration": {"hash": "0" * 64, "frozen_at": "then"}})
    for expected in (
        *(claim.text for claim in CLAIMS),
        "left-out fit",
        "win rate 16: lower end at least 0.5",
        "of then",
        "over seeds",
    ):
        assert expected in shown


def test_correlations_are_spearmans_averaged_over_worlds_and_differences_are_theirs(by_wins):
    table = planted(wins=1.0)
    for score in ("v1", "pairwise_accuracy", "on_policy_accuracy", "win_rate_16"):
        for method in ("best_of_n", "kl_optimum"):
            each = [spearmanr(some[score], some[f"{method}_gain"]).statistic for _, some in table.groupby("world")]
            assert by_wins["correlations"][score][method]["value"] == pytest.approx(np.mean(each))
    base = by_wins["correlations"]["on_policy_accuracy"]["best_of_n"]["value"]
    assert set(by_wins["differences"]) == set(SCORES) - {"on_policy_accuracy"}
    for score, gap in by_wins["differences"].items():
        assert gap["value"] == pytest.approx(by_wins["correlations"][score]["best_of_n"]["value"] - base)
    own = table[table["head"] == "own"]
    each = [
        spearmanr(some["win_rate_16"], some["best_of_n_gain"]).statistic
        - spearmanr(some["on_policy_accuracy"], some["best_of_n_gain"]).statistic
        for _, some in own.groupby("world")
    ]
    assert by_wins["claims"][0]["own_heads"]["value"] == pytest.approx(np.mean(each))


def test_a_weighted_rank_correlation_is_that_of_the_repeated_rows():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, size=40).astype(float), rng.normal(size=40)
    weights = rng.integers(0, 4, size=(5, 40)).astype(float)
    found = spearman(first, second, weights)
    for row, rho in zip(weights.astype(int), found, strict=True):
        assert rho == pytest.approx(spearmanr(np.repeat(first, row), np.repeat(second, row)).statistic)
    holes = np.where(np.arange(40) < 5, np.nan, first)
    assert spearman(holes, second, np.ones((1, 40)))[0] == pytest.approx(spearmanr(first[5:], second[5:]).statistic)
    assert (spearman(np.zeros(40), second, weights) == 0).all()


@pytest.mark.slow
def test_the_interval_of_the_difference_covers_the_truth():
    """Simulated: populations whose recipes differ, each with the interval of H1's difference of rho."""

    def first_claim(seed, num_recipes):
        table = planted(seed, accuracy=0.4, wins=0.9, num_recipes=num_recipes)
        table = table.assign(measured_gain=0.0, flatness=0.0, v2=0.0, win_rate_fit=0.0, accuracy_fit=0.0)
        of = Clusters(table, 0)
        return _judge(_correlations(table, of), of, sorted(table["world"].unique()))[0]

    truth = np.mean([first_claim(1000 + seed, 400)["value"] for seed in range(3)])
    found = [first_claim(seed, 24) for seed in range(40)]
    covered = sum(one["ci_low"] <= truth <= one["ci_high"] for one in found)
    assert covered >= 34  # 38 are expected of 95 %, and 34 or more are seen 99 times in 100


# --- fits ---------------------------------------------------------------------------------------------------------


def with_worth(table):
    return table.assign(
        worthwhile=table["best_of_n_gain"] >= 0.3, lost=table["best_of_n_gain"] <= 0,
        headroom=table["best_of_n_headroom"],
        defect=table["head_defect"].where(table["head_defect"] != "none", table["backbone_defect"]),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("features", FITS.values())
def test_no_model_is_predicted_from_one_that_shares_a_kind_of_defect(features):
    table = with_worth(planted(wins=1.0))
    plain = left_out(table, features)
    for kind in KINDS:
        has_it = ((table["backbone_defect"] == kind) | ((table["head_defect"] == kind) & (kind != "none"))).to_numpy()
        turned = left_out(table.assign(worthwhile=table["worthwhile"] ^ has_it), features)
        assert np.array_equal(turned[has_it], plain[has_it])
        assert not np.allclose(turned[~has_it], plain[~has_it])


def test_composed_and_single_fits_are_left_out_alike():
    """Like with like: a single part that is all of the truth loses nothing but what fitting costs."""
    found = judged(planted(wins=1.0))
    fitted, raw = (found["correlations"][name]["best_of_n"]["value"] for name in ("win_rate_fit", "win_rate_16"))
    assert raw - 0.1 < fitted <= raw + 0.02


def test_where_nothing_is_left_to_tell_apart_the_share_is_all_that_is_known():
    table = with_worth(planted())
    only = (table["backbone_defect"] == "shortcut") | (table["head_defect"] == "shortcut")
    found = left_out(table.assign(worthwhile=~only), ("on_policy_accuracy",))
    assert (found[((table["backbone_defect"] == "shortcut") & (table["head"] == "own")).to_numpy()] == 1.0).all()


@pytest.mark.parametrize("features", FITS.values())
def test_the_fit_is_the_optimum_of_the_penalised_likelihood(features):
    table = with_worth(planted(wins=1.0)).assign(headroom=lambda rows: rows["best_of_n_headroom"])
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
    assert fit["means"] == pytest.approx(parts.mean(axis=0))
    assert fit["features"] == list(features)


@pytest.mark.parametrize("min_gain", [-100.0, 100.0])
def test_nothing_to_tell_apart_is_refused(min_gain):
    with pytest.raises(DataError, match="nothing to tell apart"):
        judged(planted(), min_gain=min_gain)


def test_a_part_that_was_not_measured_says_nothing_and_stops_nothing():
    table = planted(accuracy=1.0)
    gone = judged(table.drop(columns=["win_rate_16", "win_rate_16_low", "win_rate_16_high", "skill_16"]))
    json.dumps(gone, allow_nan=False)
    assert gone["correlations"]["win_rate_16"]["best_of_n"]["value"] == 0
    assert "win_rate_16" not in [one["part"] for one in gone["operating_points"]]


# --- calibration, signal, operating points ------------------------------------------------------------------------


def test_a_probability_that_is_true_beats_the_share_and_lies_on_the_diagonal():
    rng = np.random.default_rng(0)
    table = planted(num_recipes=120)
    table["true"] = rng.uniform(size=len(table))
    table["worthwhile"] = rng.uniform(size=len(table)) < table["true"]
    table["false"] = 1 - table["true"]
    of = Clusters(table, 0)
    true, false = (calibration(table, name, of) for name in ("true", "false"))
    assert true["brier"]["value"] == pytest.approx(((table["true"] - table["worthwhile"]) ** 2).mean())
    share = table["worthwhile"].mean()
    assert true["minus_share"]["value"] == pytest.approx(true["brier"]["value"] - share * (1 - share))
    assert true["minus_share"]["ci_high"] < 0 < false["minus_share"]["ci_low"]
    assert len(true["bins"]) == 5
    for one in true["bins"]:
        inside = table["true"].between(one["low"], one["high"])
        assert one["predicted"] == pytest.approx(table["true"][inside].mean())
        assert one["gained"]["value"] == pytest.approx(table["worthwhile"][inside].mean())
        assert one["gained"]["ci_low"] <= one["predicted"] + 0.02
        assert one["gained"]["ci_high"] >= one["predicted"] - 0.02


def test_the_signal_over_seeds_and_over_heads_are_compared_on_the_same_models(by_wins):
    found = by_wins["signal_share"]
    assert (found["num_models"], found["num_recipes"]) == (8, 4)
    assert found["seeds"]["value"] == pytest.approx(1)  # it was planted to be the gain
    assert found["seeds_minus_heads"]["value"] == pytest.approx(1 - found["heads"]["value"])
    without = judged(planted(wins=1.0).drop(columns="signal_share_seeds"))
    assert without["signal_share"] is None


def test_operating_points_are_those_of_counting_one_by_one():
    table = with_worth(planted(wins=1.0)).assign(
        **{
            f"{part}{end}": lambda rows, column=f"best_of_n_{part}{end}": rows[column]
            for part in ("planned_gain", "planned_fall")
            for end in ("", "_low", "_high")
        }
    )
    found = operating_points(table, GATES, Clusters(table, 0))
    by_name = {one["name"]: one for one in found}
    assert list(by_name) == [*(gate.name for gate in GATES), "all of them"]
    counts = {way: [True] * len(table) for way in ("by_end", "by_value")}
    for gate in GATES:
        for way, before in counts.items():
            column = gate.part
            if way == "by_end":
                column += f"_{gate.end}"
            passed = [column in table and row[column] >= gate.threshold for row in table.to_dict("records")]
            counts[way] = [one and other for one, other in zip(before, passed, strict=True)]
            check_shares(by_name[gate.name][way], passed, table)
    for way, passed in counts.items():
        check_shares(by_name["all of them"][way], passed, table)


def check_shares(found, passed, table):
    good, lost = list(table["worthwhile"]), list(table["lost"])
    wrong = [none for none, one in zip(lost, passed, strict=True) if one]
    ready = [worth for worth, one in zip(good, passed, strict=True) if one]
    refused = [not one for worth, one in zip(good, passed, strict=True) if worth]
    assert found["num_ready"] == len(ready)
    assert found["cost"] == sum(refused) + 4 * sum(wrong)
    if ready:
        assert found["ready_gained"]["value"] == pytest.approx(sum(ready) / len(ready))
        assert found["ready_lost"]["value"] == pytest.approx(sum(wrong) / len(wrong))
    else:
        assert found["ready_gained"] is found["ready_lost"] is None
    assert found["gained_refused"]["value"] == pytest.approx(sum(refused) / len(refused))
    for one in (found["ready_gained"], found["gained_refused"]):
        if one is not None and one["ci_low"] is not None:
            assert one["ci_low"] <= one["value"] <= one["ci_high"]
            assert one["ci_low"] < one["ci_high"]
