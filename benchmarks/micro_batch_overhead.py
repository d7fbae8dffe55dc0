"""How a step is best cut into micro-batches, padded and packed.

Padded: what one more micro-batch costs, in the time of computing that many tokens; the same pairs are cut by several
values of `overhead_tokens`. Packed: the same pairs in rows of at most so many tokens. Prints seconds, micro-batches and
computed tokens of each. Alternates the values and repeats, so that drift of the machine falls on all alike.

    python benchmarks/micro_batch_overhead.py --model tiny
    python benchmarks/micro_batch_overhead.py --model minilm --data $RM_OPT_DATA/alpacaeval_train.parquet
    python benchmarks/micro_batch_overhead.py --model tiny --packed
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from rmcore.config.data import DataConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.data.rendering import TokenizedPair
from rmcore.models.batching import MicroBatch, StepOrder, collate, even_shares, pack_pairs, pair_tokens
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.prepare import load_splits
from rmcore.training.losses import make_bradley_terry
from rmcore.training.optimizers import make_optimizer
from rmcore.training.step import StepContext, make_forward, train_step

OVERHEADS = (0, 64, 128, 256, 512, 2048)
ROW_TOKENS = (512, 1024, 2048, 4096, 8192)
PAIRS_PER_STEP = 16

Cut = Callable[[list[TokenizedPair]], list[MicroBatch]]


def padded_cut(rm: BradleyTerryRM, overhead: int) -> Cut:
    """Cut a step as training does where rows are padded, for an assumed overhead."""

    def cut(pairs: list[TokenizedPair]) -> list[MicroBatch]:
        groups = pack_pairs([pair.num_tokens for pair in pairs], 16384, overhead_tokens=overhead)
        return [collate(pairs, group, pad_id=rm.pad_id) for group in groups]

    return cut


def packed_cut(rm: BradleyTerryRM, row_tokens: int) -> Cut:
    """Cut a step as training does where rows are packed, into rows of about so many tokens."""
    packing = rm.packing()
    assert packing is not None

    def cut(pairs: list[TokenizedPair]) -> list[MicroBatch]:
        costs = [pair_tokens(pair, packing) for pair in pairs]
        (groups,) = even_shares(costs, 16384, num_ranks=1, aim=row_tokens)
        return [collate(pairs, group, pad_id=rm.pad_id, packing=packing) for group in groups if group]

    return cut


def measure(rm: BradleyTerryRM, pairs: list[TokenizedPair], cut: Cut, steps: int) -> tuple[float, int, int]:
    """Seconds, micro-batches and computed tokens of `steps` optimizer steps."""
    config = TrainConfig(precision="fp32")
    forward = make_forward(rm.model, make_bradley_terry(config), config.precision, rm.device)
    context = StepContext(rm.model, forward, make_optimizer(rm.model, config), config.clip, rm.device)
    rm.model.train()
    num_batches = num_tokens = 0
    started = time.perf_counter()
    for number, indices in enumerate(StepOrder(len(pairs), PAIRS_PER_STEP, steps, seed=0)):
        chosen = [pairs[index] for index in indices]
        batches = cut(chosen)
        train_step(context, batches, step=number, pair_ids=[pair.pair_id for pair in chosen])
        num_batches += len(batches)
        num_tokens += sum(batch.rows.num_tokens for batch in batches)
    return time.perf_counter() - started, num_batches, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="gold")
    parser.add_argument("--packed", action="store_true", help="packed rows of several lengths instead of padded ones")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    splits, _ = load_splits(DataConfig(source=arguments.data), seed=0)
    rm = BradleyTerryRM.new(ModelConfig(name=arguments.model, max_seq_len=256), seed=0, device=torch.device("cpu"))
    pairs = rm.renderer.tokenize_pairs(splits["train"][:1000])
    name, values, make = (
        ("row tokens", ROW_TOKENS, packed_cut) if arguments.packed else ("overhead_tokens", OVERHEADS, padded_cut)
    )
    measure(rm, pairs, make(rm, values[1]), 2)
    rows = [
        (value, *measure(rm, pairs, make(rm, value), arguments.steps))
        for _ in range(arguments.repeats)
        for value in values
    ]
    print(f"| {name} | seconds (median) | micro-batches | computed tokens |\n| ---: | ---: | ---: | ---: |")
    for value in values:
        own = [row for row in rows if row[0] == value]
        print(f"| {value} | {np.median([row[1] for row in own]):.2f} | {own[0][2]} | {own[0][3]} |")


if __name__ == "__main__":
    main()
