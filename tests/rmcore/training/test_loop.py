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
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import read_json_lines
from rmcore.core.progress import progress_bar
from rmcore.core.tracking import METRICS_FILE, JsonlTracker, MemoryTracker
from rmcore.data.pair import Message, PreferencePair
from rmcore.evaluation.report_card import batch_metrics
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into
from rmcore.training.loop import Trainer
from tests.support.turn_fields import TOOLS_TURN

CPU = torch.device("cpu")
TRAIN = {"steps": 6, "eval_every": 2, "log_every": 1, "lr": 1e-3, "pairs_per_step": 4, "warmup_steps": 0}


def run(folder, pairs, held_out, *, seed=3, **changes):
    folder.mkdir(exist_ok=True)
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=CPU)
    tracker = MemoryTracker()
    trainer = Trainer(
        rm,
        TrainConfig.model_validate(TRAIN | changes),
        train=rm.renderer.tokenize_pairs(pairs),
        validation=rm.renderer.tokenize_pairs(held_out),
        folder=folder,
        tracker=tracker,
        seed=seed,
    )
    return trainer, trainer.run(), tracker


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_another_one_others(tmp_path, gold_pairs):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(tmp_path / name, gold_pairs[:20], gold_pairs[20:30], seed=seed)
    first, second, other = (weights(tmp_path / name / "step_6") for name in ("a", "b", "c"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.slow
def test_a_training_gives_its_beta_to_the_model_its_checkpoints_and_its_evaluations(tmp_path, gold_pairs):
    trainer, _, tracker = run(tmp_path / "run", gold_pairs[:20], gold_pairs[20:30], beta=0.25, keep_top_k=1)
    assert trainer.rm.beta == 0.25
    for name in ("best", "step_6"):
        assert BradleyTerryRM.from_pretrained(tmp_path / "run" / name, device="cpu").beta == 0.25
    expected = batch_metrics(0.25 * trainer.best_rewards.astype(np.float64))
    step = max((values["eval/pairwise_accuracy"], -step) for step, values in tracker.rows if "eval/loss" in values)[1]
    best = next(values for at, values in tracker.rows if at == -step and "eval/loss" in values)
    assert best["eval/loss"] == expected["loss"]
    assert best["eval/ece"] == expected["ece"]


@pytest.mark.slow
def test_the_best_checkpoint_has_the_rewards_of_the_best_evaluation(tmp_path, gold_pairs):
    held_out = gold_pairs[20:60]
    trainer, result, tracker = run(tmp_path, gold_pairs[:20], held_out, steps=8)
    evaluations = {step: values["eval/pairwise_accuracy"] for step, values in tracker.rows if "eval/loss" in values}
    assert result.best_value == max(evaluations.values()) == evaluations[result.best_step]
    reloaded = BradleyTerryRM.from_pretrained(tmp_path / "best", device="cpu")
    rewards = reloaded.score_pairs(held_out)
    np.testing.assert_allclose(rewards, trainer.best_rewards, atol=1e-6)
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


@pytest.mark.slow
def test_head_only_has_the_gradient_of_full_training_at_the_head(start, tmp_path):
    """The first logged gradient norm would differ, but SGD's first step of the head cannot."""
    heads = []
    for name, model in (("full", {}), ("head", {"head_only": True})):
        training = start(tmp_path / name, model=model, optimizer="sgd", steps=1, lr=1e-3, clip=1e9).run()
        heads.append(training.rm.model.score.weight.detach())
    torch.testing.assert_close(heads[1], heads[0], rtol=1e-6, atol=1e-9)


def test_head_only_refuses_what_needs_the_backbone(start, tmp_path):
    with pytest.raises(ValidationError, match="head_only leaves the backbone as it is, and lora adapts it"):
        ModelConfig.model_validate({"head_only": True, "lora": {}})
    with pytest.raises(ConfigError, match="muon moves matrices of the backbone"):
        start(tmp_path, model={"head_only": True}, optimizer="muon").run()


@pytest.mark.slow
def test_without_held_out_pairs_nothing_is_evaluated_and_best_is_last(tmp_path, gold_pairs):
    _, result, tracker = run(tmp_path, gold_pairs[:20], [], save_every=2)
    assert not any(name.startswith("eval/") for _, values in tracker.rows for name in values)
    assert result.best_step == result.num_steps == 6
    assert result.best_metric is None
    best, last = weights(tmp_path / "best"), weights(tmp_path / "step_6")
    assert all(torch.equal(best[key], last[key]) for key in best)
    assert {path.name for path in tmp_path.iterdir()} == {
        "best", "step_2", "step_4", "step_6", "metrics.csv", "reward_distributions.json", "resume",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"batching": "plain", "token_budget": 4096}], ids=str)
def test_where_no_step_is_chosen_the_last_one_is_kept_and_evaluations_still_run(tmp_path, gold_pairs, changes):
    held_out = gold_pairs[20:60]
    settings = {"best_metric": "last", "early_stopping_patience": None, **changes}
    trainer, result, tracker = run(tmp_path, gold_pairs[:20], held_out, steps=7, **settings)
    assert [step for step, values in tracker.rows if "eval/pairwise_accuracy" in values] == [2, 4, 6, 7]
    assert (result.best_step, result.best_metric, result.best_value, result.kept_steps) == (7, None, None, [])
    best, last = weights(tmp_path / "best"), weights(tmp_path / "step_7")
    assert all(torch.equal(best[key], last[key]) for key in best)
    rewards = BradleyTerryRM.from_pretrained(tmp_path / "best", device="cpu").score_pairs(held_out)
    np.testing.assert_allclose(rewards, trainer.best_rewards, atol=1e-6)
    assert trainer.best_rewards_split == "validation"


@pytest.mark.slow
def test_choosing_no_step_changes_no_weight(tmp_path, gold_pairs):
    for name in ("last", "eval/loss"):
        folder = tmp_path / name.replace("/", "_")
        run(folder, gold_pairs[:20], gold_pairs[20:30], best_metric=name, early_stopping_patience=None)
    first, second = (weights(tmp_path / name / "step_6") for name in ("last", "eval_loss"))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, r"early_stopping_patience=5 .*set early_stopping_patience to null \(--no-early-stopping\)"),
        ({"early_stopping_patience": None, "keep_top_k": 2}, "keep_top_k=2 .*save_every"),
    ],
)
def test_what_needs_a_choice_is_refused_without_one(settings, advice):
    with pytest.raises(ValidationError, match=advice):
        TrainConfig.model_validate({"best_metric": "last"} | settings)


@pytest.mark.slow
def test_each_evaluation_tells_the_seconds_of_training_so_far(tmp_path, gold_pairs):
    _, result, tracker = run(tmp_path, gold_pairs[:20], gold_pairs[20:30])
    seconds = [values["cost/train_seconds"] for _, values in tracker.rows if "eval/loss" in values]
    assert len(seconds) == 3
    assert 0 < seconds[0] < seconds[1] < seconds[2] == result.train_seconds


@pytest.mark.slow
def test_training_stops_when_the_metric_no_longer_improves(tmp_path, gold_pairs):
    _, result, _ = run(
        tmp_path, gold_pairs[:20], gold_pairs[20:40], lr=1e-12, steps=50, eval_every=1, early_stopping_patience=3
    )
    assert result.num_steps == 4  # the first evaluation is the best one; three more bring nothing
    assert "did not improve for 3 evaluations" in result.stop_reason


@pytest.mark.slow
def test_an_evaluation_in_training_measures_what_the_evaluate_stage_does(start, tmp_path):
    training = start(tmp_path, best_metric="last", early_stopping_patience=None)
    training.run()
    logged = training.rows()[6]
    measured = batch_metrics(training.trainer.best_rewards)
    assert {"roc_auc", "margin_p25", "fpr@0.3", "fnr@0.7"} <= measured.keys()
    for name, value in measured.items():
        assert logged[f"eval/{name.replace('@', '_at_')}"] == value, name
    assert all(name.count("/") == 1 and "@" not in name for name in logged)


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
def test_without_validation_pairs_those_trained_on_are_described_and_no_others(tmp_path, gold_pairs, monkeypatch):
    trainer, result, _ = run(tmp_path / "few", gold_pairs[:20], [], steps=3)
    trained = {index for step in range(3) for index in trainer.feed.order[step]}
    assert result.num_steps == 3
    assert len(trained) < 20
    assert (trainer.best_rewards_split, len(trainer.best_rewards)) == ("train", len(trained))
    pairs = [trainer.train[index] for index in trained]
    scored = trainer.rm.score_sides([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    np.testing.assert_allclose(np.sort(trainer.best_rewards, axis=None), np.sort(scored), atol=1e-5)
    monkeypatch.setattr("rmcore.training.loop.DISTRIBUTION_PAIRS", 5)
    trainer, _, _ = run(tmp_path / "many", gold_pairs[:20], [], steps=6)
    assert len(trainer.best_rewards) == 5


@pytest.mark.slow
def test_a_run_that_blows_up_keeps_the_last_good_checkpoint(tmp_path, gold_pairs):
    with pytest.raises(TrainingError, match="not finite"):
        run(tmp_path, gold_pairs[:20], gold_pairs[20:30], lr=1e30, clip=1e30, eval_every=1, optimizer="sgd", steps=9)
    if (tmp_path / "best").exists():
        assert all(torch.isfinite(value).all() for value in weights(tmp_path / "best").values())
    assert (tmp_path / "metrics.csv").is_file()


@pytest.mark.slow
def test_the_stage_writes_the_documented_files(tmp_path, gold_pairs, capsys):
    config = PipelineConfig.model_validate({"model": {"name": "tiny", "max_seq_len": 96}, "train": TRAIN})
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
    distribution = json.loads((tmp_path / "reward_distributions.json").read_text())["validation"]["chosen"]
    assert sum(distribution["histogram"]["counts"]) == distribution["num"] == 10


@pytest.mark.slow
def test_memory_is_logged_with_the_training_metrics_where_asked_for(tmp_path, gold_pairs):
    names = {"cost/host_mib", "cost/host_peak_mib"}
    _, _, tracker = run(tmp_path / "on", gold_pairs[:20], gold_pairs[20:30], profile_memory=True)
    rows = [values for _, values in tracker.rows if "train/loss" in values]
    assert len(rows) == 6
    assert all(0 < values["cost/host_mib"] <= values["cost/host_peak_mib"] * 1.01 for values in rows)
    _, _, tracker = run(tmp_path / "off", gold_pairs[:20], [], steps=1)
    assert not any(names & values.keys() for _, values in tracker.rows)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 6])
def test_a_profiled_training_leaves_a_trace_says_what_it_lacks_and_ends_with_the_same_bits(
    tmp_path, gold_pairs, capsys, steps
):
    for name, profiles in (("plain", False), ("profiled", True)):
        run(tmp_path / name, gold_pairs[:20], [], steps=steps, profile_gpu=profiles)
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
