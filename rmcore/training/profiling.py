"""The cost of a training's steps: memory, now and at its peak, and a trace of their operations."""

import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rmcore.training.record import Progress
from rmcore.training.step import StepContext

MEASURED_STEP = 2
"""On a CPU: the first step that has an optimizer state from its beginning."""
PROFILE_FOLDER = "profile"
WARM_UP, TRACED = 3, 3
"""Steps that allocate and compile, and those that are traced after them; a short training has fewer of both."""
SHOWN = 30
"""Operations in the table."""


class PeakMeter:
    """Measures one training and notes the peak in its progress, from where it is saved, so a kill does not lose it.

    In bytes of tensors, so that recipes can be compared: resident memory says more about allocator and libraries.
    On a GPU the device's own count is read: most bytes allocated since the meter was made, less those of then (the
    weights); evaluations and callbacks are in it. On a CPU one step is measured, by `TensorPeak`, which makes that step
    slower and changes no number. Several processes on a CPU, and compiled code there, are not measured: torch does not
    dispatch what they do.
    """

    def __init__(self, context: StepContext, at: Progress, num_steps: int) -> None:
        """Begin, with the weights in their place and nothing else."""
        self._context, self._at = context, at
        self._on_gpu = context.device.type == "cuda"
        dispatched = context.ranks.world == 1 and context.compiled is None
        self._measured_step = min(MEASURED_STEP, num_steps) if dispatched and not self._on_gpu else None
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(context.device)  # which may be that of loading
            self._weights = torch.cuda.memory_allocated(context.device)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run step `step` (counted from 1) inside the block."""
        if step != self._measured_step:
            yield
            return
        state_bytes = self._context.optimizer.state_bytes
        with TensorPeak() as peak:
            yield
        self._at.peak_training_bytes = state_bytes + peak.num_bytes

    def note(self) -> None:
        """Note what a GPU counted so far; an earlier attempt may have seen more."""
        if self._on_gpu:
            seen = torch.cuda.max_memory_allocated(self._context.device) - self._weights
            self._at.peak_training_bytes = max(seen, self._at.peak_training_bytes or 0)


class TensorPeak(TorchDispatchMode):
    """The most bytes of tensors that a block of code had alive at once, of those that it made: `num_bytes` after it.

    It watches every operation that torch dispatches, so the block runs slower, and computes the same.

    Counted are storages, each once, whatever views it has, from the operation that returns them first until they are
    freed. Storages that are older than the block (weights, optimizer state, inputs) are not counted, even where an
    operation changes them in place. Not seen: what a kernel allocates and frees inside, and what does not run in this
    thread.

    Source: the method of torch.distributed._tools.mem_tracker, which also sorts the bytes by kind and module.

    Example:
        >>> with TensorPeak() as peak:
        ...     a = torch.zeros(1000)
        ...     b = a.view(10, 100).add_(1)
        ...     del a, b
        ...     c = torch.zeros(500)
        >>> peak.num_bytes
        4000
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Most bytes alive at once so far."""
        self._alive: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._now = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch compiles inside the block as it does outside; it else skips compiling under a mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count the storages that it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # What torch.tensor and from_numpy make is handed to this one operation before any other.
        older = set() if func is torch.ops.aten.lift_fresh.default else set(_storages((args, kwargs)))
        for storage in _storages(result):
            if storage not in older:
                self._count(storage)
        self.num_bytes = max(self.num_bytes, self._now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._freed)
        if reference not in self._alive:
            self._alive[reference] = storage.nbytes()
            self._now += storage.nbytes()

    def _freed(self, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        self._now -= self._alive.pop(reference)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in nested lists, tuples and dictionaries."""
    return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _host_peak_bytes()


def _host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Memory now and at its peak, in MiB: of this process on the host, and allocated and reserved on a GPU."""
    host = psutil.Process().memory_info().rss
    values = {"cost/host_mib": host, "cost/host_peak_mib": _host_peak_bytes()}
    if device.type == "cuda":
        values |= {
            "cost/device_mib": torch.cuda.memory_allocated(device),
            "cost/device_peak_mib": torch.cuda.max_memory_allocated(device),
            "cost/device_reserved_mib": torch.cuda.memory_reserved(device),
        }
    return {name: num_bytes / 2**20 for name, num_bytes in values.items()}


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
