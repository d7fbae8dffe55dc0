"""Settings that the machine decides: a training's settings where nothing else was said."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any, Literal

_HOPPER: dict[str, Any] = {"precision": "bf16", "compile": True, "num_workers": 8}
"""bf16 matrix units, compiled graphs, and processes that pad ahead. Token budget and
recomputation follow the memory of the device, the pairs of a step the size of the model (`hopper_pairs`)."""

HARDWARE: dict[str, dict[str, Any]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    # Whatever the CPU is good at; micro-batches that stay in cache.
    "cpu": {"precision": "auto", "token_budget": 4096, "num_workers": 0, "pairs_per_step": 16},
    # To see that everything is wired: no number of it means anything.
    "smoke": {"steps": 6, "eval_every": 3, "log_every": 2, "warmup_steps": 0, "lr": 1e-3, "token_budget": 8192},
}

BY_MODEL_SIZE = ("h100", "h200")
"""Presets with which the pairs of a step follow the size of the model."""
HOPPER_PAIRS = ((1_000_000_000, 128), (3_000_000_000, 64), (10_000_000_000, 32))
"""Pairs of a step by the most parameters of a model that get so many by default on h100 and h200 (DeBERTa-large, 1.5 B,
7 B); larger ones (13 B) get `LEAST_PAIRS`. What an update costs is shared by its pairs: at 1.5 B and 32 pairs of HH's
lengths AdamW would take a seventh of a step (benchmarks/results/gpu.md)."""
LEAST_PAIRS = 16


def hopper_pairs(num_parameters: int) -> int:
    """Pairs of a step on one H100 or H200 where nothing else was said.

    >>> [hopper_pairs(number) for number in (435_000_000, 1_540_000_000, 7_000_000_000, 13_000_000_000)]
    [128, 64, 32, 16]
    """
    return next((pairs for most, pairs in HOPPER_PAIRS if num_parameters <= most), LEAST_PAIRS)


CPU_INFO = Path("/proc/cpuinfo")
BF16_UNITS = {"GenuineIntel": "amx_bf16", "AuthenticAMD": "avx512_bf16"}
"""The flag, by vendor, of CPUs on which bf16 was measured to be faster than float32: the machines are in
benchmarks/results/precision.md."""


def cpu_multiplies_bf16(cpu_info: Path = CPU_INFO) -> bool:
    """Whether bf16 is faster on this CPU, by its vendor and flags; where they cannot be read, it is not."""
    if not cpu_info.is_file():
        return False
    told: dict[str, str] = {}  # of the first core
    for name, _, value in (line.partition(":") for line in cpu_info.read_text().splitlines()):
        told.setdefault(name.strip(), value.strip())
    return BF16_UNITS.get(told.get("vendor_id", "")) in told.get("flags", "").split()


def choose_precision(device_type: str, *, tiny: bool) -> Literal["fp32", "bf16"]:
    """Choose what `train.precision=auto` stands for on a kind of device.

    The rule reads flags and times nothing: what a key depends on must be the same each time, and on a busy machine two
    timed steps are not. A tiny model computes in float32 everywhere: it is there to see that something works, and its
    numbers should not depend on the machine more than they must.
    """
    if tiny:
        return "fp32"
    return "bf16" if device_type == "cuda" or cpu_multiplies_bf16() else "fp32"


def device_type(name: str) -> str:
    """Return cpu or cuda, without a GPU's number and without importing torch.

    `auto` is cuda if torch is a CUDA build and an NVIDIA GPU is visible.
    """
    if name != "auto":
        return name.partition(":")[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = Path("/proc/driver/nvidia/gpus")
    has_gpu = driver.is_dir() and any(driver.iterdir())
    return "cuda" if has_gpu and not hidden and "+cpu" not in importlib.metadata.version("torch") else "cpu"
