"""Where three training steps go: kernels by time, host waits, and the three largest losses against the ideal step.

The ideal step is its matrix products and attention at the data sheet's rate (989 TFLOP/s). Every other microsecond of a
step is a loss and has a name: matrix products and attention above that ideal, each other class of kernels, and the GPU
standing idle (more than without a profiler, which slows the host). trace.json.gz opens in Perfetto. On a CPU classes
are those of torch's operations and there is no idling.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_plan import Work
from gpu_training import HALF, LADDER, cell_of, trained
from throughput_sides import model_config, steps_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as profiler_of
from train_throughput import PEAK_TFLOPS, needed_work, pairs_for

WARM_UP, PROFILED = 3, 3
LARGEST_TRACE = 15 * 2**20
"""Bytes."""
CLASSES = (
    ("element-wise", r"^triton_poi"),  # their names say what was fused, copies among it
    ("norms and other reductions", r"^triton_(red|per)"),
    ("attention", r"flash|fmha|attention|varlen|mha_"),
    ("matrix products", r"gemm|cutlass|nvjet|xmma|cublas|splitk|::mm$|::addmm$|::bmm$|::linear$|::matmul$"),
    ("optimizer and clipping", r"multi_tensor|fused_adam|_foreach|lpnorm|clip"),
    ("copies and fills", r"memcpy|memset|copy_|::to$|_to_copy|fill_|zero_|cat"),
    ("indexing and embedding", r"index|gather|scatter|embedding"),
    ("norms and other reductions", r"reduce|softmax|norm|sum|mean"),
    ("element-wise", r"elementwise|vectorized|triton|::mul|::add|::silu|::pow|::neg|::sigmoid|rsqrt|::div|::sub"),
)
"""The first whose pattern is found in a kernel's name has it."""
WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|aten::(item|nonzero)$")
IDEAL = ("matrix products", "attention")


def profile(work: Work) -> None:
    """0.5 B in its compiled form, with the trace, and in its eager one."""
    for form in ("compiled", "bf16 copies of the weights"):
        work.measure(form, lambda form=form: profiled(work, form))


def profiled(work: Work, form: str) -> dict[str, Any]:
    """Train some steps as a user would, and look at three of them."""
    cell = cell_of(HALF, smoke=work.smoke, steps=WARM_UP + PROFILED + 1)
    cell = replace(cell, steps=WARM_UP + PROFILED + 1)
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    profiler = profiler_of(
        activities=activities, schedule=schedule(wait=1, warmup=WARM_UP - 1, active=PROFILED, repeat=1)
    )

    def after_step(step: int) -> None:
        if on_gpu and step in (WARM_UP, WARM_UP + PROFILED):  # whole steps: both ends with an idle GPU
            torch.cuda.synchronize()
        profiler.step()

    profiler.start()
    seen = trained(work, cell, after_step=after_step, **LADDER[form])
    profiler.stop()
    pairs = [pair for step in steps_of(pairs_for(cell), cell)[WARM_UP:-1] for pair in step]
    ideal_us = needed_work(pairs, causal=True).flops(model_config(cell.model)) / (PEAK_TFLOPS * 1e6)
    found = summary(list(profiler.events()), ideal_us, on_gpu=on_gpu)
    return (
        found
        | {"token_budget": seen["token_budget"]}
        | ({"trace": save_trace(profiler, work.records.file.parent)} if form == "compiled" else {})
    )


def save_trace(profiler: profiler_of, out: Path) -> str:
    """Write the trace unless it is too large to be brought back."""
    file = out / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    size = file.stat().st_size
    if size > LARGEST_TRACE:
        file.unlink()
        return f"left out: {size / 2**20:.0f} MiB"
    return f"{file.name}, {size / 2**20:.1f} MiB"


def summary(events: list[Any], ideal_us: float, *, on_gpu: bool) -> dict[str, Any]:
    """Numbers of a step, and lines that name kernels, waits and losses."""
    kernels = [one for one in events if (one.device_type == DeviceType.CUDA) == on_gpu and _is_work(one)]
    microseconds: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for one in kernels:
        taken = one.time_range.elapsed_us() if on_gpu else one.self_cpu_time_total
        microseconds[class_of(one.name)] += taken
        by_name[one.name] += taken
        counts[one.name] += 1
    busy, span = _busy_and_span((one.time_range.start, one.time_range.end) for one in kernels)
    waits = Counter(one.name for one in events if one.device_type == DeviceType.CPU and WAITS.search(one.name))
    waited = sum(one.self_cpu_time_total for one in events if one.name in waits)
    losses = {name: taken for name, taken in microseconds.items() if name not in IDEAL}
    if on_gpu:
        losses["the GPU standing idle"] = span - busy
        losses["matrix products and attention above the ideal"] = sum(microseconds[one] for one in IDEAL) - ideal_us
    total = span if on_gpu else sum(microseconds.values())
    largest = sorted(losses.items(), key=lambda item: -item[1])[:3]
    lines = [
        f"loss {rank}: {name}, {taken / PROFILED / 1000:.2f} ms a step, {100 * taken / total:.0f} %"
        for rank, (name, taken) in enumerate(largest, 1)
    ]
    lines += [
        f"{name[:90]}: {counts[name] // PROFILED} a step, {taken / PROFILED / 1000:.2f} ms a step"
        for name, taken in by_name.most_common(12)
    ]
    lines.append(
        f"host waits in {PROFILED} steps: "
        + (", ".join(f"{count} {name}" for name, count in waits.most_common()) or "none")
        + f", {waited / 1000:.2f} ms"
    )
    by_class = {name: taken / PROFILED / 1000 for name, taken in microseconds.most_common()}
    return {
        "step_ms": total / PROFILED / 1000,
        "busy_percent": 100 * busy / span if on_gpu else "",
        "ideal_ms": ideal_us / PROFILED / 1000,
        "kernels_a_step": len(kernels) // PROFILED,
        **{f"{name}, ms": taken for name, taken in by_class.items()},
        "lines": lines,
    }


def _is_work(event: Any) -> bool:
    noted = getattr(event, "is_user_annotation", False)
    return not noted and not event.name.startswith(("ProfilerStep", "## ", "Optimizer."))


def class_of(name: str) -> str:
    """Of a kernel, by its name."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def _busy_and_span(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Microseconds that at least one of the intervals covers, and from the first's start to the last's end."""
    ordered = sorted(intervals)
    busy, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - ordered[0][0]
