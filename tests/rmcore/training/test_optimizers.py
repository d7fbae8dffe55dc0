import copy
import io
import itertools
import typing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.training.optimizers import (
    SAM_RADIUS,
    Float32Muon,
    effective_warmup,
    hidden_matrices,
    lr_factor,
    make_optimizer,
    orthogonalised,
    set_learning_rate,
)
from rmcore.training.ranks import ALONE
from rmcore.training.state import collect_state, load_state, write_alone, write_together

HALVES = "adamw8bit"  # its parameters are bfloat16: test_split_adamw.py
OPTIMIZERS = [name for name in typing.get_args(TrainConfig.model_fields["optimizer"].annotation) if name != HALVES]
SCHEDULES = typing.get_args(TrainConfig.model_fields["schedule"].annotation)


class SmallScorer(nn.Module):
    """Every kind of parameter: embedding, hidden matrices, a norm, biases, a reward head, one frozen."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(11, 6)
            self.up = nn.Linear(6, 10)
            self.norm = nn.LayerNorm(10)
            self.down = nn.Linear(10, 6, bias=False)
            self.score = nn.Linear(6, 1)
            self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, ids):
        hidden = self.embedding(ids).mean(1)
        hidden = hidden + self.down(torch.tanh(self.norm(self.up(hidden))))
        return self.score(hidden + self.frozen(hidden))


def small_loss(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (8, 5), generator=generator)
    return (model(ids)[:, 0] - ids.float().mean(1) / 3).square().mean()


def train(model, optimizer, config, steps, *, of=8, loss=small_loss):
    for step in steps:
        set_learning_rate(optimizer, config, step, of)
        optimizer.zero_grad()
        loss(model, step).backward()
        if optimizer.sharpness_aware:
            optimizer.ascend()
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.descend()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def configured(name, **settings):
    return TrainConfig(optimizer=name, **{"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 0, **settings})


def same_bits(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=6)
@given(stop=st.integers(0, 8))
def test_an_interrupted_training_goes_on_bit_for_bit(name, stop):
    config = configured(name)
    straight = SmallScorer()
    train(straight, make_optimizer(straight, config), config, range(8))

    before = SmallScorer()
    optimizer = make_optimizer(before, config)
    train(before, optimizer, config, range(stop))
    saved = through_a_file({"model": before.state_dict(), "optimizer": optimizer.named_state()})

    after = SmallScorer(seed=1)
    after.load_state_dict(saved["model"])
    optimizer = make_optimizer(after, config)
    optimizer.load_named_state(saved["optimizer"])
    train(after, optimizer, config, range(stop, 8))
    assert same_bits(straight, after)
    assert torch.equal(after.frozen.weight, SmallScorer().frozen.weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_trains_what_is_trainable_exactly_once(name):
    model = SmallScorer()
    held = [p for group in make_optimizer(model, configured(name)).param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["adamw", "adam", "sam", "muon"])
def test_the_memory_of_squared_gradients_is_as_long_as_asked_for(name):
    """The second step of Adam's written-out rule, on a parameter that does not decay."""
    config = configured(name, adam_beta2=0.6, schedule="constant", clip=1e9)
    model = SmallScorer()
    train(model, make_optimizer(model, config), config, range(2), loss=lambda model, step: model.score.bias * 3**step)
    first, second = torch.tensor(1.0), torch.tensor(3.0)
    mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
    square = (0.6 * 0.4 * first**2 + 0.4 * second**2) / (1 - 0.6**2)
    moved = config.lr * (1 + mean / square.sqrt())
    assert (SmallScorer().score.bias - model.score.bias).item() == pytest.approx(float(moved), rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_gradient_matrices_decay_and_vectors_stay(name):
    model, config = SmallScorer(), configured(name, schedule="constant", weight_decay=0.5)
    start = copy.deepcopy(model)
    train(model, make_optimizer(model, config), config, range(1), loss=lambda model, _: 0 * small_loss(model, 0))
    for (label, now), was in zip(model.named_parameters(), start.parameters(), strict=True):
        if now.ndim == 1 or not now.requires_grad:
            assert torch.equal(now, was), label
        elif name not in ("adam", "sgd"):  # those two add the decay to the gradient
            torch.testing.assert_close(now, was * (1 - config.lr * 0.5))
        else:
            assert now.norm() < was.norm(), label


def test_lion_moves_each_weight_by_the_sign_of_its_momentum():
    """Two steps of algorithm 2 written out, on one parameter that does not decay and one that does."""
    config = configured("lion", schedule="constant", weight_decay=0.5, clip=1e9)
    model = SmallScorer()
    start, gradients = copy.deepcopy(model), (3.0, -0.5)
    train(
        model, make_optimizer(model, config), config, range(2),
        loss=lambda model, step: gradients[step] * (model.score.bias.sum() + model.up.weight.sum()),
    )  # fmt: skip
    signs = (1.0, float(np.sign(0.9 * 0.01 * gradients[0] + 0.1 * gradients[1])))
    bias, weight = start.score.bias, start.up.weight
    for sign in signs:
        bias, weight = bias - config.lr * sign, weight * (1 - config.lr * 0.5) - config.lr * sign
    torch.testing.assert_close(model.score.bias, bias)
    torch.testing.assert_close(model.up.weight, weight)
    assert signs == (1.0, -1.0)  # the newest gradient outweighs the memory of the first


def names_of(model, parameters):
    wanted = set(parameters)
    return {name for name, parameter in model.named_parameters() if parameter in wanted}


def test_muon_takes_the_projections_of_a_causal_model_and_nothing_else(rm):
    projections = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    expected = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in projections}
    groups = make_optimizer(rm.model, configured("muon")).param_groups
    assert names_of(rm.model, groups[0]["params"]) == expected
    rest = names_of(rm.model, [p for group in groups[1:] for p in group["params"]])
    assert {"model.embed_tokens.weight", "score.weight", "model.norm.weight"} <= rest


def test_a_weight_tied_to_an_embedding_is_an_embedding_and_counts_once():
    model = nn.ModuleDict({"output": nn.Linear(4, 10, bias=False), "inner": nn.Linear(4, 4)})
    model["embedding"] = nn.Embedding(10, 4)
    model["embedding"].weight = model["output"].weight
    assert names_of(model, hidden_matrices(model)) == {"inner.weight"}
    assert sum(len(group["params"]) for group in make_optimizer(model, configured("muon")).param_groups) == 3


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (16, 16)])
def test_muon_on_a_cpu_is_torchs_but_for_the_rounding_of_bfloat16(shape):
    """And its state is torch's: one continues from where the other was."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(4)]

    def trained(first, second):
        weight = nn.Parameter(start.clone())
        settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        before, after = first([weight], **settings), second([weight], **settings)
        for index, gradient in enumerate(gradients):
            if index == 2:
                after.load_state_dict(before.state_dict())
            weight.grad = gradient.clone()
            (before if index < 2 else after).step()
        return weight.detach() - start

    moved = trained(Float32Muon, Float32Muon)
    for kinds in itertools.product((torch.optim.Muon, Float32Muon), repeat=2):
        assert (trained(*kinds) - moved).norm() / moved.norm() < 0.02, kinds  # bfloat16 has 8 bits


@pytest.mark.slow
@given(st.integers(1, 3), st.integers(2, 12), st.integers(2, 12), st.integers(0, 9))
def test_orthogonalising_keeps_singular_vectors_and_brings_the_values_near_one(num, rows, columns, seed):
    """Against float64 by the same polynomial of the singular values; small ones are drawn up, not all the way."""
    torch.manual_seed(seed)
    matrices = torch.randn(num, rows, columns)
    found = orthogonalised(matrices).double()
    u, values, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / matrices.double().norm(dim=(1, 2))[:, None]
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(found, (u * values[:, None, :]) @ vh, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@given(st.integers(0, 5))
def test_sam_ascends_by_its_radius_along_the_gradient_and_comes_back_exactly(seed):
    model = SmallScorer(seed).double()
    start = copy.deepcopy(model)
    optimizer = make_optimizer(model, configured("sam"))
    small_loss(model, seed).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    optimizer.ascend()
    both = zip(model.parameters(), start.parameters(), strict=True)
    moved = torch.cat([(now - was).flatten() for now, was in both if now.requires_grad])
    torch.testing.assert_close(moved, SAM_RADIUS * gradient / gradient.norm())
    optimizer.descend()
    assert same_bits(model, start)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_a_sharded_training_goes_on_from_its_state_and_from_that_of_one_that_is_not(one_rank, name, tmp_path):
    config = configured(name)
    plain, sharded = SmallScorer(), fully_shard(SmallScorer())
    optimizer, sharded_optimizer = make_optimizer(plain, config), make_optimizer(sharded, config)
    train(plain, optimizer, config, range(3))
    train(sharded, sharded_optimizer, config, range(3))
    (tmp_path / "plain").mkdir()
    dict(write_alone(collect_state(plain, optimizer, [], np.zeros((0, 2))), tmp_path / "plain"))
    write_together(collect_state(sharded, sharded_optimizer, [], np.zeros((0, 2))), tmp_path / "sharded", ALONE)
    again = make_optimizer(sharded, config)
    for folder in ("plain", "sharded"):
        load_state(tmp_path / folder, sharded, again)
        for values, others in zip(again.named_state().values(), optimizer.named_state().values(), strict=True):
            for key, value in others.items():
                ours = values[key]
                torch.testing.assert_close(ours.full_tensor() if isinstance(ours, DTensor) else ours, value)
    train(plain, optimizer, config, range(3, 6))
    train(sharded, again, config, range(3, 6))
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_muon_refuses_a_sharded_model(one_rank):
    with pytest.raises(ConfigError, match="Use adamw, or train in one"):
        make_optimizer(fully_shard(SmallScorer()), configured("muon"))


RUNS = st.tuples(st.integers(1, 300), st.integers(0, 80)).map(lambda run: (run[0], effective_warmup(run[1], run[0])))


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(RUNS)
def test_schedules_rise_to_the_peak_and_then_fall_without_jumps_to_their_end(schedule, run):
    num_steps, warmup = run
    shape = {"num_steps": num_steps, "warmup_steps": warmup, "schedule": schedule}
    factors = [lr_factor(step, **shape) for step in range(num_steps + 1)]
    end = {"constant": 1.0, "cosine_with_min": 0.1}.get(schedule, 0.0)
    assert factors[-1] == pytest.approx(end, abs=1e-12)
    assert all(0 < factor <= 1 for factor in factors[:-1])
    assert factors[max(0, warmup - 1)] == 1.0
    for step, (now, after) in enumerate(itertools.pairwise(factors)):
        if step + 1 < warmup:
            assert after - now == pytest.approx(1 / warmup)
        else:
            assert -2 / (num_steps - warmup) < after - now <= 0


def test_the_learning_rate_reaches_every_group_and_depends_on_the_step_alone():
    config = configured("muon", schedule="cosine_with_min", warmup_steps=3)
    optimizer = make_optimizer(SmallScorer(), config)
    rates = [set_learning_rate(optimizer, config, step, 100) for step in (0, 50, 0, 99)]
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}
    assert rates[0] == rates[2] == pytest.approx(config.lr / 3)
    assert 0.1 * config.lr < rates[3] < 0.101 * config.lr
