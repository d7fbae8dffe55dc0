"""Training steps by the device's own clock: pairs a second, memory, model FLOPs utilisation, seconds to the first step.

MFU = (6 W t + 12 L w a) p / peak: W weights of the layers' matrices, t tokens of a pair, L layers, w width of all heads
together, a pairs of a query and a key that it attends to, p pairs a second, peak 989 TFLOP/s (H100 and H200, dense
bf16, NVIDIA's data sheet). t and a are of the packed form, whoever trains, and recomputation is not counted. Aimed at
are 35 % at 0.5 B, 47 % at 1.5 B and 50 % at the width of 8 B. Lengths are those of HH-RLHF, as train_throughput.py
draws them; a step's time is from CUDA events between steps, and the first step, which compiles, is timed alone.
Token budgets are fixed: choosing them, for which the memory of a step is counted, would be timed 17 times.

On a CPU graphs are run as they are, which shows that they are made.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from gpu_plan import NotHereError, Work
from throughput_sides import QWEN_SHAPES, Cell, make_rm, measure_trl, model_config, steps_of, train_here
from train_throughput import DEFAULTS, PEAK_TFLOPS, needed_work, pairs_for
from transformers.models.qwen2 import modeling_qwen2

from rmcore.models.compiling import CompiledLayers
from rmcore.models.packing import forward
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training import train_mode

HALF, LARGE, WIDE = "qwen2.5-0.5b", "qwen2.5-1.5b", "8b-width"
SHAPES = {name: QWEN_SHAPES[name] for name in (HALF, LARGE, WIDE, "smoke")}
STEPS, PAIRS_PER_STEP, TRL_BATCH = 10, 64, 32
CACHE_FILE = "compile_cache.bin"
LARGE_CARD = 100 * 2**30
"""Bytes: more than an H100 has, less than an H200."""
BUDGETS = {HALF: (32768, 32768), LARGE: (12288, 32768), WIDE: (16384, 32768), "smoke": (1024, 1024)}
"""Tokens of a micro-batch on a card of less memory than LARGE_CARD, and of more."""

LADDER: dict[str, dict[str, Any]] = {
    "autocast, keys and values repeated": {"half": False, "repeated": True},
    "autocast": {"half": False},
    "bf16 copies of the weights": {"half": True},
    "Liger's kernels": {"half": True, "liger": True},
    "compiled": {"half": True, "compile": True},
    "compiled, autocast": {"half": False, "compile": True},
}
"""What a training changes of the defaults: settings of `TrainConfig`, and what `trained` does by itself. `half` is
whether it computes with bf16 copies of the weights, `repeated` repeats key heads for the kernel, `liger` and `fp8`
exchange layers."""


def cell_of(size: str, *, smoke: bool, pairs_per_step: int = PAIRS_PER_STEP, steps: int = STEPS) -> Cell:
    """Pairs with HH's lengths for a model of one of SHAPES, the smoke shape in place of each where that is asked."""
    return Cell(
        data="hh-like",
        model="smoke" if smoke else size,
        side="packed",
        repeat=0,
        steps=4 if smoke else steps,
        max_seq_len=100 if smoke else DEFAULTS["hh-like"][1],
        trl_batch=2 if smoke else TRL_BATCH,
        precision="bf16",
        gradient_checkpointing=False,
        threads=torch.get_num_threads(),
        pairs_per_step=4 if smoke else pairs_per_step,
        token_budget=budget_of("smoke" if smoke else size),
    )


def budget_of(size: str) -> int:
    """Tokens of a micro-batch on this machine."""
    found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return BUDGETS[size][found > LARGE_CARD]


def device() -> torch.device:
    """The GPU, or a CPU for the smoke run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def built(work: Work, cell: Cell) -> BradleyTerryRM:
    """The model of a cell, drawn once a worker; how its rows are packed is decided each time."""
    if cell.model not in work.built:
        work.built.clear()  # the sizes come one after the other, and a card need not hold two
        work.built[cell.model] = make_rm(cell, device())
    rm: BradleyTerryRM = work.built[cell.model]
    return BradleyTerryRM.of(rm.model, rm.tokenizer, rm.renderer.rendering)


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Compile inside the block, on a CPU by the backend that runs graphs as they are; gives why it was given up."""
    reasons: list[str] = []
    give_up = CompiledLayers.give_up

    def noted(self: CompiledLayers, error: Exception) -> None:
        reasons.append(f"{type(error).__name__}: {error}"[:300])
        give_up(self, error)

    with ExitStack() as stack:
        stack.enter_context(patch.object(CompiledLayers, "give_up", noted))
        if not torch.cuda.is_available():
            stack.enter_context(patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")))
        yield reasons


def trained(
    work: Work, cell: Cell, *, after_step: Callable[[int], None] = lambda step: None, **changes: Any
) -> dict[str, Any]:
    """Train some steps as a user would, and tell what each took.

    Raises:
        NotHereError: what is changed cannot be had on this machine.
        RuntimeError: what was to be compiled was not.
    """
    own = {name: changes.pop(name) for name in ("half", "liger", "repeated", "fp8") if name in changes}
    config = cell.settings.model_copy(update=changes)
    rm = built(work, cell)
    with ExitStack() as stack:
        given_up = stack.enter_context(compiling())
        if own.keys() & {"liger", "fp8"}:
            stack.callback(work.built.clear)  # exchanged layers stay
        if (half := own.pop("half", None)) is not None:
            stack.enter_context(patch.dict(train_mode.HALF_BY_DEFAULT, {"cuda": half, "cpu": half}))
        if own.pop("repeated", False):
            stack.enter_context(patch.object(forward, "_shares_key_heads", lambda *_: False))
        if own and not torch.cuda.is_available():
            raise NotHereError("no CUDA")
        if "liger" in own:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2

            for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP"):  # which it exchanges for all models
                stack.enter_context(patch.object(modeling_qwen2, name, getattr(modeling_qwen2, name)))
            apply_liger_kernel_to_qwen2(model=rm.model, cross_entropy=False, fused_linear_cross_entropy=False)
        if "fp8" in own:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            # A product in float8 needs sizes that are multiples of 16, and a row has any number of tokens.
            padded = Float8LinearConfig(pad_inner_dim=True)
            convert_to_float8_training(rm.model.model, config=padded, module_filter_fn=lambda _, name: "layers" in name)
        found = _timed(rm, cell, config, after_step)
    if given_up:
        raise RuntimeError(f"not compiled, so these are the numbers of plain layers: {given_up[0]}; {found}")
    return found


def _timed(rm: BradleyTerryRM, cell: Cell, config: Any, after_step: Callable[[int], None]) -> dict[str, Any]:
    pairs, marks, on_gpu = pairs_for(cell), list[Any](), rm.device.type == "cuda"
    started = first_step = 0.0

    def begin(_: object) -> None:
        nonlocal started
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()

    def progress(step: int) -> None:
        nonlocal first_step
        if step == 1:
            if on_gpu:
                torch.cuda.synchronize()
            first_step = time.perf_counter() - started
        if on_gpu:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        after_step(step)

    trainer, tracker = train_here(rm, config, pairs, begin=begin, after_step=progress)
    if on_gpu:
        torch.cuda.synchronize()
    steps = [a.elapsed_time(b) / 1000 if on_gpu else b - a for a, b in pairwise(marks)]
    timed = [pair for step in steps_of(pairs, cell)[1:] for pair in step]
    rate = cell.pairs_per_step / median(steps)
    flops = needed_work(timed, causal=True).flops(model_config(cell.model)) / len(timed)
    found = {
        "pairs_per_s": rate,
        "mfu_percent": 100 * flops * rate / (PEAK_TFLOPS * 1e12),
        "first_step_s": first_step,
        "step_ms": [round(1000 * one, 2) for one in steps],
        "tokens_a_pair": trainer.progress.totals.num_tokens / max(1, trainer.progress.totals.num_pairs),
        "token_budget": trainer.progress.token_budget,
        "loss": tracker.rows[0][1]["train/loss"],
        "form": trainer.packing.kernel if trainer.packing else "padded",
    }
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def ladder(work: Work) -> None:
    """0.5 B without compiling: one change after the other."""
    for name in [one for one, changes in LADDER.items() if "compile" not in changes]:
        work.measure(name, lambda name=name: trained(work, cell_of(HALF, smoke=work.smoke), **LADDER[name]))


def compile(work: Work) -> None:
    """0.5 B compiled layer by layer: seconds to the first step, graphs, and both again from the saved cache."""
    file = work.records.file.parent / CACHE_FILE

    def compiled() -> dict[str, Any]:
        is_carried = file.is_file()
        if is_carried:  # by --resume
            torch.compiler.load_cache_artifacts(file.read_bytes())
        found = trained(work, cell_of(HALF, smoke=work.smoke), **LADDER["compiled"])
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            file.write_bytes(saved[0])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return found | {"graphs": graphs, "warm": is_carried, "cache_mib": len(saved[0]) / 2**20 if saved else 0.0}

    def from_cache() -> dict[str, Any]:
        if not file.is_file():
            raise NotHereError("nothing was compiled")
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": empty}
            how = "import gpu_training; gpu_training.print_from_cache()"
            command = [sys.executable, "-c", how, str(file), "smoke" if work.smoke else ""]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    work.measure("compiled", compiled)
    work.measure("compiled, from the saved cache", from_cache)
    again = LADDER["compiled, autocast"]
    work.measure("compiled, autocast", lambda: trained(work, cell_of(HALF, smoke=work.smoke), **again))


def print_from_cache() -> None:
    """Compile in a process and with folders of its own, from a saved cache alone: what a second training waits for."""
    torch.compiler.load_cache_artifacts(Path(sys.argv[1]).read_bytes())
    smoke = sys.argv[2] == "smoke"
    work = Work(smoke=smoke, records=None)  # type: ignore[arg-type] - nothing is recorded here
    print(json.dumps(trained(work, cell_of(HALF, smoke=smoke, steps=4), **LADDER["compiled"])))


def winner(work: Work) -> dict[str, Any]:
    """What the fastest of the measured trainings of 0.5 B changed."""
    done = {unit: one for (part, unit), one in work.records.latest().items() if part in ("ladder", "compile")}
    rates = {unit: one["pairs_per_s"] for unit, one in done.items() if unit in LADDER and "pairs_per_s" in one}
    return LADDER[max(rates, key=lambda unit: rates[unit])] if rates else {}


def large(work: Work) -> None:
    """1.5 B with the fastest form, at 64 and 256 pairs a step."""
    for pairs in (64, 256):
        cell = cell_of(LARGE, smoke=work.smoke, pairs_per_step=pairs)
        work.measure(f"{pairs} pairs", lambda cell=cell: trained(work, cell, **winner(work)))


WIDE_FORMS: dict[str, dict[str, Any]] = {
    "kept": {},
    "8-bit moments, split weights": {"optimizer": "adamw8bit"},
    "recomputed": {"gradient_checkpointing": True},
}


def wide(work: Work) -> None:
    """Four layers of the width of 8 B: activations kept, 8 bytes a weight, activations recomputed."""
    for name, changes in WIDE_FORMS.items():
        work.measure(name, lambda changes=changes: _wide(work, changes))


def fp8(work: Work) -> None:
    """The same with products in fp8."""
    work.measure("kept, fp8", lambda: _wide(work, {"fp8": True}))


def _wide(work: Work, changes: dict[str, Any]) -> dict[str, Any]:
    return trained(work, cell_of(WIDE, smoke=work.smoke), **winner(work) | changes)


def trl(work: Work) -> None:
    """TRL's RewardTrainer with 32 pairs a micro-batch, fewer where they do not fit, on the same weights and pairs."""
    for size in ("smoke",) if work.smoke else (HALF, LARGE):
        work.measure(
            size, lambda size=size: _by_trl(work, replace(cell_of(size, smoke=work.smoke, steps=5), side="TRL"))
        )


def _by_trl(work: Work, cell: Cell) -> dict[str, Any]:
    work.built.clear()
    while True:
        try:
            seen = measure_trl(cell, pairs_for(cell), device())
        except torch.OutOfMemoryError:
            if cell.trl_batch == 1:
                raise
            cell = replace(cell, trl_batch=cell.trl_batch // 2)
        else:
            return {
                "pairs_per_s": seen["pairs_per_second"],
                "tokens_a_pair": seen["tokens_per_pair"],
                "trl_batch": cell.trl_batch,
                "peak_gib": seen["peak_bytes"] / 2**30,
            }
