"""Choices that the machine makes where nothing else was said: a training's settings, and the curvature's time."""

from typing import Any

_HOPPER: dict[str, Any] = {"precision": "bf16", "tf32": True, "compile": True, "num_workers": 8}
"""bf16 matrix units, TF32 for what stays float32, compiled graphs, and processes that pad ahead."""

HARDWARE: dict[str, dict[str, Any]] = {
    # 80 GB: activations of billions of parameters do not fit beside float32 moments.
    "h100": {**_HOPPER, "gradient_checkpointing": True, "pairs_per_step": 32},
    # 141 GB: the same without recomputing activations, about a third faster.
    "h200": {**_HOPPER, "gradient_checkpointing": False, "pairs_per_step": 32},
    # float32, because few CPUs have bf16 units and without them it is slower; micro-batches that stay in cache.
    "cpu": {"precision": "fp32", "token_budget": 4096, "num_workers": 0, "pairs_per_step": 16},
    # To see that everything is wired: no number of it means anything.
    "smoke": {"steps": 6, "eval_every": 3, "log_every": 2, "warmup_steps": 0, "lr": 1e-3, "token_budget": 8192},
}

CPU_MINUTES = 1.0
"""Minutes of the curvature on a CPU. Here and not among the settings, whose code is no part of a stage's key."""


def curvature_minutes(device_type: str, minutes: float | None) -> float | None:
    """The limit that holds: `landscape.minutes`, where that is null a minute on a CPU and none elsewhere.

    >>> curvature_minutes("cpu", None), curvature_minutes("cuda", None), curvature_minutes("cpu", 5.0)
    (1.0, None, 5.0)
    """
    return CPU_MINUTES if minutes is None and device_type == "cpu" else minutes
