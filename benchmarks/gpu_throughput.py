"""Pairs a second, memory and model FLOPs utilisation against TRL: cells of benchmarks/train_throughput.py.

One run of each cell, TRL and packed one after the other; repeats are for `train_throughput.py --repeats`.

MFU = (6 W t + 12 L w a) p / peak: W weights of the layers' matrices, t tokens of a pair, L layers, w width of all
heads together, a pairs of a query and a key that it attends to, p pairs a second, peak 989 TFLOP/s (H100 and H200,
dense bf16, NVIDIA's data sheet). MFU, needed: t and a of the packed form, whoever trains; what is aimed at is 30 % at
0.5 B and 40 % at 1.5 B. MFU, computed: t and a of what that side computes, padding included, without recomputation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_work import NotHereError, Work
from throughput_sides import Cell, measure_here, measure_trl, model_config, steps_of
from train_throughput import DEFAULTS, PEAK_TFLOPS, needed_work, padded_work, pairs_for

STEPS, PAIRS_PER_STEP, TRL_BATCH = 7, 64, 8
"""The first step is not timed; 8 pairs a micro-batch are TRL's default."""
HALF, LARGE = "qwen2.5-0.5b", "qwen2.5-1.5b"
Variant = tuple[str, str, str, dict[str, Any]]
"""Model, data, side, and what else differs."""
VARIANTS: tuple[Variant, ...] = (
    *((HALF, "hh-like", side, {}) for side in ("TRL", "packed")),
    *((LARGE, "hh-like", side, {}) for side in ("TRL", "packed")),
    (HALF, "hh-like", "packed", {"compile": True}),
    *((HALF, "fixed", side, {}) for side in ("TRL", "packed")),
    (LARGE, "hh-like", "packed", {"compile": True}),
    *((LARGE, "fixed", side, {}) for side in ("TRL", "packed")),
    (HALF, "hh-like", "TRL", {"trl_batch": 32}),
    (HALF, "hh-like", "padded", {}),
    *((LARGE, "hh-like", side, {"gradient_checkpointing": True}) for side in ("TRL", "packed")),
    *((LARGE, "fixed", side, {"gradient_checkpointing": True}) for side in ("TRL", "packed")),
)
"""In order of worth."""
SMOKE: tuple[Variant, ...] = (
    ("smoke", "hh-like", "TRL", {}),
    ("smoke", "hh-like", "packed", {}),
    ("smoke", "hh-like", "padded", {"gradient_checkpointing": True}),
)
EXPECTED_S = {(HALF, "hh-like"): 15, (LARGE, "hh-like"): 25, (HALF, "fixed"): 25, (LARGE, "fixed"): 45}
COMPILING_S = 60


def run(work: Work) -> None:
    """One unit a variant."""
    variants = SMOKE if work.smoke else VARIANTS
    rates = {unit: record["pairs_per_s"] for unit, record in work.done.items() if "pairs_per_s" in record}
    work.units(
        (name_of(variant), expected(variant), partial(measured, variant, rates, work.smoke)) for variant in variants
    )


def name_of(variant: Variant) -> str:
    """As it is called in the records."""
    model, data, side, changes = variant
    return ", ".join([model, data, side, *(f"{key}={value}" for key, value in changes.items())])


def expected(variant: Variant) -> float:
    """Seconds that it is thought to take."""
    model, data, side, changes = variant
    seconds = EXPECTED_S.get((model, data), 10)
    return seconds * (1.5 if side == "TRL" else 1) + (COMPILING_S if changes.get("compile") else 0)


def cell_of(variant: Variant, *, smoke: bool) -> Cell:
    """The cell of a variant."""
    model, data, side, changes = variant
    cell = Cell(
        data=data,
        model=model,
        side=side,
        repeat=0,
        steps=2 if smoke else STEPS,
        max_seq_len=100 if smoke else DEFAULTS[data][1],
        trl_batch=2 if smoke else TRL_BATCH,
        precision="bf16",
        gradient_checkpointing=False,
        threads=torch.get_num_threads(),
        pairs_per_step=4 if smoke else PAIRS_PER_STEP,
    )
    return replace(cell, **changes)


def measured(variant: Variant, rates: dict[str, float], smoke: bool) -> dict[str, Any]:
    """One cell; TRL in smaller micro-batches where its own do not fit."""
    cell = cell_of(variant, smoke=smoke)
    pairs = pairs_for(cell)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    while True:
        measure: Callable[..., dict[str, Any]] = measure_trl if cell.side == "TRL" else measure_here
        try:
            seen = measure(cell, pairs, device)
            break
        except ModuleNotFoundError as error:
            raise NotHereError(f"no {error.name}") from error
        except torch.OutOfMemoryError:
            if cell.side != "TRL" or cell.trl_batch == 1:
                raise
            cell = replace(cell, trl_batch=cell.trl_batch // 2)
    timed = [pair for step in steps_of(pairs, cell)[1:] for pair in step]
    config = model_config(cell.model)
    needed, padded = needed_work(timed, causal=True), padded_work(timed, cell.trl_batch, causal=True)
    computed = padded if cell.side == "TRL" else needed
    rate = seen["pairs_per_second"]
    rates[name_of(variant)] = rate
    base = rates.get(name_of((cell.model, cell.data, "TRL", {})))
    found: dict[str, Any] = {
        "pairs_per_s": rate,
        "times_trl": rate / base if base else "",
        "tokens_a_pair": seen["tokens_per_pair"],
        "peak_gib": seen["peak_bytes"] / 2**30,
        "first_loss": seen["first_loss"],
        "gflop_needed": needed.flops(config) / len(timed) / 1e9,
    }
    for name, form in (("mfu_needed_percent", needed), ("mfu_computed_percent", computed)):
        if device.type == "cuda" and (cell.side != "padded" or form is needed):
            found[name] = 100 * form.flops(config) / len(timed) * rate / (PEAK_TFLOPS * 1e12)
    if cell.side == "TRL":
        found["trl_batch"] = cell.trl_batch
    else:
        found["packing"] = seen["packing"] or "padded"
    return found
