"""Whether `train.optimizer=adamw8bit` learns as float32 AdamW does: pairs of trainings, seed by seed.

    OMP_NUM_THREADS=1 python benchmarks/split_adamw.py

Sides: AdamW in float32; AdamW under bf16 autocast; adamw8bit, which has bf16 activations throughout, as well. Same
weights, pairs and order by seed. Claims, written before the first run: against float32 AdamW, adamw8bit's held-out loss
differs by less than 0.02 nats and its held-out accuracy by less than 2 points, each with the whole 95 % interval (t,
over seeds, of paired differences).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.evaluation.report_card import batch_metrics
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer

SIDES = {
    "AdamW, fp32": {"optimizer": "adamw", "precision": "fp32"},
    "AdamW, bf16": {"optimizer": "adamw", "precision": "bf16"},
    "adamw8bit, bf16": {"optimizer": "adamw8bit", "precision": "bf16"},
}
CONTROL, TRIED = "AdamW, fp32", "adamw8bit, bf16"
CLAIMS = {"loss": 0.02, "pairwise_accuracy": 0.02}
HELD_OUT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    num_train = 16 * options.steps
    pairs = generate_pairs(GoldConfig(num_prompts=num_train + HELD_OUT), seed=0).pairs
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side, changes in SIDES.items():
            measured[side].append(trained(pairs[:num_train], pairs[-HELD_OUT:], seed, options.steps, changes))
            print(f"seed {seed}, {side}: {measured[side][-1]}", flush=True)
    print("\n| side | held-out loss, nats | held-out accuracy | last training loss |\n| --- | ---: | ---: | ---: |")
    for side, found in measured.items():
        cells = [f"{np.mean([one[name] for one in found]):.4f}" for name in (*CLAIMS, "train_loss")]
        print(f"| {side} | {' | '.join(cells)} |")
    for name, most in CLAIMS.items():
        apart = np.array([b[name] - a[name] for a, b in zip(measured[CONTROL], measured[TRIED], strict=True)])
        half = stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5
        low, high = apart.mean() - half, apart.mean() + half
        verdict = "holds" if -most < low and high < most else "is not shown"
        print(f"{name}: {apart.mean():+.4f} ({low:+.4f} to {high:+.4f}), claimed within {most}: {verdict}")


def trained(train: list, held_out: list, seed: int, steps: int, changes: dict[str, str]) -> dict[str, float]:
    """Held-out loss and accuracy after the last step, and the training loss of the last steps."""
    rm = BradleyTerryRM.new(ModelConfig(max_seq_len=256), seed=seed, device=torch.device("cpu"))
    config = TrainConfig.model_validate(
        {
            **{"steps": steps, "lr": 1e-3, "warmup_steps": 20, "token_budget": 4096, "log_every": 20},
            **{"best_metric": "last", "early_stopping_patience": None, "callbacks": (), "eval_every": steps},
            **changes,
        }
    )
    tracker = MemoryTracker()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            rm,
            config,
            train=rm.renderer.tokenize_pairs(train),
            validation=[],
            folder=Path(folder),
            tracker=tracker,
            seed=seed,
        ).run()
    found = batch_metrics(rm.score_pairs(held_out))
    losses = [values["train/loss"] for _, values in tracker.rows if "train/loss" in values]
    return {name: found[name] for name in CLAIMS} | {"train_loss": losses[-1]}


if __name__ == "__main__":
    main()
