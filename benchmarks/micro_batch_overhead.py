"""What one more micro-batch costs, in the time of computing that many tokens.

Trains the same pairs, cut by several values of `overhead_tokens`, and prints seconds, micro-batches and padded tokens
of each. Alternates the values and repeats, so that drift of the machine falls on all alike.

    python benchmarks/micro_batch_overhead.py --model tiny
    python benchmarks/micro_batch_overhead.py --model minilm --data $RM_OPT_DATA/alpacaeval_train.parquet
"""

import argparse
import time

import numpy as np
import torch

from rmcore.batching import collate, pack_pairs, step_order
from rmcore.config import DataConfig, ModelConfig, TrainConfig
from rmcore.data.rendering import TokenizedPair
from rmcore.losses import make_bradley_terry
from rmcore.model import BradleyTerryRM
from rmcore.optim import make_optimizer
from rmcore.stages.prepare import load_splits
from rmcore.trainer.step import StepContext, make_forward, train_step

OVERHEADS = (0, 64, 128, 256, 512, 2048)


def measure(rm: BradleyTerryRM, pairs: list[TokenizedPair], overhead: int, steps: int) -> tuple[float, int, int]:
    """Seconds, micro-batches and padded tokens of `steps` optimizer steps of 16 pairs."""
    config = TrainConfig()
    forward = make_forward(rm.model, make_bradley_terry(config), config.precision, rm.device)
    context = StepContext(rm.model, forward, make_optimizer(rm.model, config), config.clip, rm.device)
    rm.model.train()
    num_batches = num_tokens = 0
    started = time.perf_counter()
    for number, indices in enumerate(step_order(len(pairs), 16, steps, seed=0)):
        chosen = [pairs[index] for index in indices]
        groups = pack_pairs([pair.num_tokens for pair in chosen], 16384, overhead_tokens=overhead)
        batches = [collate(chosen, group, pad_id=rm.pad_id) for group in groups]
        result = train_step(context, batches, step=number, pair_ids=[pair.pair_id for pair in chosen])
        num_batches, num_tokens = num_batches + len(batches), num_tokens + result.num_tokens
    return time.perf_counter() - started, num_batches, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="gold")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    splits, _ = load_splits(DataConfig(source=arguments.data), seed=0)
    rm = BradleyTerryRM.new(ModelConfig(name=arguments.model, max_seq_len=256), seed=0, device=torch.device("cpu"))
    pairs = rm.renderer.tokenize_pairs(splits["train"][:1000])
    measure(rm, pairs, 64, 2)
    rows = [
        (overhead, *measure(rm, pairs, overhead, arguments.steps))
        for _ in range(arguments.repeats)
        for overhead in OVERHEADS
    ]
    print("| overhead_tokens | seconds (median) | micro-batches | padded tokens |\n| ---: | ---: | ---: | ---: |")
    for overhead in OVERHEADS:
        own = [row for row in rows if row[0] == overhead]
        print(f"| {overhead} | {np.median([row[1] for row in own]):.2f} | {own[0][2]} | {own[0][3]} |")


if __name__ == "__main__":
    main()
