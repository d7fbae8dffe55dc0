"""Attention of packed rows on a CPU: the fused kernel one sequence at a time, against batches with an explicit softmax.

    python benchmarks/attention_kernels.py
    python benchmarks/attention_kernels.py --lengths 512 1024 2048 --dtypes bf16 --forms encoder

Each line is one row of about --tokens tokens whose sequences have about so many keys (0.75 to 1.25 times, uniformly):
of an encoder, or of pairs that share half of their tokens. Seconds of forward and backward, the median of --repeats;
both ways take turns, and the batches are made before, as all layers but the first find them. Errors are the largest of
output and gradients over the largest number there, against the same in float64.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from throughput_sides import machine
from torch import Tensor

from rmcore.models.packing import attention
from rmcore.models.packing.layout import AttentionPlan

WAYS = {"fused": 0, "batched": 10**9}
"""Keys up to which sequences are batched."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {"12x32": (12, 12, 32), "4x64": (4, 4, 64), "14x64/2": (14, 2, 64)}
"""Heads, key heads, width of a head: MiniLM's, the 6.5 M model's, Qwen2.5-0.5B's."""


def row_plan(form: str, length: int, tokens: int) -> AttentionPlan:
    """A row of `tokens` tokens or a little more; pairs have a side of about `length` tokens, half of them shared."""
    draw = random.Random(length)  # noqa: S311
    groups: list[tuple[int, ...]] = []
    while sum(map(sum, groups)) < tokens:
        whole = max(4, round(length * draw.uniform(0.75, 1.25)))
        groups.append((0, whole) if form == "encoder" else (whole // 2, whole - whole // 2, whole - whole // 2))
    return AttentionPlan(tuple(groups), causal=form != "encoder")


def results(plan: AttentionPlan, way: str, tensors: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Output and gradients, and the seconds that they took."""
    query, key, value, weight = tensors
    longest = dict.fromkeys((*DTYPES.values(), torch.float64), WAYS[way])
    with patch.object(attention, "LONGEST", longest):
        start = time.perf_counter()
        output, _ = attention.packed_attention(SimpleNamespace(), query, key, value, None, packing=plan)
        gradients = torch.autograd.grad(output, [query, key, value], weight)
        return [output.detach(), *gradients], time.perf_counter() - start


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest relative error of output and gradients."""
    pairs = zip(found, exact, strict=True)
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)


def line(form: str, heads: str, dtype: str, length: int, tokens: int, repeats: int) -> str:
    """Measure one line of the table."""
    plan = row_plan(form, length, tokens)
    number, key_number, width = HEADS[heads]
    row = sum(map(sum, plan.groups))
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(1, row, count, width, generator=generator).to(DTYPES[dtype])

    drawn = [draw(count).transpose(1, 2).requires_grad_() for count in (number, key_number, key_number)]
    tensors = [*drawn, draw(number)]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found = {way: results(plan, way, tensors)[0] for way in WAYS}  # warms up: kernels, masks, batches
    for _ in range(repeats):
        for way in WAYS:
            seconds[way].append(results(plan, way, tensors)[1])
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact, _ = results(replace(plan, made={}), "fused", wide)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    errors = " | ".join(f"{error(one, exact):.1e}" for one in found.values())
    times = " | ".join(f"{1000 * one:.1f}" for one in medians.values())
    ratio = medians["fused"] / medians["batched"]
    return f"| {form} | {heads} | {dtype} | {length} | {times} | {ratio:.2f} | {errors} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--forms", nargs="+", choices=["encoder", "pairs"], default=["encoder", "pairs"])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(machine(given.threads))
    print("| row | heads | dtype | keys | fused, ms | batched, ms | times as fast | error, fused | error, batched |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for form in given.forms:
        for heads in given.heads:
            for dtype in given.dtypes:
                for length in given.lengths:
                    print(line(form, heads, dtype, length, given.tokens, given.repeats), flush=True)


if __name__ == "__main__":
    main()
