"""How many pairs a second a reward model trains on: TRL's RewardTrainer, this library padded, and packed.

    PYTHONPATH=<where TRL is> python benchmarks/train_throughput.py --data hh --out throughput_cells
    PYTHONPATH=<where TRL is> python benchmarks/train_throughput.py --data alpacaeval --out throughput_cells
    PYTHONPATH=<where TRL is> python benchmarks/train_throughput.py --data fixed --model qwen2.5-0.5b --precision bf16 \
        --out throughput_cells

Every cell is a process of its own; the sides take turns, and the next repeat goes through them backwards. Same on all
sides: weights, token ids, the pairs of each step, the loss (plain Bradley-Terry: beta 1, no smoothing, no penalty),
AdamW, learning rate, clipping, precision, gradient checkpointing, no dropout, logging every 10 steps. TRL cuts a step
into micro-batches of --trl-batch pairs, each padded to its longest side, and attends by SDPA. This library takes the
token budget of its own choice. A finished cell is a JSON file in --out; an interrupted run continues, and a cell is
measured again once it is deleted.

    pairs/s      from the end of the first step to the end of the last: batches, steps and logging
    tokens       computed a pair in those steps, padding included
    memory       on a CPU what the process grew by at its peak, on a GPU the most that was allocated
    first loss   of the first step, before any update

The floor: what a form without padding that computes a prompt once must compute, against what TRL computes, by tokens
and by FLOPs. Both are facts about the pairs; a side can be above the ratio where it is better at more than that.

Data: `hh` and `alpacaeval` are files in RM_OPT_DATA; `hh-like` draws lengths like those of `hh` and `fixed` has 1024
tokens of prompt and 256 of each completion, both with random ids. Weights are random but those of MiniLM.
"""

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from throughput_sides import (
    MODELS,
    PAIRS_PER_STEP,
    SEED,
    SIDES,
    Cell,
    in_turns,
    make_rm,
    model_config,
    run_cell,
    run_missing,
    steps_of,
)
from torch import nn
from transformers import AutoModel, PretrainedConfig

from rmcore.data.readers.sources import load_pairs
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.data.tokenized import reason_left_out

FILES = {"hh": "hh_harmless_base_test.jsonl.gz", "alpacaeval": "alpacaeval_train.parquet"}
DEFAULTS = {
    "hh": ("6.5m", 500, 8),
    "alpacaeval": ("minilm", 256, 16),
    "hh-like": ("6.5m", 500, 8),
    "fixed": ("6.5m", 1280, 8),
}
"""Model, most tokens a side, TRL's pairs a micro-batch (8 is its default)."""
FIXED = (1024, 256)
"""Tokens of prompt and of each completion."""
HH_PREFIX = (18, 26, 30, 34, 39, 46, 55, 76, 96, 115, 131, 151, 168, 187, 205, 225, 247, 268, 301, 337, 481)
HH_TAIL = (2, 10, 14, 18, 22, 26, 30, 34, 39, 43, 49, 55, 62, 70, 79, 92, 105, 123, 148, 190, 428)
"""Every 20th part of the tokens that two sides share, and of those after them: the pairs of `hh`, as drawn below.

Drawn independently (their correlation there is -0.03) they give the same ratio of padded to needed tokens: 2.97.
"""
PEAK_TFLOPS = 989.0
"""H100 and H200, dense bf16, from NVIDIA's data sheet."""


@dataclass(frozen=True)
class Work:
    """What some form of the pairs computes in the backbone."""

    tokens: int
    attended: int
    """Pairs of a query and a key that it attends to, a head and layer."""

    def flops(self, config: PretrainedConfig) -> float:
        """Forward and backward: 6 a weight and token, 12 a layer, hidden unit and attended pair.

        Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1, without embeddings, head and recomputation.
        """
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width *= config.num_attention_heads
        attention = 12 * config.num_hidden_layers * width * self.attended
        return 6 * num_matrix_weights(config) * self.tokens + attention


def num_matrix_weights(config: PretrainedConfig) -> int:
    """Weights of the linear layers that every token goes through."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    linear = (module for name, module in model.named_modules() if "layer" in name and isinstance(module, nn.Linear))
    return sum(module.weight.numel() for module in linear)


def needed_work(pairs: Sequence[TokenizedPair], *, causal: bool) -> Work:
    """No padding and, where a token does not depend on what follows it, what both sides begin with only once."""
    tokens = attended = 0
    for pair in pairs:
        chosen, rejected = len(pair.chosen.ids), len(pair.rejected.ids)
        shared = _num_shared(pair) if causal else 0
        tokens += chosen + rejected - shared
        attended += _attended(chosen, causal) + _attended(rejected, causal) - _attended(shared, causal)
    return Work(tokens, attended)


def padded_work(pairs: Sequence[TokenizedPair], batch: int, *, causal: bool) -> Work:
    """Micro-batches of `batch` pairs as they come, both sides of each padded to its longest."""
    tokens = attended = 0
    for start in range(0, len(pairs), batch):
        group = pairs[start : start + batch]
        longest = max(pair.num_tokens for pair in group)
        tokens += 2 * len(group) * longest
        attended += 2 * len(group) * _attended(longest, causal)
    return Work(tokens, attended)


def _num_shared(pair: TokenizedPair) -> int:
    both = zip(pair.chosen.ids, pair.rejected.ids, strict=False)
    return sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], both))


def _attended(length: int, causal: bool) -> int:
    return length * (length + 1) // 2 if causal else length**2


def read_from_file(cell: Cell) -> list[TokenizedPair]:
    """Enough pairs of a file for all steps, at random: of `hh` those within the limit, of `alpacaeval` cut to it."""
    renderer = make_rm(cell, torch.device("cpu")).renderer
    found = load_pairs(str(Path(os.environ.get("RM_OPT_DATA", ".")) / FILES[cell.data])).pairs
    shuffled = random.Random(SEED).sample(found, len(found))  # noqa: S311
    over_length: Literal["cut", "drop"] = "cut" if cell.data == "alpacaeval" else "drop"
    kept = [pair for pair in renderer.tokenize_pairs(shuffled) if reason_left_out(pair, over_length) is None]
    return kept[: cell.steps * cell.pairs_per_step]


def draw(cell: Cell) -> list[TokenizedPair]:
    """Pairs of random ids with the lengths that `cell.data` names."""
    generator = np.random.default_rng(SEED)
    shares = np.linspace(0, 1, len(HH_PREFIX))
    vocabulary = model_config(cell.model).vocab_size
    pairs: list[TokenizedPair] = []
    while len(pairs) < cell.steps * cell.pairs_per_step:
        if cell.data == "fixed":
            prefix, *tails = FIXED[0], FIXED[1], FIXED[1]
        else:
            at = generator.random(3)
            prefix = int(np.interp(at[0], shares, HH_PREFIX))
            tails = [int(length) for length in np.interp(at[1:], shares, HH_TAIL)]
        if prefix + max(tails) > cell.max_seq_len:
            continue
        prompt = generator.integers(16, vocabulary, prefix).tolist()  # the first ids are special ones
        # The first token after the prompt differs, so that the prompt is all that the sides share.
        ends = [[16 + side, *generator.integers(16, vocabulary, n - 1).tolist()] for side, n in enumerate(tails)]
        chosen, rejected = (TokenizedSide(prompt + end, 0) for end in ends)
        pairs.append(TokenizedPair(f"drawn-{len(pairs)}", chosen, rejected))
    return pairs


def pairs_for(cell: Cell) -> list[TokenizedPair]:
    """The pairs that all sides train on."""
    pairs = read_from_file(cell) if cell.data in FILES else draw(cell)
    if len(pairs) < cell.steps * cell.pairs_per_step:
        raise SystemExit(
            f"--steps {cell.steps} needs {cell.steps * cell.pairs_per_step} pairs, and {cell.data} has "
            f"{len(pairs)}; lower it."
        )
    return pairs


def run_cells(first: Cell, sides: Sequence[str], repeats: int, pairs: list[TokenizedPair], out: Path) -> list[dict]:
    """All cells, those that are there already taken from `out`."""
    cells = [replace(first, side=side, repeat=repeat) for repeat, side in in_turns(sides, repeats)]
    return run_missing(cells, out, partial(run_cell, pairs), "pairs_per_second")


def report(records: Sequence[dict], pairs: Sequence[TokenizedPair], peak_tflops: float) -> str:
    """The markdown of one run."""
    cell = Cell(**records[0]["cell"])
    config = model_config(cell.model)
    causal = cell.model != "minilm"
    timed = [pair for step in steps_of(pairs, cell)[1:] for pair in step]
    needed, padded = needed_work(timed, causal=causal), padded_work(timed, cell.trl_batch, causal=causal)
    by_side: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda record: SIDES.index(record["cell"]["side"])):
        by_side.setdefault(record["cell"]["side"], []).append(record)
    speeds = {side: np.array([one["pairs_per_second"] for one in found]) for side, found in by_side.items()}
    on_gpu = records[0]["device"] == "cuda"
    lines = [
        f"\n{cell.data}, {cell.model}, {cell.precision}, gradient checkpointing "
        f"{'on' if cell.gradient_checkpointing else 'off'}{', compiled here' if cell.compile else ''}: "
        f"{len(timed)} pairs timed in {cell.steps - 1} steps of "
        f"{cell.pairs_per_step}, at most {cell.max_seq_len} tokens a side, TRL in micro-batches of {cell.trl_batch}, "
        f"{len(speeds[cell.side])} repeats.\n{records[0]['machine']}\n",
        "| side | pairs/s, median (range) | times TRL | tokens a pair | peak memory, MiB | first loss |"
        + (" MFU, needed | MFU, padded |" if on_gpu else ""),
        "| --- | --- | --- | ---: | ---: | ---: |" + (" ---: | ---: |" if on_gpu else ""),
    ]
    for side, found in by_side.items():
        median = float(np.median(speeds[side]))
        line = (
            f"| {side} | {median:.2f} ({speeds[side].min():.2f}–{speeds[side].max():.2f}) | "
            f"{_times(speeds, side)} | {np.mean([one['tokens_per_pair'] for one in found]):.0f} | "
            f"{np.median([one['peak_bytes'] for one in found]) / 2**20:.0f} | {found[0]['first_loss']:.6f} |"
        )
        if on_gpu:
            used = [work.flops(config) / len(timed) * median / (peak_tflops * 1e12) for work in (needed, padded)]
            line += f" {100 * used[0]:.1f} % | {100 * used[1]:.1f} % |"
        lines.append(line)
    if on_gpu:
        lines.append(
            f"\nMFU: model FLOPs a second over {peak_tflops:g} TFLOP/s. Needed: those of the packed form, whoever "
            "trains. Padded: those of TRL's padded form; for another side that is what TRL would have to reach."
        )
    lines.append(floor(needed, padded, config, len(timed)))
    if "TRL" in speeds:
        bounds = {"tokens": padded.tokens / needed.tokens, "FLOPs": padded.flops(config) / needed.flops(config)}
        for side in [one for one in speeds if not one.startswith("TRL")]:
            achieved = float(np.median(speeds[side] / speeds["TRL"]))
            shares = ", ".join(f"{100 * achieved / bound:.0f} % by {name}" for name, bound in bounds.items())
            rows = f"rows packed, {kernel} attention" if (kernel := by_side[side][0]["packing"]) else "rows padded"
            lines.append(f"- {side} ({rows}): {achieved:.2f} times TRL, of the floor's ratio {shares}")
    if "TRL-default" in speeds:
        for side in [one for one in speeds if not one.startswith("TRL")]:
            ratios = speeds[side] / speeds["TRL-default"]
            lines.append(f"- {side}: {np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f}) times TRL-default")
    return "\n".join(lines)


def _times(speeds: dict[str, np.ndarray], side: str) -> str:
    if "TRL" not in speeds:
        return ""
    ratios = speeds[side] / speeds["TRL"]
    return "1" if side == "TRL" else f"{np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"


def floor(needed: Work, padded: Work, config: PretrainedConfig, num_pairs: int) -> str:
    """How much faster than TRL the form without padding can be by what it has to compute."""
    return (
        f"\nThe floor: {needed.tokens / num_pairs:.0f} tokens and {needed.flops(config) / num_pairs / 1e9:.2f} GFLOP a "
        f"pair have to be computed, TRL computes {padded.tokens / num_pairs:.0f} and "
        f"{padded.flops(config) / num_pairs / 1e9:.2f}: {padded.tokens / needed.tokens:.2f} times as many tokens, "
        f"{padded.flops(config) / needed.flops(config):.2f} times the FLOPs."
    )


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", choices=DEFAULTS, default="hh")
    parser.add_argument("--model", choices=MODELS, help="left out: 6.5m, for alpacaeval minilm")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["TRL", "padded", "packed"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile on this library's sides")
    parser.add_argument("--pairs-per-step", type=int, default=PAIRS_PER_STEP)
    parser.add_argument("--trl-batch", type=int, help="left out: 8, TRL's default; for alpacaeval 16")
    parser.add_argument("--steps", type=int, default=13, help="the first is not timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="of the GPU, dense, in that precision")
    parser.add_argument("--smoke", action="store_true", help="two steps of short drawn pairs, once: under a minute")
    given = parser.parse_args()
    if given.smoke:
        given.data, given.steps, given.repeats = "hh-like", 2, 1
    model, max_seq_len, batch = DEFAULTS[given.data]
    model, batch, max_seq_len = given.model or model, given.trl_batch or batch, 100 if given.smoke else max_seq_len
    if any(side.startswith("TRL") for side in given.sides) and find_spec("trl") is None:
        parser.error("TRL is not installed here: pip install trl, or name its folder in PYTHONPATH")
    if given.pairs_per_step % batch:
        parser.error(f"--trl-batch {batch} does not divide the {given.pairs_per_step} pairs of a step")
    if given.steps < 2:
        parser.error("--steps 1 leaves nothing to time: the first step is not")
    if max_seq_len > model_config(model).max_position_embeddings:
        parser.error(f"{model} has no positions for the {max_seq_len} tokens of --data {given.data}")
    os.environ.update(OMP_NUM_THREADS=str(given.threads), TOKENIZERS_PARALLELISM="false")
    first = Cell(
        data=given.data,
        model=model,
        side=given.sides[0],
        repeat=0,
        steps=given.steps,
        max_seq_len=max_seq_len,
        trl_batch=batch,
        precision=given.precision,
        gradient_checkpointing=given.gradient_checkpointing,
        threads=given.threads,
        pairs_per_step=given.pairs_per_step,
        compile=given.compile,
    )
    pairs = pairs_for(first)
    records = run_cells(first, given.sides, given.repeats, pairs, given.out)
    print(report(records, pairs, given.peak_tflops), flush=True)


if __name__ == "__main__":
    main()
