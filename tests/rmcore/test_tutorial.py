"""The tutorial's calls from top to bottom on small models, by the names and defaults that its readers know."""

import json

import numpy as np
import pytest
import torch

from rmcore.active.acquisition import AcquisitionFunction, UncertaintySampling
from rmcore.active.curriculum import CurriculumSampler
from rmcore.active.learner import ActiveLearner
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.landscape import HessianAnalyzer
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.policy import Policy
from rmcore.policy.readiness.original_score import RLReadinessScorer
from rmcore.policy.sampling.best_of_n_sampler import BestOfNSampler
from rmcore.tutorial import BaseRewardModel, RMTrainerConfig, create_dataloader, train_reward_model
from small_policies import new_policy

pytestmark = pytest.mark.slow
QUICK = RMTrainerConfig(steps=4, eval_every=2, pairs_per_step=8, lr=1e-3, warmup_steps=1, token_budget=4096)


@pytest.fixture(scope="module")
def pairs():
    return [
        PreferencePair(prompt=f"What is {n} + {n}?", chosen=f"It is {2 * n}.", rejected="No idea.", margin=0.1 + n / 40)
        for n in range(24)
    ]


@pytest.fixture(scope="module")
def members(tiny_folder, pairs, tmp_path_factory):
    """Two reward models that the tutorial's training gave."""
    found = []
    for seed in (0, 1):
        model = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=64)
        folder = tmp_path_factory.mktemp(f"member{seed}")
        result = train_reward_model(model, pairs[:16], pairs[16:], config=QUICK, output_dir=folder, seed=seed)
        assert result.num_steps == QUICK.steps
        found.append(BradleyTerryRM.from_pretrained(folder / "best", device="cpu"))
    return found


def test_pairs_have_a_margin_and_a_record(pairs):
    record = json.loads(json.dumps(pairs[0].to_dict()))
    assert record["margin"] == pairs[0].margin == 0.1
    assert {"prompt", "chosen", "rejected", "metadata"} <= set(record)


def test_the_loss_of_a_data_loader_is_that_of_the_scores(members, pairs):
    rm = members[0]
    assert isinstance(rm, BaseRewardModel)
    loader = create_dataloader(pairs, rm, batch_size=5)
    with torch.no_grad():
        losses = [float(rm.compute_loss(rows)) for rows in loader]
    assert [len(rows.input_ids) for rows in loader] == [10, 10, 10, 10, 8]
    rewards = rm.score_pairs(pairs).astype(np.float64)
    by_pair = np.logaddexp(0, -rm.beta * (rewards[:, 0] - rewards[:, 1]))
    assert losses == pytest.approx([by_pair[at : at + 5].mean() for at in range(0, 24, 5)], abs=1e-5)
    rm.compute_loss(loader[0]).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in rm.model.parameters())
    rm.model.zero_grad()
    shuffled = create_dataloader(pairs, rm, batch_size=24, shuffle=True, seed=1)[0]
    assert sorted(map(tuple, shuffled.input_ids.tolist())) != shuffled.input_ids.tolist()


def test_rows_of_text_are_tokenized_and_scored(members):
    rm = members[0]
    rows = rm.tokenize(["What is 2 + 2?", "And 3?"], ["4", "It is 3."])
    with torch.no_grad():
        rewards = rm.forward(rows.input_ids, rows.attention_mask)
    assert rewards.numpy() == pytest.approx(rm.score(["What is 2 + 2?", "And 3?"], ["4", "It is 3."]), abs=1e-5)


def test_one_prompt_and_one_answer_are_one_row_everywhere(members):
    prompt, answer = "What is 2 + 2?", "It is 4."
    rm, ensemble = members[0], RewardModelEnsemble(members)
    for scorer in (rm, ensemble):
        [alone] = scorer.score(prompt, answer)
        assert alone == pytest.approx(scorer.score([prompt], [answer])[0])
        for mixed in ((prompt, [answer]), ([prompt], answer)):
            with pytest.raises(ValueError, match="it is not clear which belong together"):
                scorer.score(*mixed)
    assert rm.score_pair(prompt, answer, "5") == pytest.approx(-rm.score_pair(prompt, "5", answer))
    prediction = ensemble.predict(prompt, answer)
    assert prediction.mean_reward.shape == prediction.std_reward.shape == (1,)
    assert prediction.individual_rewards.shape == (2, 1)
    assert (prediction.std_reward > 0.5).tolist() == prediction.is_high_uncertainty.tolist()
    assert ensemble.uncertainty_threshold == 0.5
    assert ensemble.detect_ood(prompt, answer).shape == (1,)


@pytest.mark.parametrize("method", ["lanczos", "power_iteration", "pyhessian"])
def test_the_spectrum_of_a_data_loader(members, pairs, method):
    loader = create_dataloader(pairs[:6], members[0])
    spectrum = HessianAnalyzer(members[0]).compute_spectrum(loader, method=method, top_k=2)
    assert len(spectrum.eigenvalues) >= 2
    assert spectrum.flatness_index == pytest.approx(1 / spectrum.lambda_max)
    assert spectrum.sharpness_score is None or np.isfinite(spectrum.sharpness_score)


def test_best_of_n_of_one_prompt(members, tmp_path):
    sampler = BestOfNSampler(Policy.load(new_policy(tmp_path)), members[0], n_samples=4, max_new_tokens=8, device="cpu")
    [best] = sampler.sample("What is 2 + 2?")
    assert best.reward == max(best.rewards)
    assert len(best.responses) == 4


def test_active_learning_asks_ten_rounds_by_default(members, pairs):
    ensemble = RewardModelEnsemble(members)
    assert isinstance(UncertaintySampling(), AcquisitionFunction)
    assert UncertaintySampling().score(pairs[:5], ensemble).shape == (5,)
    learner = ActiveLearner(members[0], "entropy", pairs[:4], k=2)
    assert len(learner.select(pairs[4:], 3)) == 3
    rounds = learner.run_active_loop(pairs[4:], lambda asked: asked)
    assert [one.num_labelled for one in rounds] == [4 + 2 * done for done in range(11)]


def test_the_curriculum_by_margins(pairs):
    sampler = CurriculumSampler([pair.margin for pair in pairs])
    assert sorted(sampler.sample(24, epoch=0, total_epochs=3)) == list(range(24))


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
