"""What only a GPU can show; skipped where there is none."""

import signal

import numpy as np
import pytest
import torch

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer
from rmcore.training.train_mode import training_form

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_rewards_agree_with_the_cpu(tiny_folder, gold_pairs):
    rewards = [
        BradleyTerryRM.from_pretrained(tiny_folder, device=device).score_pairs(gold_pairs[:32])
        for device in ("cpu", "cuda")
    ]
    np.testing.assert_allclose(*rewards, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_lowers_the_loss(tmp_path, gold_pairs, precision):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cuda"))
    tracker = MemoryTracker()
    config = TrainConfig(steps=16, lr=3e-3, pairs_per_step=8, log_every=1, warmup_steps=0, precision=precision)
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:8])
    result = Trainer(rm, config, train=pairs, validation=[], folder=tmp_path, tracker=tracker, seed=0).run()
    losses = [values["train/loss"] for _, values in tracker.rows]
    assert losses[-1] < 0.8 * losses[0]
    assert result.peak_memory_bytes > 0


def trained(folder, gold_pairs, stop_at=0, **changes):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cuda"))
    config = TrainConfig(
        steps=12, lr=1e-3, pairs_per_step=4, log_every=1, warmup_steps=0, resume_every_seconds=0, **changes
    )
    tracker = MemoryTracker()

    def stop(step, total, text):
        if step == stop_at:
            signal.raise_signal(signal.SIGTERM)

    pairs = rm.renderer.tokenize_pairs(gold_pairs[:32])
    trainer = Trainer(
        rm, config, train=pairs, validation=[], folder=folder, tracker=tracker, seed=0, report=stop
    )  # fmt: skip
    if stop_at:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    else:
        trainer.run()
    return {step: values["train/loss"] for step, values in tracker.rows}


def test_workers_with_pinned_memory_give_the_same_training(tmp_path, gold_pairs):
    losses = [trained(tmp_path / str(workers), gold_pairs, num_workers=workers) for workers in (0, 2)]
    np.testing.assert_allclose(list(losses[0].values()), list(losses[1].values()), rtol=1e-3)


def test_a_stopped_training_goes_on(tmp_path, gold_pairs):
    whole = trained(tmp_path / "whole", gold_pairs)
    trained(tmp_path / "stopped", gold_pairs, stop_at=6)
    rest = trained(tmp_path / "stopped", gold_pairs)
    assert list(rest) == list(range(7, 13))
    np.testing.assert_allclose(list(rest.values()), [whole[step] for step in rest], rtol=1e-2)


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("bf16", "high")])
def test_float32_products_are_rounded_to_tf32_in_a_training_in_bf16_alone(precision, products):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cuda"))
    with training_form(rm, TrainConfig(precision=precision)):
        assert torch.get_float32_matmul_precision() == products
    assert torch.get_float32_matmul_precision() == "highest"


def test_compiled_training_stays_close(tmp_path, gold_pairs):
    plain = trained(tmp_path / "plain", gold_pairs)
    fast = trained(tmp_path / "fast", gold_pairs, compile=True)
    np.testing.assert_allclose(list(fast.values())[:3], list(plain.values())[:3], rtol=2e-2)
