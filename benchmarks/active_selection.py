"""What choosing labels costs: a pass of 10,000 pairs with 4 members against one without, and choosing 500 of them.

    python benchmarks/active_selection.py [--model minilm] [--pairs 10000] [--max-seq-len 64] [--repeats 3]

Pairs of the gold world, members that share one backbone, in float32. A cheaper backbone is the stricter test. Both
passes are timed in turns in one process, after a warm-up on a few pairs. Choosing is timed on invented margins of
--pool pairs.
"""

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import transformers

from rmcore.active.acquisition import ACQUISITIONS, View, look, select
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM

PAIRS_PER_PROMPT = 4
WARM_UP_PAIRS = 100


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--pool", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--k", type=int, default=500)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--max-seq-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    world = generate_pairs(
        GoldConfig(num_prompts=arguments.pairs // PAIRS_PER_PROMPT, pairs_per_prompt=PAIRS_PER_PROMPT), 0
    )
    pairs = world.pairs[: arguments.pairs]
    rm = BradleyTerryRM.new(
        ModelConfig(name=arguments.model, max_seq_len=arguments.max_seq_len), seed=0, device=torch.device("cpu")
    )
    members = [copy.deepcopy(rm) for _ in range(arguments.members)]
    for one in members:  # which share the backbone
        torch.nn.init.normal_(head_of(one).weight)
    ensemble = RewardModelEnsemble(members)

    def one_pass(some: int = len(pairs)) -> None:
        tokenized = rm.renderer.tokenize_pairs(pairs[:some])
        rm.score_sides([side for pair in tokenized for side in (pair.chosen, pair.rejected)])

    one_pass(WARM_UP_PAIRS)
    look(pairs[:WARM_UP_PAIRS], ensemble)
    alone, together = [], []
    for _ in range(arguments.repeats):
        alone.append(seconds(one_pass))
        together.append(seconds(lambda: look(pairs, ensemble)))
        print(f"pass {len(alone)}: {alone[-1]:.1f} s alone, {together[-1]:.1f} s with members", flush=True)
    ratios = [b / a for a, b in zip(alone, together, strict=True)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, ")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(f"| {len(pairs)} pairs, {arguments.max_seq_len} tokens | s, median (range) |\n| --- | --- |")
    print(f"| one pass of the backbone | {_spread(alone)} |\n| {arguments.members} members | {_spread(together)} |")
    print(f"| ratio | {_spread(ratios)} |\n")
    print(
        f"| choosing {arguments.k} of {arguments.pool} | s, median (range) | at most one of a prompt |\n"
        "| --- | --- | --- |"
    )
    rng = np.random.default_rng(0)
    prompts = [str(index // PAIRS_PER_PROMPT) for index in range(arguments.pool)]
    view = View(rng.normal(size=(arguments.members, arguments.pool)), prompts)
    for name, make in ACQUISITIONS.items():
        times = [
            [seconds(partial(select, view, arguments.k, make(0), max_per_prompt=most)) for _ in range(3)]
            for most in (None, 1)
        ]
        print(f"| {name} | {_spread(times[0])} | {_spread(times[1])} |")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    main()
