"""What only a GPU can show; skipped where there is none."""

import numpy as np
import pytest
import torch

from rmcore.config import ModelConfig, TrainConfig
from rmcore.model import BradleyTerryRM
from rmcore.tracking import MemoryTracker
from rmcore.trainer.loop import Trainer

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
