"""The tutorial's calls from top to bottom, as they are written there, with small models and data."""

from pathlib import Path

import numpy as np
import pytest
import torch

import rmcore
from flows.comparison import OptimizerComparison
from rmcore import (
    ActiveLearner,
    BradleyTerryRM,
    PreferencePair,
    RewardModelEnsemble,
    RLReadinessScorer,
    create_dataloader,
    train_reward_model,
)
from rmcore.active.acquisition import AcquisitionFunction, UncertaintySampling
from rmcore.core.errors import ConfigError, ModelError
from rmcore.data.table import write_pairs
from rmcore.tutorial import BaseRewardModel, RMTrainerConfig

pytestmark = pytest.mark.slow
QUICK = {"max_seq_len": 64, "lr": 1e-3, "eval_every": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def pairs():
    return [
        PreferencePair(prompt=f"What is {n} + {n}?", chosen=f"It is {2 * n}.", rejected="No idea.", margin=0.1 + n / 40)
        for n in range(24)
    ]


@pytest.fixture(scope="module")
def folder(pairs, tmp_path_factory):
    """Where preferences.parquet is, and what is trained."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_pairs(pairs, folder / "preferences.parquet")
    return folder


@pytest.fixture
def at_home(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def members(folder):
    """Two reward models that the tutorial's training gave."""
    data, found = folder / "preferences.parquet", []
    for seed, optimizer in ((0, "muon"), (1, "adamw")):
        checkpoint = train_reward_model(
            model_name="tiny-small",
            optimizer=optimizer,
            data_path=data,
            epochs=1,
            batch_size=8,
            output_dir=folder / str(seed),
            seed=seed,
            **QUICK,
        )
        assert checkpoint == folder / str(seed) / "best"
        found.append(BradleyTerryRM.from_pretrained(checkpoint, device="cpu"))
    return found


def test_a_model_of_a_name_is_trained_from_a_file_into_a_checkpoint(at_home, pairs):
    model = BradleyTerryRM(model_name="tiny")
    assert isinstance(model, BaseRewardModel)
    again = BradleyTerryRM("tiny", max_seq_len=64)
    assert model.score("What is 2 + 2?", "4") == again.score("What is 2 + 2?", "4")
    checkpoint = train_reward_model(
        model_name="tiny", optimizer="muon", data_path="preferences.parquet", epochs=5, batch_size=128
    )
    assert checkpoint == Path("checkpoints/best")
    trained = BradleyTerryRM.from_pretrained(checkpoint)
    assert trained.score("What is 2 + 2?", "4") != model.score("What is 2 + 2?", "4")
    with pytest.raises(ConfigError, match="other settings"):  # the folder is that of another training
        train_reward_model(model_name="tiny", data_path="preferences.parquet", epochs=5, batch_size=64)
    assert trained.score("1?", "1") == BradleyTerryRM.from_pretrained(checkpoint).score("1?", "1")
    assert RMTrainerConfig().epochs == 1


def test_a_loss_of_four_tensors_is_that_of_the_scores(members, pairs):
    model = members[0]
    chosen, rejected = model.tokenize("What is 2 + 2?", "It is 4."), model.tokenize("What is 2 + 2?", "5")
    reward = model.forward(chosen["input_ids"], chosen["attention_mask"])
    assert reward.detach().numpy() == pytest.approx(model.score("What is 2 + 2?", "It is 4."), abs=1e-5)
    loss = model.compute_loss(
        chosen["input_ids"], chosen["attention_mask"], rejected["input_ids"], rejected["attention_mask"]
    )
    margin = model.beta * model.score_pair("What is 2 + 2?", "It is 4.", "5")
    assert loss.item() == pytest.approx(np.logaddexp(0, -margin), abs=1e-5)
    loss.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.model.parameters())
    model.model.zero_grad()


def test_a_data_loader_of_a_file_has_whole_pairs_as_the_checkpoint_reads_them(members, at_home, pairs, capsys):
    model = members[0]
    loader = create_dataloader("preferences.parquet", model.tokenizer, batch_size=5)
    assert [len(batch.chosen_ids) for batch in loader] == [5, 5, 5, 5, 4]
    with torch.no_grad():
        losses = [float(model.compute_loss(*batch)) for batch in loader]
    rewards = model.score_pairs(pairs).astype(np.float64)
    by_pair = np.logaddexp(0, -model.beta * (rewards[:, 0] - rewards[:, 1]))
    assert losses == pytest.approx([by_pair[at : at + 5].mean() for at in range(0, 24, 5)], abs=1e-5)
    shuffled = create_dataloader(pairs, model.tokenizer, batch_size=24, shuffle=True, seed=1)[0]
    assert sorted(map(tuple, shuffled.chosen_ids.tolist())) != shuffled.chosen_ids.tolist()
    assert "cut" not in capsys.readouterr().err
    long = [PreferencePair("Why?", "because " * 100, "So.")]
    assert create_dataloader(long, model.tokenizer)[0].chosen_ids.shape == (1, 64)  # the limit of the checkpoint
    assert "1 of 2 sides are cut to 64 tokens" in capsys.readouterr().err
    assert create_dataloader(long, BradleyTerryRM("tiny").tokenizer)[0].chosen_ids.shape[1] > 64


def test_one_prompt_and_one_answer_are_one_row_everywhere(members):
    prompt, answer = "What is 2 + 2?", "It is 4."
    rm, ensemble = members[0], RewardModelEnsemble(members)
    for mixed in ((prompt, [answer]), ([prompt], answer)):
        with pytest.raises(ValueError, match="it is not clear which belong together"):
            rm.score(*mixed)
    assert rm.score_pair(prompt, answer, "5") == pytest.approx(-rm.score_pair(prompt, "5", answer))
    prediction = ensemble.predict(prompt, answer)
    assert prediction.mean_reward.shape == prediction.std_reward.shape == (1,)
    assert prediction.individual_rewards.shape == (2, 1)
    assert (prediction.std_reward > 0.5).tolist() == prediction.is_high_uncertainty.tolist()
    assert ensemble.uncertainty_threshold == 0.5
    assert ensemble.detect_ood(prompt, answer).shape == (1,)


def test_the_spectrum_of_a_data_loader(members, at_home):
    loader = create_dataloader("preferences.parquet", members[0].tokenizer)
    analyzer = pytest.importorskip("rmcore.landscape.analyzer").HessianAnalyzer
    assert analyzer is rmcore.HessianAnalyzer
    spectrum = analyzer(members[0]).compute_spectrum(loader, top_k=50)
    assert len(spectrum.eigenvalues) == 100  # 50 at each end
    assert spectrum.flatness_index == pytest.approx(1 / spectrum.lambda_max)
    assert spectrum.sharpness_score is None or np.isfinite(spectrum.sharpness_score)
    for method in ("power_iteration", "pyhessian"):
        found = analyzer(members[0]).compute_spectrum(loader[:1], method=method, top_k=2)
        assert len(found.eigenvalues) >= 2


def test_the_optimizers_of_the_tutorial_are_those_that_are_compared(at_home):
    optimizers = ["adam", "adamw", "sgd", "muon", "lion"]
    comparison = OptimizerComparison(
        model_name="tiny", data_path="preferences.parquet", optimizers=optimizers, num_seeds=3, epochs=5
    )
    arms = {arm.name: arm.config.train for arm in comparison.declared.arms()}
    assert {name: arm.optimizer for name, arm in arms.items()} == {name: name for name in optimizers}
    assert {arm.epochs for arm in arms.values()} == {5}
    with pytest.raises(ConfigError, match="run_experiment first"):
        comparison.generate_report()


def test_active_learning_asks_ten_rounds_by_default(members, pairs):
    ensemble = RewardModelEnsemble(members)
    pool = [{"prompt": p.prompt, "response_a": p.rejected, "response_b": p.chosen} for p in pairs]
    assert isinstance(UncertaintySampling(), AcquisitionFunction)
    assert UncertaintySampling().score(pool[:5], ensemble).shape == (5,)

    def label_fn(asked):
        return [PreferencePair(item["prompt"], item["response_b"], item["response_a"]) for item in asked]

    learner = ActiveLearner(ensemble, k=2)
    assert len(learner.select(pool, k=3)) == 3
    rounds = learner.run_active_loop(pool, label_fn)
    assert [one.num_labelled for one in rounds] == [2 * done for done in range(11)]
    assert all(label.chosen.startswith("It is") for label in learner.labelled)
    assert len(ActiveLearner(members[0]).select(pool, 2)) == 2


@pytest.mark.parametrize(
    ("measured", "reading"),
    [
        ((0.9, 0.02, 0.6, 60.0), "✓ Model is ready for RL training"),
        ((0.87, 0.05, 1.2, 150.0), "monitor"),
        ((0.55, 0.3, 2.6, 460.0), "not recommended"),
    ],
)
def test_the_original_score_prints_its_own_reading_and_that_no_verdict_follows(measured, reading):
    printed = str(RLReadinessScorer().compute_score(*measured))
    assert "Overall Score: " in printed
    assert reading in printed
    assert "No verdict follows" in printed
    assert ("try SAM" in printed) == (measured[3] > 200)


def test_an_untrained_name_is_no_checkpoint():
    with pytest.raises(ModelError, match="untrained"):
        BradleyTerryRM.from_pretrained("tiny")
