"""One pinned trajectory: what a change of the trainer must not change, and what several configurations share.

The numbers are those of `tiny` on the gold world, seed 0, in float64, so that they hold on any machine to the tolerance
(some layers compute in float32 inside). After a change that is meant to alter training, look at the difference, then
write them anew:  python tests/invariant/test_trajectory.py
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer

PINNED = Path(__file__).with_name("trajectory.json")
NAMES = ("train/loss", "train/mean_margin", "train/grad_norm", "train/lr", "eval/loss", "eval/pairwise_accuracy")
BASE = {
    "steps": 6, "pairs_per_step": 4, "lr": 1e-3, "warmup_steps": 0, "log_every": 1, "eval_every": 3,
    "token_budget": 4096, "target_margin_scale": 0.5, "margin_regularization": 0.01, "centering": 0.01,
}  # fmt: skip
EQUIVALENT = {
    "as pinned": {},
    "single pairs": {"token_budget": 130},
    "checkpointing": {"gradient_checkpointing": True},
    "padded, single pairs": {"packing": False, "token_budget": 130},
    "padded, checkpointing": {"packing": False, "gradient_checkpointing": True},
    "worker processes": {"num_workers": 2},
    "no dropout to switch off": {"dropout": True},
    "kept checkpoints, states saved as often as can be": {"save_every": 2, "keep_top_k": 3, "resume_every_seconds": 0},
}


def trajectory(folder: Path, changes: dict) -> dict[str, dict[str, float]]:
    """Numbers by step of one short training."""
    pairs = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), seed=0).pairs
    annotated = [pair.__class__(**{**_fields(pair), "target_margin": float(n % 4)}) for n, pair in enumerate(pairs)]
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu"))
    rm.model.double()
    config = TrainConfig.model_validate(BASE | changes)
    tracker = MemoryTracker()
    Trainer(
        rm,
        config,
        train=rm.renderer.tokenize_pairs(annotated[:14]),
        validation=rm.renderer.tokenize_pairs(annotated[40:46]),
        folder=folder,
        tracker=tracker,
        seed=0,
    ).run()
    found: dict[str, dict[str, float]] = {}
    for step, values in tracker.rows:
        found.setdefault(str(step), {}).update({name: values[name] for name in NAMES if name in values})
    return found


def _fields(pair):
    return {name: getattr(pair, name) for name in ("prompt", "chosen", "rejected", "metadata", "pair_id")}


pytestmark = pytest.mark.usefixtures("true_tiny")


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUIVALENT)
def test_equivalent_configurations_reproduce_the_pinned_trajectory(tmp_path, name):
    expected = json.loads(PINNED.read_text())
    found = trajectory(tmp_path, EQUIVALENT[name])
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step].keys() == values.keys()
        for metric, value in values.items():
            np.testing.assert_allclose(found[step][metric], value, rtol=1e-4, atol=1e-6, err_msg=f"{metric}, {step}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PINNED.write_text(json.dumps(trajectory(Path(scratch), {}), indent=1) + "\n")
    sys.exit(0)
