"""The machine: versions, and what the GPU reaches at most in a matrix product and in a copy.

The other parts' shares are of the data sheet's rate; these two say what of it this very GPU gives.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from gpu_work import NotHereError, Work

PACKAGES = ("torch", "transformers", "peft", "trl", "triton", "flash-attn", "liger-kernel", "vllm", "pydantic")
SIDE = 8192
COPIED_BYTES = 2 * 2**30
REPEATS = 10


def run(work: Work) -> None:
    """Versions, then the two ceilings."""
    work.units([("versions", 1, versions), ("matrix product", 5, matrix_product), ("copy", 5, copy)])


def versions() -> dict[str, Any]:
    """What is installed."""
    found = {name: _version(name) for name in PACKAGES}
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    about = {"memory_gib": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda} if gpu else {}
    python = {"python": platform.python_version(), "cores": os.cpu_count()}
    return about | python | {name: value for name, value in found.items() if value}


def _version(name: str) -> str | None:
    try:
        return version(name) if find_spec(name.replace("-", "_")) else None
    except PackageNotFoundError:
        return None


def matrix_product() -> dict[str, Any]:
    """TFLOP/s of a bf16 product on random numbers: median of several, by the device's own clock."""
    _refuse_without_cuda()
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"tflops": 2 * SIDE**3 / _median_seconds(lambda: a @ b) / 1e12}


def copy() -> dict[str, Any]:
    """TB/s of a copy on the device, bytes read and written."""
    _refuse_without_cuda()
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return {"tb_per_s": 2 * COPIED_BYTES / _median_seconds(lambda: target.copy_(source)) / 1e12}


def _refuse_without_cuda() -> None:
    if not torch.cuda.is_available():
        raise NotHereError("no CUDA")


def _median_seconds(call: Any) -> float:
    for _ in range(3):
        call()
    seconds = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return sorted(seconds)[len(seconds) // 2]
