"""Choices that the machine makes where nothing else was said: a training's settings, and the curvature's time."""

from pathlib import Path
from typing import Any, Literal

_HOPPER: dict[str, Any] = {"precision": "bf16", "tf32": True, "compile": True, "num_workers": 8}
"""bf16 matrix units, TF32 for what stays float32, compiled graphs, and processes that pad ahead."""

HARDWARE: dict[str, dict[str, Any]] = {
    # 80 GB: activations of billions of parameters do not fit beside float32 moments.
    "h100": {**_HOPPER, "gradient_checkpointing": True, "pairs_per_step": 32},
    # 141 GB: the same without recomputing activations, about a third faster.
    "h200": {**_HOPPER, "gradient_checkpointing": False, "pairs_per_step": 32},
    # Whatever the CPU is good at; micro-batches that stay in cache.
    "cpu": {"precision": "auto", "token_budget": 4096, "num_workers": 0, "pairs_per_step": 16},
    # To see that everything is wired: no number of it means anything.
    "smoke": {"steps": 6, "eval_every": 3, "log_every": 2, "warmup_steps": 0, "lr": 1e-3, "token_budget": 8192},
}

CPU_INFO = Path("/proc/cpuinfo")
BF16_UNITS = {"avx512_bf16", "amx_bf16"}
"""Flags of CPUs that multiply bfloat16 numbers themselves. On those without, bf16 is slower than float32 (tables in
benchmarks/RESULTS.md); what ARM has was not measured."""
CPU_MINUTES = 1.0
"""Minutes of the curvature on a CPU. Here and not among the settings, whose code is no part of a stage's key."""


def curvature_minutes(device_type: str, minutes: float | None) -> float | None:
    """The limit that holds: `landscape.minutes`, where that is null a minute on a CPU and none elsewhere.

    >>> curvature_minutes("cpu", None), curvature_minutes("cuda", None), curvature_minutes("cpu", 5.0)
    (1.0, None, 5.0)
    """
    return CPU_MINUTES if minutes is None and device_type == "cpu" else minutes


def cpu_multiplies_bf16(cpu_info: Path = CPU_INFO) -> bool:
    """Whether the CPU has units for bfloat16, by its flags; where they cannot be read, it counts as one without."""
    if not cpu_info.is_file():
        return False
    lines = cpu_info.read_text().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BF16_UNITS.isdisjoint(flags)


def choose_precision(device_type: str, *, tiny: bool) -> Literal["fp32", "bf16"]:
    """Choose what `train.precision=auto` stands for on a kind of device.

    The rule reads flags and times nothing: what a key depends on must be the same each time, and on a busy machine two
    timed steps are not. A tiny model computes in float32 everywhere: it is there to see that something works, and its
    numbers should not depend on the machine more than they must.
    """
    if tiny:
        return "fp32"
    return "bf16" if device_type == "cuda" or cpu_multiplies_bf16() else "fp32"
