"""The curvature callback: right numbers, the same pairs each time, and a training that does not notice it."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape.sample import draw_positions
from rmcore.landscape.trajectory import CurvatureCallback, make_callbacks
from rmcore.models.batching import collate
from rmcore.training.callbacks import Evaluation, calibration

SMALL = CurvatureCallback(num_pairs=3, lanczos_steps=3, trace_probes=2, seed=5)


def draw_pairs(lengths, vocabulary=8, seed=0):
    rng = np.random.default_rng(seed)

    def side(length):
        return TokenizedSide(rng.integers(1, vocabulary, length).tolist(), 0)

    return [TokenizedPair(f"p{index}", side(a), side(b)) for index, (a, b) in enumerate(lengths)]


def evaluation(model, pairs, pad_id=0):
    """An evaluation of `model` as the trainer makes it."""
    batch = collate(pairs, range(len(pairs)), pad_id=pad_id).rows
    with torch.no_grad():
        logits = model.eval()(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
    rewards = torch.stack(logits.chunk(2), dim=1).double().numpy()
    return Evaluation(1, SimpleNamespace(model=model, pad_id=pad_id), pairs, rewards)


# The numbers.


@pytest.mark.slow
def test_both_ends_trace_and_margins_match_the_dense_hessian_of_the_sample(tiny, world):
    pairs = draw_pairs([(3, 5), (6, 2), (4, 4), (2, 6), (5, 5), (3, 3)])
    callback = CurvatureCallback(num_pairs=4, lanczos_steps=63, trace_probes=400, seed=1)
    sample = draw_positions(len(pairs), 4, 1)
    at = evaluation(tiny, pairs)
    found = callback(at)
    batch = collate([pairs[index] for index in sample], range(4), pad_id=0).rows
    _, dense = world.true_hessian(tiny, {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask})
    values = torch.linalg.eigvalsh(dense)
    assert found["hessian/lambda_max"] == pytest.approx(float(values[-1]), rel=1e-6)
    assert found["hessian/lambda_min"] == pytest.approx(float(values[0]), rel=1e-6)
    assert abs(found["hessian/trace"] - float(values.sum())) < 4 * found["hessian/trace_standard_error"]
    margins = at.rewards[sample, 0] - at.rewards[sample, 1]
    assert found["hessian/margin_scale"] == pytest.approx(float(np.sqrt((margins**2).mean())), rel=1e-6)


def test_the_same_weights_give_the_same_numbers_and_the_cut_into_micro_batches_none(tiny, monkeypatch):
    at = evaluation(tiny, draw_pairs([(3, 5), (6, 2), (4, 4), (2, 6)]))
    first = SMALL(at)
    assert SMALL(at) == first
    monkeypatch.setattr("rmcore.landscape.sample.CURVATURE_TOKEN_BUDGET", 12)
    assert SMALL(at) == pytest.approx(first, rel=1e-6, abs=1e-12)


# A training does not notice it.


def clone(tensor):
    return None if tensor is None else tensor.clone()


def snapshot(model):
    """Everything that a callback must leave alone."""
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {name: (p.grad, clone(p.grad)) for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
    }


def assert_same(before, after):
    for name, weight in before["weights"].items():
        assert torch.equal(weight, after["weights"][name]), name
    for name, (gradient, values) in before["gradients"].items():
        assert after["gradients"][name][0] is gradient, name
        assert gradient is None or torch.equal(values, gradient), name
    assert torch.equal(before["torch"], after["torch"])
    for name in ("requires_grad", "modes", "numpy", "python"):
        assert before[name] == after[name], name


def watched(at):
    """SMALL, with everything around it compared before and after."""
    before = snapshot(at.rm.model)
    found = SMALL(at)
    assert_same(before, snapshot(at.rm.model))
    return found


def plain(make_qwen):
    return make_qwen("sdpa")


def checkpointing(make_qwen):
    model = make_qwen("sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def lora(make_qwen):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "down_proj"], modules_to_save=["score"])
    return peft.get_peft_model(make_qwen("sdpa"), settings)


def train(make_qwen, build, callback, num_steps=4):
    """A small training with dropout; `callback` is called after every step, as at an evaluation."""
    torch.manual_seed(0)
    model = build(make_qwen)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    pairs = draw_pairs([(3, 5), (6, 2), (4, 4), (2, 6), (5, 5)])
    measured = []
    for _ in range(num_steps):
        model.train()
        batch = collate(pairs, range(len(pairs)), pad_id=0).rows
        chosen, rejected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0].chunk(2)
        optimizer.zero_grad()
        softplus(rejected - chosen).mean().backward()
        optimizer.step()
        at = evaluation(model, pairs)
        model.train()
        measured.append(callback(at))
    return model.state_dict(), measured


@pytest.mark.slow
@pytest.mark.parametrize("build", [checkpointing, lora])
def test_a_training_with_it_ends_in_the_same_bits_as_one_without(make_qwen, build):
    without, _ = train(make_qwen, build, lambda at: {})
    weights, measured = train(make_qwen, build, watched)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    assert len({found["hessian/lambda_max"] for found in measured}) == len(measured)  # it saw the weights change


def test_gradient_checkpointing_changes_no_number(make_qwen):
    found = []
    for build in (plain, checkpointing):
        model = build(make_qwen)
        model.train()
        found.append(SMALL(evaluation(model, draw_pairs([(3, 5), (6, 2), (4, 4)]))))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# By name.


def test_callbacks_by_name_in_order():
    assert make_callbacks((), seed=1) == []
    assert make_callbacks(("curvature", "calibration"), seed=7) == [CurvatureCallback(seed=7), calibration]
    with pytest.raises(ConfigError, match="hessian is unknown; choose among calibration, curvature"):
        make_callbacks(("calibration", "hessian"), seed=0)
