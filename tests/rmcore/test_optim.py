import itertools

import pytest
import torch
from torch import nn

from rmcore.config import TrainConfig
from rmcore.optim import decay_groups, effective_warmup, lr_factor, make_optimizer, make_schedule


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    matrices, vectors = decay_groups(model, 0.1)
    assert [parameter.ndim for parameter in matrices["params"]] == [2]
    assert {parameter.ndim for parameter in vectors["params"]} == {1}
    assert vectors["weight_decay"] == 0.0
    assert sum(len(group["params"]) for group in (matrices, vectors)) == len(list(model.parameters()))


def test_warm_up_is_at_most_a_tenth_of_a_short_run():
    assert effective_warmup(50, 1000) == 50
    assert effective_warmup(50, 100) == 10
    assert effective_warmup(50, 5) == 0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_rise_to_the_peak_and_then_never_rise(schedule):
    factors = [lr_factor(step, num_steps=40, warmup_steps=8, schedule=schedule) for step in range(40)]
    assert factors[7] == 1.0
    assert all(earlier < later for earlier, later in itertools.pairwise(factors[:8]))
    assert all(earlier >= later for earlier, later in itertools.pairwise(factors[8:]))
    assert all(0 < factor <= 1 for factor in factors)
    assert (factors[-1] == 1.0) == (schedule == "constant")


def test_the_cosine_is_at_half_height_half_way():
    assert lr_factor(60, num_steps=100, warmup_steps=20, schedule="cosine") == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_each_optimizer_lowers_a_convex_loss(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = TrainConfig(optimizer=name, lr=0.05, schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config, num_steps=100)
    inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
