"""Acquisition functions against brute force, and what must not change a choice."""

import copy
import math

import numpy as np
import pytest
import torch

from rmcore.active.acquisition import (
    ACQUISITIONS,
    MarginEntropy,
    RandomSampling,
    UncertaintySampling,
    View,
    look,
    select,
)
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.gold.world import generate_pairs
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM


def make_view(num_members=3, num_pairs=40, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [f"p{index // 4}" for index in range(num_pairs)]
    return View(rng.normal(size=(num_members, num_pairs)), prompts)


def test_entropy_is_highest_where_the_mean_probability_is_one_half():
    margins = np.array([[0.0, 3.0, -3.0, 1.0], [0.0, -3.0, -3.0, 1.0]])
    scores = MarginEntropy().score_view(View(margins, list("abcd")))
    assert scores[:2] == pytest.approx([math.log(2)] * 2)
    assert scores[3] > scores[2]
    assert MarginEntropy().score_view(View(np.array([[800.0, -800.0]]), list("ab"))) == pytest.approx([0, 0])


@pytest.mark.parametrize("name", sorted(ACQUISITIONS))
def test_which_side_is_called_chosen_says_nothing(name):
    view = make_view()
    signs = np.where(np.random.default_rng(1).random(40) < 0.5, -1.0, 1.0)
    turned = View(view.margins * signs, view.prompt_ids)
    acquisition = ACQUISITIONS[name](0)
    assert acquisition.score_view(turned) == pytest.approx(acquisition.score_view(view))
    assert select(turned, 7, acquisition) == select(view, 7, acquisition)


@pytest.mark.parametrize("name", sorted(ACQUISITIONS))
def test_a_choice_is_of_the_highest_scores_highest_first(name):
    """k different pairs, and few of a prompt."""
    view, function = make_view(), ACQUISITIONS[name](3)
    scores = function.score_view(view)
    assert [scores[index] for index in select(view, 10, function)] == sorted(scores, reverse=True)[:10]
    assert sorted(select(view, 40, function)) == list(range(40))
    chosen = select(view, 10, function, max_per_prompt=1)
    assert len({view.prompt_ids[index] for index in chosen}) == 10
    assert [scores[index] for index in chosen] == sorted(scores[chosen], reverse=True)


def test_random_sampling_follows_its_seed():
    view = make_view()
    assert select(view, 9, RandomSampling(1)) == select(view, 9, RandomSampling(1))
    assert select(view, 9, RandomSampling(1)) != select(view, 9, RandomSampling(2))


def test_what_cannot_be_chosen_is_refused():
    view = make_view()
    with pytest.raises(ConfigError, match=r"41 pairs are requested.*has 40 to give"):
        select(view, 41, MarginEntropy())
    with pytest.raises(ConfigError, match=r"has 10 to give with at most 1 of a prompt"):
        select(view, 11, MarginEntropy(), max_per_prompt=1)
    with pytest.raises(ConfigError, match="there is one"):
        select(make_view(num_members=1), 2, UncertaintySampling())
    broken = View(np.full((2, 40), np.nan), view.prompt_ids)
    with pytest.raises(ModelError, match="not a number"):
        select(broken, 2, MarginEntropy())


@pytest.fixture(scope="module")
def pairs():
    return generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=2), seed=5).pairs[:24]


@pytest.fixture(scope="module")
def rm():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=torch.device("cpu"))


def members_of(rm, scale=1.0):
    """Three copies with heads of their own, which share the backbone."""
    members = [copy.deepcopy(rm) for _ in range(3)]
    for seed, one in enumerate(members):
        torch.nn.init.normal_(head_of(one).weight, std=1.0, generator=torch.Generator().manual_seed(seed))
        head_of(one).weight.data *= scale
    return RewardModelEnsemble(members)


@pytest.mark.slow
def test_a_view_has_the_models_own_margins(rm, pairs, monkeypatch):
    ensemble = members_of(rm)
    view = look(pairs, ensemble)
    prompts = [pair.prompt for pair in pairs]
    first = ensemble.individual_rewards(prompts, [pair.chosen for pair in pairs])
    second = ensemble.individual_rewards(prompts, [pair.rejected for pair in pairs])
    assert view.margins == pytest.approx(first - second, abs=1e-4)
    assert UncertaintySampling().score(pairs, ensemble) == pytest.approx(view.margins.var(axis=0))
    single = look(pairs, RewardModelEnsemble([rm]))
    scores = rm.score_pairs(pairs)
    assert single.margins[0] == pytest.approx(scores[:, 0] - scores[:, 1], abs=1e-4)
    monkeypatch.setattr(rm, "beta", 0.25)  # members see log-odds by their own beta
    assert (look(pairs, RewardModelEnsemble([rm])).margins == 0.25 * single.margins).all()


def test_an_empty_pool_and_broken_weights_are_refused(rm, pairs):
    with pytest.raises(DataError, match="pool is empty"):
        look([], RewardModelEnsemble([rm]))
    with pytest.raises(ModelError):
        look(pairs, members_of(rm, math.nan))
