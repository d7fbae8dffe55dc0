"""The memory of a step, counted before it is run, against what the step then takes."""

import json
import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.progress import progress_bar
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.models.packing.attention import ATTENTION
from rmcore.models.packing.layout import Packing
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into
from rmcore.training.memory import (
    COUNTED_TOKENS,
    ENOUGH_TOKENS,
    MAX_TOKEN_BUDGET,
    USABLE_SHARE,
    StepCounter,
    choose_memory,
    longest_pairs,
)
from rmcore.training.plan import _computed_tokens, plan

CPU = torch.device("cpu")


def counted(training, step):
    """Bytes beside the weights in a step of the training, of which no step has run."""
    trainer = training.trainer
    _, batches = trainer.feed[step]
    largest = max(batches, key=lambda batch: batch.rows.num_tokens)
    found = StepCounter(training.rm.model, trainer.config, CPU).step(
        largest.rows, recomputed=float(bool(trainer.config.gradient_checkpointing)), accumulates=len(batches) > 1
    )
    return found.peak - found.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"gradient_checkpointing": True, "precision": "bf16"},
        {"packing": False, "token_budget": 4096},
        {"model": {"lora": {}}},
        {"model": {"head_only": True}},
        {"optimizer": "sam"},
    ],
    ids=str,
)
def test_what_is_counted_is_what_is_measured(tmp_path, start, changes):
    training = start(tmp_path, held_out=[], **{"steps": 2, "save_every": None} | changes)
    before = torch.get_rng_state()
    expected = counted(training, step=1)  # the step that is measured
    assert torch.equal(torch.get_rng_state(), before)
    measured = training.run().result.peak_training_bytes
    assert expected == pytest.approx(measured, rel=0.15)


@pytest.fixture
def rm():
    """Four layers: the last keeps little, so that of two it is the first alone that could be recomputed."""
    return BradleyTerryRM.new(ModelConfig(name="tiny-deep", max_seq_len=128), seed=0, device=CPU)


@pytest.fixture(scope="module")
def counted_before():
    """What was counted of `rm`, by share of recomputed layers and processes: it takes seconds, and is the same."""
    return {}


@pytest.fixture
def counts(rm, counted_before, monkeypatch):
    """Steps of 48 tokens a side, activations kept and recomputed; what is counted from here on is counted once."""

    class Once(StepCounter):
        def memory(self, packing, *, max_seq_len, recomputed):
            key = recomputed, self._world
            if key not in counted_before:
                counted_before[key] = super().memory(packing, max_seq_len=max_seq_len, recomputed=recomputed)
            return counted_before[key]

    monkeypatch.setattr("rmcore.training.memory.StepCounter", Once)
    counter = Once(rm.model, TrainConfig(precision="fp32"), CPU)
    return [counter.memory(rm.packing("fp32"), max_seq_len=48, recomputed=share) for share in (0.0, 1.0)]


def chosen(rm, total, world=1, **changes):
    config = TrainConfig.model_validate({"precision": "fp32"} | changes)
    return choose_memory(rm.model, config, rm.packing("fp32"), max_seq_len=48, device=CPU, total=total, world=world)


@pytest.mark.slow
def test_activations_are_recomputed_where_keeping_them_leaves_too_few_tokens(rm, counts):
    kept, recomputed = counts
    assert recomputed.per_token < kept.per_token
    share = USABLE_SHARE["cpu"]
    needed = kept.larger.kept + (kept.larger.micro_batch + kept.per_token * ENOUGH_TOKENS) / share
    ample, scarce = int(2 * needed), int(kept.larger.kept + (needed - kept.larger.kept) / 8)
    between = int(kept.larger.kept + (kept.bytes_at(ENOUGH_TOKENS) + recomputed.bytes_at(ENOUGH_TOKENS)) / 2 / share)
    assert chosen(rm, ample) == (min(8192, kept.tokens(ample, share)), 0.0)
    budget, recomputed_share = chosen(rm, scarce)
    assert recomputed_share == 1.0
    assert kept.tokens(scarce, share) < budget == recomputed.tokens(scarce, share)
    budget, recomputed_share = chosen(rm, between)
    assert 0 < recomputed_share < 1
    assert ENOUGH_TOKENS <= budget < recomputed.tokens(between, share)
    assert chosen(rm, scarce, gradient_checkpointing=False)[1] == 0.0
    assert chosen(rm, ample, gradient_checkpointing=True)[1] == 1.0


@pytest.mark.slow
def test_layers_that_keep_their_activations_change_no_number(tmp_path, start):
    outcomes, model = [], {"name": "tiny-deep"}  # of four layers, the last of which keeps little
    for share in (0.0, 0.5, 1.0):
        training = start(tmp_path / str(share), held_out=[], steps=2, gradient_checkpointing=share > 0, model=model)
        training.rm.recomputed_share = share
        training.run()
        outcomes.append((training.losses(), training.result.peak_training_bytes))
    (kept, most), (half, some), (every, least) = outcomes
    assert kept == half == every
    assert least < some < most


SHAPES = {"0.5 B": (151936, 896, 4864, 14, 2), "8 B": (16384, 4096, 14336, 32, 8)}
"""Vocabulary, width, width inside the MLP, heads and key heads, of Qwen2.5 and of Llama's width."""


@pytest.fixture
def counts_as_on_a_gpu(monkeypatch):
    """Make the memory, by micro-batch, of a model of a number of layers with the kernel and the sizes of a GPU."""
    monkeypatch.setattr("rmcore.training.train_mode.HALF_BY_DEFAULT", {"cpu": True})
    monkeypatch.setitem(COUNTED_TOKENS, "cpu", COUNTED_TOKENS["cuda"])
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    packing = Packing(causal=True, kernel="varlen", grouped=True)

    def count(size, num_layers, *, recomputed=0.0, **changes):
        shape = dict(zip(names, SHAPES[size], strict=True))
        config = Qwen2Config(**shape, num_hidden_layers=num_layers, pad_token_id=0, num_labels=1)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, attn_implementation=ATTENTION)
        counter = StepCounter(model, TrainConfig(precision="bf16", **changes), CPU)
        predicted = counter.memory(packing, max_seq_len=512, recomputed=recomputed)

        def counted(tokens):
            rows = longest_pairs(tokens // 1024, 512, packing)
            return counter.step(rows, recomputed=recomputed, accumulates=True).micro_batch

        return predicted, counted

    return count


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize(
    ("recomputed", "changes"),
    [
        pytest.param(0.0, {}, id="eager"),
        pytest.param(
            1.0, {"compile": True, "optimizer": "adamw8bit"}, id="compiled and recomputed", marks=pytest.mark.night
        ),
    ],
)
def test_what_a_large_micro_batch_takes_is_predicted_to_a_twentieth(size, recomputed, changes, counts_as_on_a_gpu):
    """From the two counted ones to all that may be chosen."""
    predicted, counted = counts_as_on_a_gpu(size, 4, recomputed=recomputed, **changes)
    for tokens in (16384, MAX_TOKEN_BUDGET["cuda"]):
        assert predicted.bytes_at(tokens) == pytest.approx(counted(tokens), rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_or_recomputed_layer_keeps_less_for_the_backward_pass(counts_as_on_a_gpu, capsys):
    """By what two layers more take, which leaves out what is alive within one layer only."""

    def of_a_layer(**how):
        fewer, more = (counts_as_on_a_gpu("0.5 B", layers, **how)[0].per_token for layers in (2, 4))
        return (more - fewer) / 2

    eager = of_a_layer()
    assert of_a_layer(compile=True) < 0.8 * eager
    assert of_a_layer(recomputed=1.0) < 0.8 * eager
    assert "cannot be counted" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_device_without_room_for_a_pair_is_refused_but_among_processes_that_share_the_model(rm, counts, capsys):
    with pytest.raises(ConfigError, match=r"one pair of 2 x 48 tokens needs 96; lower max_seq_len"):
        chosen(rm, 3 * rm.num_parameters * 4)
    assert chosen(rm, rm.num_parameters * 4, world=64) == (96, 1.0)
    assert "micro-batches of 96 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("look", [lambda states: states.detach().numpy(), lambda states: float(states.detach().sum())])
def test_a_model_whose_step_cannot_be_counted_gets_the_smallest_micro_batches(look, monkeypatch, capsys):
    rm = BradleyTerryRM.new(ModelConfig(max_seq_len=96), seed=0, device=CPU)
    kind = type(rm.model.model.layers[0].mlp)
    forward = kind.forward

    def looking(self, states):
        look(states)
        return forward(self, states)

    monkeypatch.setattr(kind, "forward", looking)
    assert chosen(rm, 10**12) == (96, 0.0)
    assert "cannot be counted" in capsys.readouterr().err


@pytest.mark.slow
def test_the_dry_run_tells_the_memory_that_the_training_then_takes(tmp_path, gold_pairs):
    # Large enough for two decimals of a GiB.
    train = {"steps": 2, "pairs_per_step": 32, "lr": 1e-3, "token_budget": 4096, "precision": "fp32"}
    config = PipelineConfig.model_validate({"model": {"name": "tiny-deep", "max_seq_len": 96}, "train": train})
    lines = plan(config, gold_pairs[:32], [])
    told = float(re.match(r"[\d.]+", lines["memory"]).group()) * 2**30
    with progress_bar("train") as report:
        tracker = JsonlTracker(tmp_path / METRICS_FILE)
        train_into(training_of(config), gold_pairs[:32], [], tmp_path, tracker, report)
        tracker.close()
    record = json.loads((tmp_path / "training.json").read_text())
    measured = record["peak_training_bytes"] + 4 * record["num_parameters"]
    assert told == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_planned_tokens_are_those_of_the_training(tmp_path, start, monkeypatch):
    training = start(tmp_path, held_out=[])
    planned, _ = _computed_tokens(training.trainer)
    assert planned == training.run().result.num_tokens
    monkeypatch.setattr("rmcore.training.plan.CUT_STEPS", 3)
    assert _computed_tokens(training.trainer)[0] == pytest.approx(planned, rel=0.2)
