"""A trace of a few training steps by torch.profiler: which operations and kernels the time of a step goes to."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

PROFILE_FOLDER = "profile"
WARM_UP, TRACED = 3, 3
"""Steps that allocate and compile, and those that are traced after them; a short training has fewer of both."""
SHOWN = 30
"""Operations in the table."""


@contextmanager
def step_profiler(folder: Path, device: torch.device, num_steps: int) -> Iterator[Callable[[], None]]:
    """Trace steps of a training of `num_steps` into `folder`/profile; the block calls what it gets after each step.

    trace.json.gz opens in Perfetto (https://ui.perfetto.dev), operations.txt has the most expensive operations first.
    A training that ends before the traced steps leaves none. Numbers do not change.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        print(
            "note: this training has no GPU, so neither kernels nor copies between host and GPU nor a GPU's idle time "
            "are profiled; the trace has the operations of the CPU.",
            file=sys.stderr,
        )
    traced = max(1, min(TRACED, num_steps))
    warm_up = max(0, min(WARM_UP, num_steps - traced))

    def write(profiler: profile) -> None:
        out = folder / PROFILE_FOLDER
        out.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(out / "trace.json.gz"))
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        (out / "operations.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=SHOWN))

    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=0, warmup=warm_up, active=traced, repeat=1),
        on_trace_ready=write,
    ) as profiler:
        yield profiler.step
