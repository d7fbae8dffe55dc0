"""What Muon's update costs on a CPU: torch's products in bfloat16 beside ours in float32, in turns, on one model.

    OMP_NUM_THREADS=1 python benchmarks/muon_step.py

Gradients are random and of `tiny`'s shapes. Prints milliseconds of process time an update, the smallest, the median and
the largest of the repeats, and how far apart the two move the weights.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from rmcore.models.tiny import build_tiny
from rmcore.training.muon import Float32Muon
from rmcore.training.optimizers import MUON_MOMENTUM, hidden_matrices

SIDES: dict[str, type[torch.optim.Optimizer]] = {"torch, bfloat16": torch.optim.Muon, "ours, float32": Float32Muon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForSequenceClassification.from_pretrained(build_tiny(Path(folder)), dtype=torch.float32)
    models: dict[str, nn.Module] = {name: copy.deepcopy(model) for name in SIDES}
    parts = {
        name: kind(hidden_matrices(models[name]), lr=1e-3, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        for name, kind in SIDES.items()
    }
    start = torch.cat([matrix.detach().flatten() for matrix in hidden_matrices(model)])
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for repeat in range(options.repeats + 1):
        for name, part in parts.items():
            torch.manual_seed(repeat)
            for matrix in hidden_matrices(models[name]):
                matrix.grad = torch.randn_like(matrix)
            before = time.process_time()
            part.step()
            taken[name].append(1000 * (time.process_time() - before))
    print("| side | ms an update: smallest | median | largest |\n| --- | ---: | ---: | ---: |")
    for name, all_of_them in taken.items():
        times = all_of_them[1:]  # the first one makes the state
        print(f"| {name} | {min(times):.0f} | {np.median(times):.0f} | {max(times):.0f} |")
    first, second = (
        torch.cat([matrix.detach().flatten() for matrix in hidden_matrices(one)]) - start for one in models.values()
    )
    apart = float((first - second).norm() / second.norm())
    print(f"\nThe two have moved the weights apart by {apart:.2%} of what they moved.")


if __name__ == "__main__":
    main()
