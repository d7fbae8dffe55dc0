"""Steps that the host reads later, many at once, as on a GPU: here on a CPU, which must come to the same."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rmcore.config.train import TrainConfig
from rmcore.core.errors import TrainingError
from rmcore.training.optimizers import make_optimizer

STEPS = 5
FEED = {"num_steps": STEPS, "token_budget": 4096, "precision": "fp32"}
SKIPPING = ("adam", "adamw", "sgd")
ONE_BATCH = {"token_budget": 4096}  # one backward pass a step, so that a hook can count steps


@pytest.fixture
def deferred(monkeypatch):
    """Trainers leave on a CPU unread what they leave on a GPU."""
    monkeypatch.setattr("rmcore.training.loop.can_defer", lambda optimizer, device: optimizer.can_skip)


def spoil(parameter, step, value=math.nan):
    """Make the gradient of the step-th backward pass not finite."""
    seen = []

    def hook(gradient):
        seen.append(1)
        return gradient * value if len(seen) == step else gradient

    parameter.register_hook(hook)


def snapshot(stepper):
    context = stepper.context
    weights = {name: value.clone() for name, value in context.model.state_dict().items()}
    return weights, copy.deepcopy(context.optimizer.named_state())


@pytest.fixture(scope="module", params=["adamw", "sgd"])
def one_by_one(request, tiny_folder, gold_pairs, make_stepper):
    """Model and pairs, and for each step of a training that reads every one: result, weights, optimizer state."""
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:16])
    stepper = make_stepper(copy.deepcopy(rm), pairs, optimizer=request.param, **FEED)
    stepper.context = replace(stepper.context, failed=torch.zeros(()))  # clips within the update
    after = []
    for step in range(STEPS):
        stepper.run(step + 1, *stepper.feed[step])
        [(result, _)] = stepper.results()
        after.append((result, *snapshot(stepper)))
    return request.param, rm, pairs, after


@pytest.mark.slow
@given(
    bad=st.integers(1, STEPS), value=st.sampled_from([math.nan, math.inf]), read_after=st.sets(st.integers(1, STEPS))
)
@settings(max_examples=4)
def test_a_bad_step_leaves_everything_as_the_step_before_it_did(make_stepper, one_by_one, bad, value, read_after):
    optimizer, rm, pairs, after = one_by_one
    rm = copy.deepcopy(rm)
    stepper = make_stepper(rm, pairs, optimizer=optimizer, **FEED)
    stepper.context = replace(stepper.context, failed=torch.zeros(()))
    start = copy.deepcopy(rm.model.state_dict())
    spoil(rm.model.score.weight, bad, value)
    results = []
    with pytest.raises(TrainingError, match=rf"^step {bad}: .*gradient norm (nan|inf).*not applied"):  # noqa: PT012
        for step in range(1, STEPS + 1):
            stepper.run(step, *stepper.feed[step - 1])
            if step in read_after or step == STEPS:
                for result, _ in stepper.results():
                    results.append(result)
    assert results == [result for result, _, _ in after[: bad - 1]]
    weights, state = snapshot(stepper)
    if bad == 1:
        assert all(torch.equal(weights[name], value) for name, value in start.items())
        return
    _, expected, expected_state = after[bad - 2]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", SKIPPING)
@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clipping_within_the_update_comes_to_the_same(rm, gold_pairs, make_stepper, optimizer, clip):
    """Gradients are divided by what they were multiplied by the inverse of: one rounding more or less."""
    pairs, outcomes = rm.renderer.tokenize_pairs(gold_pairs[:16]), []
    for failed in (None, torch.zeros(())):
        stepper = make_stepper(copy.deepcopy(rm), pairs, optimizer=optimizer, **FEED)
        stepper.context = replace(stepper.context, failed=failed, clip=clip)
        stepper.run(1, *stepper.feed[0])
        [(result, _)] = stepper.results()
        outcomes.append((result.grad_norm, *snapshot(stepper)))
    (norm, _, plain), (same, _, folded) = outcomes
    assert same == norm
    for name, state in plain.items():
        for key, value in state.items():
            largest = float(value.abs().max())  # decay that is added may cancel nearly all of a gradient
            torch.testing.assert_close(folded[name][key], value, rtol=1e-6, atol=1e-6 * largest)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.score(torch.tanh(self.body(inputs)))


def whole_weights(model):
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion", "sam"])
def test_who_can_skip_an_update_does(one_rank, name, sharded):
    model = fully_shard(Scorer()) if sharded else Scorer()
    optimizer = make_optimizer(model, TrainConfig(optimizer=name, lr=0.1))
    assert optimizer.can_skip == (name in ("adam", "adamw") or (name == "sgd" and not sharded))
    if not optimizer.can_skip:
        return
    skip = torch.zeros(())
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step(skip=skip)
    weights, state = whole_weights(model), copy.deepcopy(optimizer.named_state())
    skip.fill_(1.0)
    for value in (1.0, math.nan):
        model(torch.randn(4, 5) * value).sum().backward()
        optimizer.step(skip=skip)
    assert all(torch.equal(now, then) for now, then in zip(whole_weights(model), weights, strict=True))
    torch.testing.assert_close(optimizer.named_state(), state, rtol=0, atol=0)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(now, then) for now, then in zip(whole_weights(model), weights, strict=True))


ASKED = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
INNER = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


class HostReads(TorchFunctionMode):
    """Counts reads of tensors by the host, those that Python asks for."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in ASKED
        return func(*args, **(kwargs or {}))


class InnerHostReads(TorchDispatchMode):
    """Counts reads of tensors by the host, those within torch's own functions."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in INNER
        return func(*args, **(kwargs or {}))


def reads_by_step(start, folder, **changes):
    with HostReads() as asked, InnerHostReads() as inner:
        totals = []
        start(folder, stop=lambda _: totals.append(asked.count + inner.count), **(ONE_BATCH | changes)).run()
    return {step: now - before for step, (before, now) in enumerate(itertools.pairwise(totals), 2)}


@pytest.mark.slow
def test_the_host_reads_nothing_between_logged_steps(tmp_path, start, deferred):
    reads = reads_by_step(start, tmp_path, steps=7, log_every=3, held_out=[])
    assert {step for step, count in reads.items() if count} == {3, 6, 7}


@pytest.mark.slow
def test_reading_later_changes_nothing(tmp_path, start, request):
    # Not clipped: within the update that may round differently (`test_clipping_within_the_update_comes_to_the_same`).
    changes = {"steps": 5, "log_every": 4, "eval_every": 3, "save_every": 2, "clip": 1e3}
    plain = start(tmp_path / "plain", **changes).run()
    request.getfixturevalue("deferred")
    later = start(tmp_path / "later", **changes).run()
    later.assert_same(plain)
    assert {"best/model.safetensors", "step_2/model.safetensors"} <= later.checkpoints().keys()


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "later"), [(2, {"eval_every": 3}), (3, {"save_every": 4}), (1, {})])
def test_a_training_ends_with_the_last_good_step(tmp_path, start, deferred, bad, later):
    changes = ONE_BATCH | {"steps": 5, "log_every": 5, "eval_every": 5}
    training = start(tmp_path / "spoiled", **(changes | later))
    spoil(training.rm.model.score.weight, bad)
    with pytest.raises(TrainingError, match=f"^step {bad}: "):
        training.run()
    at = training.trainer.progress
    assert at.step == len(at.window.results) == bad - 1
    assert at.totals.num_pairs == sum(result.num_pairs for result in at.window.results)
    assert training.trainer.progress.rows == {}
    saved = sorted(path.name for path in training.folder.glob("step_*"))
    assert saved == ([f"step_{bad - 1}"] if bad > 1 else [])
    for name in saved:
        weights = load_file(training.folder / name / "model.safetensors")
        assert all(torch.equal(weights[key], value) for key, value in training.rm.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "sam"])
def test_a_training_that_reads_every_step_keeps_its_best_checkpoint_and_the_last_good_step(tmp_path, start, optimizer):
    """As on a CPU, and of optimizers that cannot skip an update on a GPU."""
    training = start(tmp_path, **(ONE_BATCH | {"steps": 5, "eval_every": 2, "optimizer": optimizer}))
    passes = 2 if optimizer == "sam" else 1
    spoil(training.rm.model.score.weight, 3 * passes + 1)
    with pytest.raises(TrainingError, match=r"^step 4: "):
        training.run()
    assert training.trainer.progress.step == 3
    for name in ("best", "step_3"):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.isfinite(value).all() for value in saved.values())
    assert all(torch.equal(saved[key], value) for key, value in training.rm.model.state_dict().items())
