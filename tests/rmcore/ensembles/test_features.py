"""Features times the head's weights are the rewards, on every path that rewards are computed on."""

import numpy as np
import pytest
import torch
from torch import nn

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ModelError
from rmcore.ensembles.features import features, head_of
from rmcore.models.reward_model import BradleyTerryRM
from tests.support.random_models import model_of

CPU = torch.device("cpu")


def causal(folder, lora):
    settings = LoraSettings(rank=4) if lora else None
    return BradleyTerryRM.new(ModelConfig(name=str(folder), max_seq_len=128, lora=settings), seed=0, device=CPU)


@pytest.fixture(params=["causal", "causal lora", "bert", "roberta"])
def reward_model(request, tiny_folder):
    lora = "lora" in request.param
    rm = causal(tiny_folder, lora) if "causal" in request.param else model_of(request.param)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in rm.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for parameter in head_of(rm).parameters():
            parameter.add_(torch.randn_like(parameter))
    return rm


def sides_of(rm, pairs):
    """Sides of all lengths in mixed order, one of them twice."""
    sides = [side for pair in rm.renderer.tokenize_pairs(pairs) for side in (pair.chosen, pair.rejected)]
    order = np.random.default_rng(0).permutation(len(sides))
    return [sides[index] for index in order] + [sides[0]]


def linear(rm, found):
    head = head_of(rm)
    bias = 0.0 if head.bias is None else head.bias.item()
    return found @ head.weight.detach().numpy()[0] + bias


@pytest.mark.slow
def test_features_times_the_head_are_the_rewards(reward_model, gold_pairs):
    sides = sides_of(reward_model, gold_pairs[:12])
    found, rewards = features(reward_model, sides), reward_model.score_sides(sides)
    assert found.dtype == np.float32
    assert found.shape == (len(sides), head_of(reward_model).in_features)
    np.testing.assert_allclose(linear(reward_model, found), rewards, rtol=1e-4, atol=1e-5)
    assert np.ptp(rewards) > 1e-3


@pytest.mark.slow
def test_the_budget_and_the_path_do_not_change_features(reward_model, gold_pairs):
    sides, done = sides_of(reward_model, gold_pairs[:12]), []
    assert reward_model.packing() is not None
    once = features(reward_model, sides)
    parts = features(reward_model, sides, token_budget=150, report=lambda number, total, text: done.append(number))
    reward_model.allow_packing = False
    padded = features(reward_model, sides)
    scale = np.abs(once).max()
    np.testing.assert_allclose(parts, once, atol=1e-4 * scale)
    np.testing.assert_allclose(padded, once, atol=1e-4 * scale)
    assert done == sorted(done)
    assert done[-1] == len(sides)
    np.testing.assert_array_equal(once[-1], once[sides.index(sides[-1])])  # of equal sides
    assert features(reward_model, []).shape == (0, once.shape[1])
    reward_model.model.train()
    features(reward_model, sides[:2])
    assert reward_model.model.training
    assert not head_of(reward_model)._forward_pre_hooks


class Squashed(nn.Module):
    """A head that does more after its linear layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return torch.tanh(self.inner(states))


def test_a_head_that_is_not_linear_is_refused(rm, gold_pairs):
    with torch.no_grad():
        rm.model.score.weight += 1.0
    rm.model.score = Squashed(rm.model.score)
    with pytest.raises(ModelError, match="not linear in these features"):
        features(rm, sides_of(rm, gold_pairs[:2]))
    rm.model.score = nn.Identity()
    with pytest.raises(ModelError, match="no linear layer"):
        head_of(rm)
