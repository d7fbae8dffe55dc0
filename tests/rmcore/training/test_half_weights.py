"""bfloat16 copies compute; the weights, their gradients and all that updates them stay float32, in the same names."""

import copy

import pytest
import torch
import transformers as hf

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ModelError
from rmcore.models.batching import micro_batches
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import make_context
from rmcore.training.ranks import ALONE
from rmcore.training.step import accumulate_gradient, read_steps, train_step
from rmcore.training.train_mode import HALF_BY_DEFAULT, HalfWeights, find_half_weights, training_form

CPU = torch.device("cpu")
CONFIG = TrainConfig(precision="bf16", warmup_steps=0, token_budget=600)


def model_of(name, lora=None):
    return BradleyTerryRM.new(ModelConfig(name=name, max_seq_len=96, lora=lora), seed=0, device=CPU)


def gradients(rm, pairs, *, half, config=CONFIG, token_budget=600):
    """The gradient of the mean loss by parameter name, from micro-batches of `token_budget`."""
    batches = micro_batches(
        rm.renderer.tokenize_pairs(pairs), token_budget=token_budget, pad_id=rm.pad_id, packing=rm.packing("bf16")
    )
    with training_form(rm, config), pytest.MonkeyPatch.context() as patched:
        patched.setitem(HALF_BY_DEFAULT, "cpu", half)
        context = make_context(rm, config, ALONE)
        assert (context.half is not None) == (half and config.precision == "bf16")
        rm.model.zero_grad()
        accumulate_gradient(context, batches, num_terms=len(pairs))
    return {name: p.grad.clone() for name, p in rm.model.named_parameters() if p.grad is not None}


def error(found, truth):
    one, other = (torch.cat([value.double().flatten() for value in named.values()]) for named in (found, truth))
    return float((one - other).norm() / other.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"),
    [("tiny", None), ("tiny", LoraSettings(rank=4)), pytest.param("minilm", None, marks=pytest.mark.night)],
)
def test_gradients_are_float32_and_about_as_near_to_the_truth_as_by_autocast(name, lora, gold_pairs):
    rm, pairs = model_of(name, lora), gold_pairs[:8]
    truth = gradients(rm, pairs, half=False, config=CONFIG.model_copy(update={"precision": "fp32"}))
    autocast, half = gradients(rm, pairs, half=False), gradients(rm, pairs, half=True)
    assert half.keys() == autocast.keys() == truth.keys()
    assert {gradient.dtype for gradient in half.values()} == {torch.float32}
    assert error(half, truth) < 3 * error(autocast, truth)


def test_each_micro_batch_is_added_in_float32_and_its_own_gradient_freed(gold_pairs):
    rm = model_of("tiny")
    half = HalfWeights(rm.model)
    weight = rm.model.model.layers[0].mlp.up_proj.weight
    parts = []
    for size in (1.0, 2.0**-12):  # in bfloat16 the second would be lost in the first
        with half.active():
            module = rm.model.model.layers[0].mlp.up_proj
            assert module.weight.dtype == torch.bfloat16
            (module.weight * size).sum().backward()
            assert module.weight.grad is None
        parts.append(weight.grad.clone())
    assert torch.equal(parts[0], torch.ones_like(weight))
    assert torch.equal(parts[1], torch.full_like(weight, 1 + 2.0**-12))


def test_names_parameters_and_optimizer_are_those_of_the_float32_model(gold_pairs, monkeypatch):
    rm = model_of("tiny")
    before = dict(rm.model.named_parameters())
    monkeypatch.setitem(HALF_BY_DEFAULT, "cpu", True)
    context = make_context(rm, CONFIG, ALONE)
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:4])
    batches = micro_batches(pairs, token_budget=600, pad_id=rm.pad_id)
    old = copy.deepcopy(rm.model.state_dict())
    with training_form(rm, CONFIG):
        seen = train_step(context, batches, step=1, pair_ids=[pair.pair_id for pair in pairs])
        next(read_steps([seen]))
    after = dict(rm.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    state = rm.model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert (state[name] != old[name]).float().mean() > 0.9  # by 5e-6 each, of which bfloat16 would keep nothing
    assert (state[name].bfloat16() != old[name].bfloat16()).float().mean() < 0.1


def test_what_a_frequent_token_adds_up_to_is_not_lost(gold_pairs):
    """Its gradient is a sum over hundreds of places, of which bfloat16 forgets what comes late."""
    rm = model_of("tiny")
    embedding = rm.model.get_input_embeddings()
    with HalfWeights(rm.model).active():
        output = embedding(torch.full((1, 1000), 5))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
    assert torch.equal(embedding.weight.grad[5], torch.full_like(embedding.weight.grad[5], 1000.0))


def test_layers_that_reach_for_another_modules_weights_are_refused():
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    config = hf.DebertaV2Config(vocab_size=32, num_labels=1, **shape, **relative)
    model = hf.DebertaV2ForSequenceClassification(config)
    with pytest.raises(ModelError, match="does not compute with bfloat16 weights"):
        find_half_weights(model, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sam"])
def test_a_training_loses_about_what_it_loses_by_autocast_and_resumes_to_the_bit(
    optimizer, tmp_path, start, stopped, monkeypatch
):
    changes = {"precision": "bf16", "optimizer": optimizer}
    autocast = start(tmp_path / "autocast", **changes).run()
    monkeypatch.setattr("rmcore.training.train_mode.HALF_BY_DEFAULT", {"cpu": True})
    whole = start(tmp_path / "whole", **changes).run()
    assert whole.losses() != autocast.losses()
    assert whole.losses() == pytest.approx(autocast.losses(), abs=0.02)
    stopped(tmp_path / "parts", 3, **changes)
    resumed = start(tmp_path / "parts", **changes).run()
    assert resumed.rows() == whole.rows()
