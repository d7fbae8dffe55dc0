import csv
import gzip
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import read_json_lines
from rmcore.core.progress import progress_bar
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.pair import Message, PreferencePair
from rmcore.evaluation.report_card import batch_metrics
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into
from tests.support.turn_fields import TOOLS_TURN

TRAIN = {"steps": 6, "eval_every": 2, "log_every": 1, "lr": 1e-3, "pairs_per_step": 4, "warmup_steps": 0}


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_a_training_gives_its_beta_to_the_model_its_checkpoints_and_its_evaluations(tmp_path, start):
    training = start(tmp_path, beta=0.25, keep_top_k=1).run()
    assert training.rm.beta == 0.25
    for name in ("best", "step_6"):
        assert BradleyTerryRM.from_pretrained(tmp_path / name, device="cpu").beta == 0.25
    expected = batch_metrics(0.25 * training.trainer.best_rewards.astype(np.float64))
    best = training.rows()[training.result.best_step]
    assert best["eval/loss"] == expected["loss"]
    assert best["eval/ece"] == expected["ece"]


@pytest.mark.slow
def test_the_best_checkpoint_has_the_rewards_of_the_best_evaluation(undisturbed, gold_pairs):
    held_out, result, rows = gold_pairs[20:30], undisturbed.result, undisturbed.rows()
    evaluations = {step: row["eval/pairwise_accuracy"] for step, row in rows.items() if "eval/loss" in row}
    assert result.best_value == max(evaluations.values()) == evaluations[result.best_step]
    reloaded = BradleyTerryRM.from_pretrained(undisturbed.folder / "best", device="cpu")
    rewards = reloaded.score_pairs(held_out)
    np.testing.assert_allclose(rewards, undisturbed.trainer.best_rewards, atol=1e-6)
    assert (rewards[:, 0] > rewards[:, 1]).mean() == pytest.approx(result.best_value)


def test_head_only_moves_the_head_and_nothing_else(start, gold_pairs, tmp_path):
    same_each_step = gold_pairs[:4]
    training = start(tmp_path, pairs=same_each_step, model={"head_only": True}, lr=1e-2)
    before = {name: tensor.clone() for name, tensor in training.rm.model.state_dict().items()}
    training.run()
    moved = {name for name, tensor in training.rm.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"score.weight"}
    assert all(parameter.grad is None for name, parameter in training.rm.model.named_parameters() if name not in moved)
    assert training.rm.num_trained_parameters == training.rm.model.score.weight.numel()
    assert training.losses()[-1] < training.losses()[0]
    saved = weights(tmp_path / "step_6")  # a plain, whole checkpoint
    assert saved.keys() == {*before}
    assert torch.equal(saved["score.weight"], training.rm.model.score.weight)


def test_head_only_refuses_what_needs_the_backbone(start, tmp_path):
    with pytest.raises(ValidationError, match="head_only leaves the backbone as it is, and lora adapts it"):
        ModelConfig.model_validate({"head_only": True, "lora": {}})
    with pytest.raises(ConfigError, match="muon moves matrices of the backbone"):
        start(tmp_path, model={"head_only": True}, optimizer="muon").run()


@pytest.mark.slow
def test_without_held_out_pairs_nothing_is_evaluated_and_best_is_last(tmp_path, start):
    training = start(tmp_path, held_out=[], save_every=2).run()
    result = training.result
    assert not any(name.startswith("eval/") for _, values in training.tracker.rows for name in values)
    assert result.best_step == result.num_steps == 6
    assert result.best_metric is None
    best, last = weights(tmp_path / "best"), weights(tmp_path / "step_6")
    assert all(torch.equal(best[key], last[key]) for key in best)
    assert {path.name for path in tmp_path.iterdir()} == {
        "best", "step_2", "step_4", "step_6", "metrics.csv", "reward_distributions.json", "resume",
    }  # fmt: skip


@pytest.mark.slow
def test_where_no_step_is_chosen_the_last_one_is_kept_and_evaluations_still_run(tmp_path, start, gold_pairs):
    training = start(tmp_path, steps=5, best_metric="last", early_stopping_patience=None).run()
    trainer, result = training.trainer, training.result
    assert [step for step, values in training.tracker.rows if "eval/pairwise_accuracy" in values] == [2, 4, 5]
    assert (result.best_step, result.best_metric, result.best_value, result.kept_steps) == (5, None, None, [])
    best, last = weights(tmp_path / "best"), weights(tmp_path / "step_5")
    assert all(torch.equal(best[key], last[key]) for key in best)
    rewards = BradleyTerryRM.from_pretrained(tmp_path / "best", device="cpu").score_pairs(gold_pairs[20:30])
    np.testing.assert_allclose(rewards, trainer.best_rewards, atol=1e-6)
    assert trainer.best_rewards_split == "validation"


@pytest.mark.slow
def test_an_evaluation_in_training_measures_what_the_evaluate_stage_does(undisturbed):
    logged = undisturbed.rows()[undisturbed.result.best_step]
    measured = batch_metrics(undisturbed.trainer.best_rewards)
    assert {"roc_auc", "margin_p25", "fpr@0.3", "fnr@0.7"} <= measured.keys()
    for name, value in measured.items():
        assert logged[f"eval/{name.replace('@', '_at_')}"] == value, name
    assert all(name.count("/") == 1 and "@" not in name for name in logged)
    seconds = [values["cost/train_seconds"] for _, values in undisturbed.tracker.rows if "eval/loss" in values]
    assert 0 < seconds[0] < seconds[1] < seconds[2] == undisturbed.result.train_seconds


@pytest.mark.slow
def test_metrics_and_reward_distributions_can_be_followed_while_it_trains(start, tmp_path):
    seen = {}

    def look(step):
        with (tmp_path / "metrics.csv").open() as file:
            table = list(csv.DictReader(file))
        described = tmp_path / "reward_distributions.json"
        seen[step] = ([int(row["step"]) for row in table], table[-1]["eval_loss"] != "", described.is_file())

    training = start(tmp_path, stop=look).run()
    assert {step: steps for step, (steps, _, _) in seen.items()} == {n: [*range(1, n + 1)] for n in range(1, 7)}
    assert [evaluated for _, evaluated, _ in seen.values()] == [False, True] * 3
    assert [described for _, _, described in seen.values()] == [False] + [True] * 5
    rewards = training.trainer.best_rewards
    described = json.loads((tmp_path / "reward_distributions.json").read_text())["validation"]
    assert [described[side]["mean"] for side in ("chosen", "rejected")] == pytest.approx(rewards.mean(axis=0).tolist())


@pytest.mark.slow
def test_the_stage_writes_the_documented_files(tmp_path, gold_pairs, capsys):
    config = PipelineConfig.model_validate({"model": {"name": "tiny-small", "max_seq_len": 96}, "train": TRAIN})
    tracker = JsonlTracker(tmp_path / METRICS_FILE)
    (tmp_path / ".tokens-7").mkdir()  # of an attempt that was killed
    unseen = PreferencePair((TOOLS_TURN, Message("user", "q")), "a", "b")  # the tiny model's template knows no tools
    with progress_bar("train") as report:
        train_into(training_of(config), [*gold_pairs[:20], unseen], gold_pairs[20:30], tmp_path, tracker, report)
    tracker.close()
    assert "1 rows cannot be used and are left out" in capsys.readouterr().err
    (dropped,) = read_json_lines(tmp_path / "dropped_pairs.jsonl")
    assert (dropped["pair_id"], "does not show tools" in dropped["reason"]) == (unseen.pair_id, True)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"best", "step_6", "metrics.csv", "metrics.jsonl", "reward_distributions.json", "training.json"} <= names
    assert "resume" not in names
    assert not [name for name in names if name.startswith(".")]
    assert len(read_json_lines(tmp_path / METRICS_FILE)) == 9  # six logged steps, three evaluations
    summary = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    peak = json.loads((tmp_path / "training.json").read_text())["peak_training_bytes"]
    assert summary["cost/peak_training_mib"] == peak / 2**20 > 0
    distribution = json.loads((tmp_path / "reward_distributions.json").read_text())["validation"]["chosen"]
    assert sum(distribution["histogram"]["counts"]) == distribution["num"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 6])
def test_a_profiled_training_leaves_a_trace_says_what_it_lacks_and_ends_with_the_same_bits(
    tmp_path, start, capsys, steps
):
    for name, profiles in (("plain", False), ("profiled", True)):
        start(tmp_path / name, held_out=[], steps=steps, profile_gpu=profiles).run()
    assert ("has no GPU, so neither kernels" in capsys.readouterr().err) is not torch.cuda.is_available()
    plain, profiled = (weights(tmp_path / name / f"step_{steps}") for name in ("plain", "profiled"))
    assert all(torch.equal(plain[key], profiled[key]) for key in plain)
    with gzip.open(tmp_path / "profiled" / "profile" / "trace.json.gz", "rt") as file:
        events = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", f"ProfilerStep#{steps - 1}"} <= events
    assert "aten::mm" in (tmp_path / "profiled" / "profile" / "operations.txt").read_text()
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.slow
def test_callbacks_see_each_evaluation_once_and_what_they_measure_is_logged_there(tmp_path, start):
    seen = []

    def callback(evaluation):
        seen.append(evaluation)
        return {"mine/sum": float(evaluation.rewards.sum())}

    training = start(tmp_path, callbacks=[callback], steps=5).run()
    assert [evaluation.step for evaluation in seen] == [2, 4, 5]
    for evaluation in seen:
        row = training.trainer.progress.rows[evaluation.step]
        margins = evaluation.rewards[:, 0] - evaluation.rewards[:, 1]
        assert row["mine/sum"] == float(evaluation.rewards.sum())
        assert row["eval/mean_margin"] == pytest.approx(margins.mean(), abs=1e-5)
        assert len(evaluation.pairs) == len(margins) == 10
    logged = [step for step, values in training.tracker.rows if "mine/sum" in values]
    assert logged == [2, 4, 5]
    best = [evaluation for evaluation in seen if evaluation.step == training.result.best_step]
    np.testing.assert_array_equal(best[0].rewards, training.trainer.best_rewards)
