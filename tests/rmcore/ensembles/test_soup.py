"""Averages of weights: exact where they are known, merged where there are adapters, refused where they mean nothing."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig

from rmcore.core.errors import ModelError
from rmcore.ensembles.features import head_of
from rmcore.ensembles.soup import Likeness, average_weights, choose_greedily
from rmcore.models.reward_model import BradleyTerryRM
from soup_sample import fitted, nudged, permuted

PROMPTS = ["What is 2 + 2?", "Name a fruit.", "Name a fruit."]
RESPONSES = ["4", "A pear.", "Five, as everybody knows."]


def average_of(*models):
    """Of copies, because the last one that is loaded takes the mean."""
    named = {str(number): model for number, model in enumerate(models)}
    return average_weights(list(named), lambda name: copy.deepcopy(named[name]))


def weights_of(rm):
    return rm.model.state_dict()


@pytest.mark.parametrize("times", [2, 3, 7])
def test_the_average_of_a_model_with_itself_is_that_model_bit_for_bit(rm, times):
    same = average_of(*[rm] * times)
    assert all(torch.equal(tensor, weights_of(rm)[name]) for name, tensor in weights_of(same).items())
    # A copy, too: weights that lie elsewhere in memory are summed in another order.
    np.testing.assert_array_equal(same.score(PROMPTS, RESPONSES), copy.deepcopy(rm).score(PROMPTS, RESPONSES))


def test_every_weight_is_the_mean_and_the_order_does_not_matter(rm):
    models = [nudged(rm, seed, size=0.1) for seed in range(3)]
    found = weights_of(average_of(*models))
    turned = weights_of(average_of(*reversed(models)))
    for name, tensor in found.items():
        truth = torch.stack([weights_of(model)[name].double() for model in models]).mean(0)
        assert torch.equal(tensor, truth.float())
        assert torch.equal(tensor, turned[name])


def test_of_heads_on_one_backbone_the_average_gives_the_mean_reward(rm):
    models = [copy.deepcopy(rm) for _ in range(4)]
    for seed, model in enumerate(models):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            head_of(model).weight.add_(torch.randn(head_of(model).weight.shape, generator=generator))
    alone = np.array([model.score(PROMPTS, RESPONSES) for model in models])
    assert np.ptp(alone, axis=0).min() > 0.1
    np.testing.assert_allclose(average_of(*models).score(PROMPTS, RESPONSES), alone.mean(axis=0), rtol=1e-5, atol=1e-5)


def test_the_same_function_in_another_order_of_hidden_units_averages_to_another_function(rm, gold_pairs):
    model = fitted(rm, gold_pairs[:60])
    twin = permuted(model)
    np.testing.assert_allclose(twin.score(PROMPTS, RESPONSES), model.score(PROMPTS, RESPONSES), rtol=1e-3, atol=1e-3)
    assert np.abs(average_of(model, twin).score(PROMPTS, RESPONSES) - model.score(PROMPTS, RESPONSES)).max() > 0.1


def test_adapters_are_averaged_as_the_weights_that_they_make(rm, tiny_folder, tmp_path):
    for number in range(2):
        adapted = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
        adapted.add_lora(LoraConfig(r=4), seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in adapted.model.named_parameters():
                if ".lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        adapted.save(tmp_path / str(number))

    def load(name):
        found = BradleyTerryRM.from_pretrained(name, device="cpu")
        found.merge_adapters()
        return found

    folders = [str(tmp_path / str(number)) for number in range(2)]
    whole = average_weights(folders, load)
    from_adapters = average_weights([f"{folder}/adapter" for folder in folders], load)
    assert not from_adapters.has_adapters
    assert all(parameter.requires_grad for parameter in from_adapters.model.parameters())
    base = weights_of(rm)
    for name, tensor in weights_of(whole).items():
        torch.testing.assert_close(weights_of(from_adapters)[name], tensor, rtol=1e-5, atol=1e-6)
    moved = next(name for name in base if "q_proj.weight" in name)
    # The mean of two updates of rank 4 has rank 8: that of factors would have 4.
    assert torch.linalg.matrix_rank(weights_of(from_adapters)[moved] - base[moved], rtol=1e-4) == 8


def test_what_members_do_not_share_is_named(rm):
    ours = Likeness.of(rm, "a", "tiny")
    ours.require(replace(ours, name="b"))
    ours.require(replace(ours, name="b", base=None))
    other = {
        "architecture": {**ours.architecture, "hidden_size": 7},
        "tokenizer": (ours.tokenizer[0], "{{ another template }}", ours.tokenizer[2]),
        "rendering": {**ours.rendering, "max_seq_len": 3},
        "beta": 0.5,
        "base": "another",
        "weights": {"score.weight": (1, 2)},
    }
    said = {
        "architecture": "hidden_size 7, not 64",
        "tokenizer": "chat template",
        "rendering": "max_seq_len 3, not 128",
        "beta": "0.5, not 1.0",
        "base": "another, not tiny",
        "weights": "None, not",
    }
    for what, value in other.items():
        with pytest.raises(ModelError, match=rf"^b has another {what} than a \(.*{said[what]}"):
            ours.require(replace(ours, name="b", **{what: value}))


def test_the_greedy_choice_never_gets_worse_and_leaves_out_what_would(rm, gold_pairs):
    pairs = gold_pairs[:60]
    good = fitted(rm, pairs)
    models = {"good": good, "near": nudged(good, 1), "same elsewhere": permuted(good), "untrained": rm}

    def accuracy(model):
        rewards = model.score_pairs(pairs)
        return float((rewards[:, 0] > rewards[:, 1]).mean())

    alone = {name: accuracy(model) for name, model in models.items()}
    assert alone["good"] > alone["untrained"]
    tried = choose_greedily(alone, lambda name: copy.deepcopy(models[name]), accuracy)
    kept = [one.name for one in tried if one.kept]
    assert tried[0].kept
    assert [alone[one.name] for one in tried] == sorted(alone.values(), reverse=True)
    assert all(one.kept == (one.with_it >= one.before) for one in tried[1:])
    reached = [one.with_it for one in tried if one.kept]
    assert reached == sorted(reached)
    assert "same elsewhere" not in kept or "good" not in kept
    made = average_of(*(models[name] for name in kept))
    assert accuracy(made) == reached[-1]
