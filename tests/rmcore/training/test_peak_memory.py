"""The memory that training needs: measured on the way, without a trace in what is trained."""

import copy

import pytest
import torch

from rmcore.config.train import TrainConfig
from rmcore.models.layers import recompute_layers
from rmcore.training.feed import make_feed
from rmcore.training.losses import make_bradley_terry
from rmcore.training.optimizers import make_optimizer
from rmcore.training.profiling import PeakMeter
from rmcore.training.ranks import ALONE
from rmcore.training.record import Progress, Selection
from rmcore.training.step import StepContext, Stepper, make_forward

CPU = torch.device("cpu")


def peak(training):
    return training.run().result.peak_training_bytes


def trained_bytes(rm):
    return sum(parameter.nbytes for parameter in rm.model.parameters() if parameter.requires_grad)


def test_a_single_step_is_measured_with_the_state_that_it_makes(tmp_path, start):
    training = start(tmp_path, steps=1)
    assert peak(training) > 3 * trained_bytes(training.rm)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4])
def test_it_survives_an_interruption(tmp_path, start, stopped, undisturbed, at):
    stopped(tmp_path / "stopped", at)
    resumed = start(tmp_path / "stopped")
    assert (resumed.trainer.progress.peak_training_bytes is None) == (at == 1)
    assert peak(resumed) == undisturbed.result.peak_training_bytes


def make_stepper(rm, pairs, config):
    feed = make_feed(
        pairs, config, num_steps=3, seed=0, token_budget=256, pad_id=rm.pad_id, ranks=ALONE,
        packing=rm.packing(config.precision) if config.packing else None,
    )  # fmt: skip
    if config.gradient_checkpointing:
        recompute_layers(rm.model)
    forward = make_forward(rm.model, make_bradley_terry(config), config.precision, CPU)
    return Stepper(StepContext(rm.model, forward, make_optimizer(rm.model, config), config.clip, CPU), feed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": False},
        {"precision": "bf16"},
        {"gradient_checkpointing": True, "optimizer": "sgd"},
        {"dropout": True, "optimizer": "muon"},
        {"optimizer": "sam"},
    ],
    ids=str,
)
def test_measured_and_unmeasured_trainings_are_the_same_to_the_last_bit(rm, gold_pairs, changes):
    config = TrainConfig.model_validate({"lr": 1e-3, "pairs_per_step": 4} | changes)
    if config.dropout:
        for layer in rm.model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:12])
    outcomes = []
    for measured in (True, False):
        model = copy.deepcopy(rm)  # both: how a sum rounds depends on where its memory lies, and rm's is a mapped file
        torch.manual_seed(0)
        stepper = make_stepper(model, pairs, config)
        progress = Progress(256, Selection.of(config))
        meter = PeakMeter(stepper.context, progress, num_steps=3)
        for step in range(3):
            if measured:
                with meter.around(step + 1):
                    stepper.run(step + 1, *stepper.feed[step])
            else:
                stepper.run(step + 1, *stepper.feed[step])
        assert (progress.peak_training_bytes is not None) == measured
        weights, state = model.model.state_dict(), stepper.context.optimizer.named_state()
        outcomes.append(([result for result, _ in stepper.results()], weights, state, torch.get_rng_state()))
    (results, weights, state, random), (others, other_weights, other_state, other_random) = outcomes
    assert results == others
    assert all(torch.equal(weights[name], value) for name, value in other_weights.items())
    torch.testing.assert_close(state, other_state, rtol=0, atol=0)
    assert torch.equal(random, other_random)
