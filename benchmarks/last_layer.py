"""What a last layer costs that is computed for all tokens, and one that is computed only where rewards are read.

    OMP_NUM_THREADS=1 python benchmarks/last_layer.py

Both compute the gradient of the same packed row of pairs with lengths like HH's, in turns in one process, on one
thread; the weights are the same, so are rewards and gradients up to rounding. CPU seconds of the process, so that what
else runs on the machine counts little; the update of the weights is no part of it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from throughput_sides import MODELS, Cell, machine, make_rm
from torch import nn
from torch.nn.functional import logsigmoid
from train_throughput import draw

from rmcore.models.batching import collate
from rmcore.models.packing.forward import rewards_of
from rmcore.models.packing.rows import Rows
from rmcore.models.precision import float32_head, precision_context

CPU = torch.device("cpu")


def gradient(model: nn.Module, rows: Rows, precision: str) -> Callable[[], torch.Tensor]:
    """One forward and backward pass of a micro-batch; it returns the rewards, and leaves the gradient."""

    def run() -> torch.Tensor:
        model.zero_grad()
        with float32_head(model), precision_context(precision, CPU):
            rewards = rewards_of(model, rows)
        chosen, rejected = rewards.float().chunk(2)
        (-logsigmoid(chosen - rejected)).sum().backward()
        return rewards.detach()

    return run


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["6.5m", "minilm"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(1)}\n")
    print("| model | precision | all tokens, CPU s | where read, CPU s | times | rewards differ by | gradients by |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: |")
    for name in options.models:
        for precision in options.precisions:
            cell = Cell("hh-like", name, "packed", 0, 1, 500, 8, precision, False, 1, options.pairs)
            rm = make_rm(cell, CPU)
            packing = rm.packing(precision)
            assert packing is not None
            assert packing.reads_last
            pairs, model = draw(cell), rm.model.train()
            forms = [replace(packing, reads_last=False), packing]
            rows = [collate(pairs, range(len(pairs)), pad_id=rm.pad_id, packing=form).rows for form in forms]
            nn.Module.apply(model, lambda one: setattr(one, "p", 0.0) if isinstance(one, nn.Dropout) else None)
            sides = [gradient(model, one, precision) for one in rows]
            rewards, gradients = [], []
            for side in sides:
                rewards.append(side())
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            seconds: list[list[float]] = [[], []]
            for repeat in range(options.repeats):
                for place in (0, 1) if repeat % 2 == 0 else (1, 0):
                    begun = time.process_time()
                    sides[place]()
                    seconds[place].append(time.process_time() - begun)
            ratios = [one / other for one, other in zip(*seconds, strict=True)]
            apart = [float((two - one).norm() / one.norm()) for one, two in (rewards, gradients)]
            print(
                f"| {name} | {precision} | {median(seconds[0]):.3f} | {median(seconds[1]):.3f} | "
                f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}) | {apart[0]:.1g} | {apart[1]:.1g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
