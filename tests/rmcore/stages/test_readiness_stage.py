"""The stage readiness: what it writes of choosing among logged answers."""

import json
import shutil

import pandas as pd
import pytest

import logged_sample
from capability_samples import SECTIONS
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.tracking import NullTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_pairs
from rmcore.readiness.logged_answers import logged_answers
from rmcore.stages import readiness
from rmcore.stages.stages import CURVATURE, STAGES, stage_of_metric
from single_stage import stage_with

METRICS = {"pairwise_accuracy": 0.8, "ece_debiased": 0.02, "pooled_reward_variance": 0.5, "margin_p50": 1.0}


@pytest.fixture
def run(tmp_path):
    """The stage on a table of pairs with rewards."""

    def run(table, *, curvature=None):
        folders = {name: tmp_path / name for name in ("prepare", "evaluate", "out", *filter(None, [curvature]))}
        for folder in folders.values():
            folder.mkdir()
        rows = list(table.itertuples())
        pairs = [PreferencePair(row.prompt, row.chosen, row.rejected, row.target_margin) for row in rows]
        write_pairs(pairs, folders["prepare"] / "test.parquet")
        rewards = table[["reward_chosen", "reward_rejected"]].assign(pair_id=[pair.pair_id for pair in pairs])
        other = rewards.assign(reward_chosen=-9.0)
        splits = pd.concat([other.assign(split="validation"), rewards.assign(split="test")])
        splits.to_parquet(folders["evaluate"] / "rewards.parquet")
        test = {name: {"value": value} for name, value in (METRICS | {"negative_margin_rate": 0.2}).items()}
        test["ece_debiased"] |= {"ci_low": 0.0, "ci_high": 0.05}
        test["accuracy_over_baseline"] = {"value": 0.2, "ci_low": 0.1, "ci_high": 0.3, "num": len(rows), "reason": None}
        metrics = {"test": test, "train": {"pairwise_accuracy": {"value": 0.85}}}
        (folders["evaluate"] / "metrics.json").write_text(json.dumps({"metrics": metrics}))
        config = PipelineConfig(evaluate=EvaluateConfig(num_resamples=100), seed=3)
        if curvature:
            (folders[curvature] / STAGES[curvature].outcome[0]).write_text(json.dumps({CURVATURE: 10.0}))
            config = config.model_copy(update={curvature: SECTIONS[curvature]})
        run.told = []
        readiness.run(
            stage_with("readiness", config, folders), folders["out"], NullTracker(), lambda *told: run.told.append(told)
        )
        return folders["out"]

    return run


@pytest.mark.slow
def test_logged_answers_are_measured_on_the_held_out_pairs_and_drawn(run):
    table = logged_sample.table(num_prompts=20)
    out = run(table)
    found = json.loads((out / "logged_answers.json").read_text())
    ids = [PreferencePair(prompt, "a", "b").prompt_id for prompt in table["prompt"]]
    assert found == logged_answers(table.assign(prompt_id=ids), num_resamples=100, seed=3)
    metrics = json.loads((out / "summary.json").read_text())["metrics"]
    assert metrics["ready/logged_win_rate_2"] == found["choices"][0]["win_rate"]
    assert metrics["ready/logged_gain_4"] == found["choices"][1]["gain"]
    assert (out / "figures" / "logged_answers.png").is_file()
    assert run.told[:2] == [(100, 100, f"best of {k}: resamples") for k in (2, 4)]


def test_where_prompts_have_too_few_answers_there_is_nothing(run):
    out = run(logged_sample.table(num_prompts=20, sizes=(3, 3)))
    assert json.loads((out / "logged_answers.json").read_text()) is None
    assert not any("logged" in name for name in json.loads((out / "summary.json").read_text())["metrics"])
    assert not (out / "figures").exists()


@pytest.mark.slow
def test_without_curvature_the_verdict_is_the_same_and_the_original_score_is_formed_of_the_rest(run, tmp_path):
    table = logged_sample.table(num_prompts=20)
    measuring = stage_of_metric(CURVATURE)
    judged = json.loads((run(table) / "readiness.json").read_text())
    assert judged["readiness"]["landscape_score"] is None
    metrics = json.loads((tmp_path / "out" / "summary.json").read_text())["metrics"]
    assert "ready/overall_score" in metrics
    assert "ready/landscape_score" not in metrics
    for name in ("prepare", "evaluate", "out"):
        shutil.rmtree(tmp_path / name)
    measured = json.loads((run(table, curvature=measuring) / "readiness.json").read_text())
    assert measuring is None or measured["readiness"]["landscape_score"] > 0
    assert {name: judged[name] for name in ("gate", "verdict")} == {
        name: measured[name] for name in ("gate", "verdict")
    }
