"""AdamW over split weights: the two halves are the float32 weight, whatever was done to them."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from transformers import AutoModelForSequenceClassification

from rmcore.config.train import TrainConfig
from rmcore.models.layers import is_reward_head
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.weight_sync import travelling_state
from rmcore.training import split_adamw
from rmcore.training.loop import make_context
from rmcore.training.memory import StepCounter
from rmcore.training.split_adamw import (
    BLOCK,
    EPSILON,
    MEAN_CODES,
    SQUARE_CODES,
    STEP,
    SplitAdamW,
    _chance,
    decoded,
    encoded,
    join,
    split,
)

BETAS = (0.9, 0.999)
EIGHT = {"optimizer": "adamw8bit", "precision": "bf16"}


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_halves_join_to_the_number_whatever_its_bits(bits):
    wide = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    narrow, remainder = split(wide)
    assert torch.equal(join(narrow, remainder).view(torch.int32), wide.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("codes", "values"), [(SQUARE_CODES, 1.0), (MEAN_CODES, -1.0)])
def test_moments_are_right_on_average_and_never_far_off(codes, values):
    generator = torch.Generator().manual_seed(1)
    exact = values * torch.randn(3, BLOCK, generator=generator).mul(2.5).exp()  # e^10 between large and small
    exact[0, 5] = 0.0
    chances = (_chance(exact.numel(), torch.tensor(0), torch.tensor(step)).view_as(exact) for step in range(4000))
    kept = [decoded(*encoded(exact, chance, codes), codes) for chance in chances]
    each = torch.stack(kept).double() / exact.where(exact != 0, 1.0)
    each[:, 0, 5] = 1.0
    assert all(one[0, 5] == 0 for one in kept)
    assert (each - 1).abs().max() <= 2**STEP - 1 + 1e-4
    error = (each.mean(0) - 1).abs()
    assert (error <= 5 * each.std(0) / len(kept) ** 0.5 + 1e-5).all()


def random_gradients(shape, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).exp()
    return [(torch.randn(shape, generator=generator) * sizes + 0.3).bfloat16() for _ in range(steps)]


@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_after_updates_the_halves_are_still_the_float32_weights_to_the_bit(divisor):
    """The same updates, written out, of weights that were never split: gradients are divided within them, as fused
    AdamW divides them, and of one that is to be skipped nothing is left.
    """
    shape, lr, decay = (6, BLOCK), 1e-3, 0.1
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    parameter, never_split, done = torch.nn.Parameter(weights.clone()), weights.clone(), 0
    optimizer = SplitAdamW([{"params": [parameter], "weight_decay": decay}], lr, BETAS, compiled=False)
    optimizer.grad_scale = torch.tensor(divisor)
    state = optimizer.state[parameter]
    for step, gradient in enumerate(random_gradients(shape, 20), 1):
        before = {name: value.clone() for name, value in state.items()}
        is_skipped = step % 5 == 0
        optimizer.found_inf = torch.tensor(float(is_skipped))
        parameter.grad = gradient * torch.nan if is_skipped else gradient
        optimizer.step()
        if is_skipped:
            assert all(torch.equal(state[name], value) for name, value in before.items())
        else:
            done += 1
            divided = gradient.float() / divisor
            mean = torch.lerp(decoded(before["mean"], before["mean_scale"], MEAN_CODES), divided, 1 - BETAS[0])
            square = decoded(before["square"], before["square_scale"], SQUARE_CODES)
            square = torch.lerp(square, divided.square(), 1 - BETAS[1])
            count, rate = torch.tensor(float(done)), torch.tensor(lr)
            root = (square / (1 - BETAS[1] ** count)).sqrt() + EPSILON
            moved = rate * (mean / (1 - BETAS[0] ** count)) / root
            never_split = never_split * (1 - rate * torch.tensor(decay)) - moved
        assert torch.equal(optimizer.joined(parameter), never_split)
        assert torch.equal(parameter.detach(), split(never_split)[0])
    optimizer.widen()
    assert torch.equal(parameter.detach(), never_split)


def test_pieces_of_a_parameter_are_updated_as_the_whole(monkeypatch):
    outcomes = []
    for chunk in (split_adamw.CHUNK, 2 * BLOCK):
        monkeypatch.setattr(split_adamw, "CHUNK", chunk)
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5 * BLOCK + 3))
        optimizer = SplitAdamW([{"params": [parameter]}], 1e-2, BETAS, compiled=False)
        for gradient in random_gradients(parameter.shape, 5):
            parameter.grad = gradient
            optimizer.step()
        outcomes.append([parameter.detach(), *optimizer.state[parameter].values()])
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


SHAPES = ((3,), (BLOCK,), (BLOCK + 3,), (16, 16), (2, BLOCK), (4, BLOCK), (7, 1, BLOCK), (7 * BLOCK + 1,))


@pytest.mark.slow
def test_compiled_it_writes_the_same_bits_in_place_by_two_graphs(monkeypatch, fresh_compiler):
    """One for a single block, whose size is constant, and one for all numbers of blocks, shapes, places and steps."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return boxed_nop(graph, inputs)

    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)  # as inductor has it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(split_adamw, "CHUNK", 2 * BLOCK)
    outcomes = []
    for compiled in (False, True):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape)) for shape in SHAPES]
        optimizer = SplitAdamW([{"params": parameters, "weight_decay": 0.1}], 1e-2, BETAS, compiled=compiled)
        kept = [list(optimizer.state[parameter].values()) for parameter in parameters]
        for step in range(3):
            optimizer.found_inf = torch.tensor(float(step == 1))
            for parameter in parameters:
                parameter.grad = random_gradients(parameter.shape, 1, seed=step)[0]
            optimizer.step()
        outcomes += [[optimizer.joined(parameter) for parameter in parameters] + [v for state in kept for v in state]]
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)
    assert len(graphs) == 2
    assert [bytes_of_a_weight(graph) for graph in graphs] == [(8, 6, 0)] * 2


def bytes_of_a_weight(graph):
    """What a graph reads of its inputs, writes to them, and returns next to them, scales left out."""
    read = list(graph.find_nodes(op="placeholder"))
    written = [node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)]
    assert set(written) <= set(read)
    returned = [node for node in graph.output_node().args[0] if node is not None and node not in written]
    values = [[node.meta["val"] for node in nodes] for nodes in (read, written, returned)]
    blocks = [[one for one in group if isinstance(one, torch.Tensor) and one.dim() == 2] for group in values]
    return tuple(sum(one.element_size() for one in group) for group in blocks)


@pytest.mark.slow
def test_a_training_leaves_and_saves_whole_weights(tmp_path, start):
    training = start(tmp_path, **EIGHT).run()
    weights = training.rm.model.state_dict()
    saved = load_file(tmp_path / f"step_{training.result.num_steps}" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    assert any(not torch.equal(value.bfloat16().float(), value) for value in saved.values())
    assert training.rm.split is None
    folder = tmp_path / "best"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": {}}], ids=str)
def test_while_it_trains_float32_rewards_and_published_weights_are_those_of_the_whole_weights(
    model, tmp_path, start, gold_pairs
):
    """As a callback asks for them that publishes to a server."""
    seen = {}

    def look(evaluation):
        published = {name: value.clone() for name, value in travelling_state(evaluation.rm).items()}
        seen[evaluation.step] = evaluation.rm.score_pairs(gold_pairs[:4]), published
        return {}

    start(tmp_path, callbacks=[look], save_every=2, model=model, **EIGHT).run()
    assert seen
    for step, (rewards, published) in seen.items():
        saved = BradleyTerryRM.from_pretrained(tmp_path / f"step_{step}", device="cpu")
        np.testing.assert_allclose(rewards, saved.score_pairs(gold_pairs[:4]), rtol=0, atol=1e-5)
        assert all(torch.equal(value, published[name]) for name, value in saved.model.state_dict().items())


@pytest.mark.slow
def test_it_takes_eight_bytes_a_weight(start, tmp_path):
    training = start(tmp_path, **EIGHT)
    rm, config = training.rm, training.trainer.config
    rows = training.trainer.feed[0][1][0].rows
    found = StepCounter(rm.model, config, rm.device).step(rows, recomputed=1.0, accumulates=False)
    head = sum(one.numel() for name, one in rm.model.named_parameters() if is_reward_head(name))
    trained = rm.num_parameters - head
    gradients = 2 * trained + 4 * head
    scales = 8 * trained / BLOCK
    assert found.kept + gradients == pytest.approx(8 * trained + 16 * head + scales, rel=0.02)


@pytest.mark.parametrize("norm", [1e-3, 1e3])
def test_gradients_are_clipped_by_their_norm_in_float32(start, tmp_path, norm):
    from rmcore.training.step import _gradient_norm

    training = start(tmp_path, **EIGHT)
    context = make_context(training.rm, training.trainer.config, training.trainer.ranks)
    generator = torch.Generator().manual_seed(5)
    parameters = list(training.rm.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    scale = norm / torch.stack([one.grad.double().norm() for one in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_(scale)
    exact = torch.stack([one.grad.double().norm() for one in parameters]).norm()
    assert float(_gradient_norm(context, clips=True)) == pytest.approx(float(exact), rel=1e-5)
    after = torch.stack([one.grad.double().norm() for one in parameters]).norm()
    assert float(after) == pytest.approx(min(float(exact), context.clip), rel=1e-3)


def test_what_wants_whole_weights_is_refused():
    with pytest.raises(ValidationError, match="adamw8bit computes with the bfloat16 halves"):
        TrainConfig.model_validate(EIGHT | {"precision": "fp32"})
