"""bf16 by autocast over float32 weights against bfloat16 copies of them (`rmcore.training.half_weights`).

    RM_OPT_DATA=../shared/data python benchmarks/half_weights.py --model 6.5m --steps 6
    RM_OPT_DATA=../shared/data python benchmarks/half_weights.py --model minilm --data alpacaeval --steps 6

The same steps of packed pairs, 16 each, on both sides in turns within one process. Prints pairs a second (median of the
steps), and of the first step's gradient the relative error against float32.
"""

import argparse
import time

import numpy as np
import torch
from throughput_sides import MODELS, PAIRS_PER_STEP, Cell, make_rm, steps_of
from torch import Tensor
from train_throughput import DEFAULTS, pairs_for

from rmcore.config.train import TrainConfig
from rmcore.models.batching import micro_batches
from rmcore.models.device import pick_device
from rmcore.models.packing.layout import Packing
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.ranks import ALONE
from rmcore.training.setup import make_context
from rmcore.training.step import StepContext, accumulate_gradient, read_steps, train_step
from rmcore.training.train_mode import training_form

TOKEN_BUDGET = 8192
SIDES = {"autocast": False, "bfloat16 weights": True}


def gradient(context: StepContext, batches: list, num_pairs: int) -> Tensor:
    """The whole gradient of a step as one vector."""
    context.optimizer.zero_grad()
    accumulate_gradient(context, batches, num_terms=num_pairs)
    found = [parameter.grad.flatten() for parameter in context.model.parameters() if parameter.grad is not None]
    return torch.cat(found).double()


def cut(rm: BradleyTerryRM, pairs: list, packing: Packing | None) -> list:
    """The micro-batches of one step."""
    return list(micro_batches(pairs, token_budget=TOKEN_BUDGET, pad_id=rm.pad_id, packing=packing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="6.5m", choices=MODELS)
    parser.add_argument("--data", default="hh", choices=sorted(DEFAULTS))
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    _, longest, _ = DEFAULTS[given.data]
    threads = torch.get_num_threads()
    cell = Cell(given.data, given.model, "packed", 0, given.steps + 1, longest, 8, "bf16", False, threads)
    device = pick_device("auto")
    rm = make_rm(cell, device)
    steps = steps_of(pairs_for(cell), cell)
    config = TrainConfig(precision="bf16")
    with training_form(rm, config):
        packing = rm.packing("bf16")
        exact_config = config.model_copy(update={"precision": "fp32"})
        exact = gradient(make_context(rm, exact_config, ALONE), cut(rm, steps[0], packing), PAIRS_PER_STEP)
        contexts = {name: make_context(rm, config, ALONE, half=half) for name, half in SIDES.items()}
        errors, seconds = {}, {name: [] for name in SIDES}
        rm.model.train()
        for name, context in contexts.items():
            found = gradient(context, cut(rm, steps[0], packing), PAIRS_PER_STEP)
            errors[name] = float((found - exact).norm() / exact.norm())
        for number, pairs in enumerate(steps[1:]):
            for name in list(SIDES) if number % 2 else list(SIDES)[::-1]:
                started = time.perf_counter()
                ids = [pair.pair_id for pair in pairs]
                next(read_steps([train_step(contexts[name], cut(rm, pairs, packing), step=number, pair_ids=ids)]))
                seconds[name].append(time.perf_counter() - started)
    print(f"{given.model}, {given.data}, {threads} threads, {device}")
    print("| side | pairs/s | gradient error against float32 |\n| --- | ---: | ---: |")
    for name, own in seconds.items():
        print(f"| {name} | {PAIRS_PER_STEP / np.median(own):.2f} | {errors[name]:.2e} |")


if __name__ == "__main__":
    main()
