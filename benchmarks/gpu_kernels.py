"""The machine itself: versions, what the attention kernel takes, and what matrix products and copies reach.

Shares of a peak are of the data sheet's rate; the ceilings here say what of it this very card gives at the shapes of a
training step: the seven matrices of a Qwen2 layer over one micro-batch, forward and both products of the backward pass.
"""

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from gpu_plan import NotHereError, Work
from gpu_training import SHAPES
from torch import Tensor

from rmcore.models.packing.attention import kernel_groups_heads

PACKAGES = ("torch", "transformers", "peft", "trl", "triton", "liger-kernel", "torchao", "vllm", "pydantic")
TOKENS = 16384
"""Of one micro-batch."""
COPIED_BYTES = 2 * 2**30
REPEATS = 10


def machine(work: Work) -> None:
    """Versions, and whether the varlen kernel takes fewer key heads than query heads."""
    work.measure("versions", versions)
    for name, (_, width, _, _, heads, key_heads) in SHAPES.items():
        if work.smoke or name != "smoke":
            work.measure(f"key heads, {name}", lambda given=(heads, key_heads, width // heads): grouped(*given))


def versions() -> dict[str, Any]:
    """What is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    about = {"memory_gib": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda} if gpu else {}
    return about | {"python": platform.python_version(), "cores": os.cpu_count()} | found


def grouped(heads: int, key_heads: int, width: int) -> dict[str, Any]:
    """Whether the kernel computes outputs and gradients with the model's own key heads."""
    require_cuda()
    return {"taken": kernel_groups_heads(heads, key_heads, width, torch.device("cuda"))}


def ceilings(work: Work) -> None:
    """TFLOP/s of a layer's matrix products by model, in bf16 and fp8, and TB/s of a copy."""
    for name, (_, width, inner, _, heads, key_heads) in SHAPES.items():
        if work.smoke == (name == "smoke"):
            keys = width // heads * key_heads
            matrices = {"qo": (width, width), "kv": (width, keys), "gate, up": (width, inner), "down": (inner, width)}
            for dtype in ("bf16", "fp8"):
                work.measure(f"{name}, {dtype}", lambda given=(matrices, dtype, work.smoke): products(*given))
    work.measure("copy", copy)


def products(matrices: dict[str, tuple[int, int]], dtype: str, smoke: bool) -> dict[str, Any]:
    """Rate of each matrix's three products, and of the whole layer, whose q and o, k and v, gate and up are alike."""
    tokens = 64 if smoke else TOKENS
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    product = product_fp8 if dtype == "fp8" else torch.matmul
    if dtype == "fp8":
        require_cuda()
    seconds, flops, found = 0.0, 0.0, {}
    for name, (k, n) in matrices.items():
        own = sum(
            median_seconds(lambda shape=shape: _call(product, shape, dtype, device))
            for shape in ((tokens, k, n), (tokens, n, k), (k, tokens, n))
        )
        count = 1 if name == "down" else 2
        found[f"{name}, TFLOP/s"] = 6 * tokens * k * n / own / 1e12
        seconds, flops = seconds + count * own, flops + count * 6 * tokens * k * n
    return {"layer, TFLOP/s": flops / seconds / 1e12} | found


_operands: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


def _call(product: Callable[..., Tensor], shape: tuple[int, int, int], dtype: str, device: torch.device) -> Tensor:
    """One product (m, k) x (k, n) on operands that are made once."""
    m, k, n = shape
    if (key := (*shape, dtype)) not in _operands:
        _operands.clear()
        a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
        fp8 = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)) if dtype == "fp8" else (a, b)
        _operands[key] = fp8[0], fp8[1].t()
    return product(*_operands[key])


def product_fp8(a: Tensor, b: Tensor) -> Tensor:
    """A product of float8 operands with one scale each, summed as training does (no fast accumulation)."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def copy() -> dict[str, Any]:
    """TB/s of a copy on the device, bytes read and written."""
    require_cuda()
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return {"tb_per_s": 2 * COPIED_BYTES / median_seconds(lambda: target.copy_(source)) / 1e12}


def require_cuda() -> None:
    """Refuse what a CPU cannot show."""
    if not torch.cuda.is_available():
        raise NotHereError("no CUDA")


def median_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call by the device's own clock: the median of several; on a CPU of one, by nothing but its end."""
    if not torch.cuda.is_available():
        import time

        call()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
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
