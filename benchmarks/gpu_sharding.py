"""A sharded training of one process gives the losses of one that is not: FSDP2, with NCCL on a GPU."""

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_plan import Work
from gpu_training import HALF, cell_of
from throughput_sides import make_rm, train_here
from train_throughput import pairs_for

from rmcore.data.rendering import TokenizedPair
from rmcore.models.device import pick_device
from rmcore.training import train_mode
from rmcore.training.sharding import shard_blocks

STEPS = 6
CLOSE = 5e-3
"""Largest relative difference of a loss: both compute with weights in bf16, and round at other places."""


def sharding(work: Work) -> None:
    """Losses of one process, sharded and whole."""
    work.built.clear()
    work.measure("one process", lambda: compared(work.smoke))


def compared(smoke: bool) -> dict[str, Any]:
    """Train twice from the same weights."""
    cell = cell_of(HALF, smoke=smoke, steps=STEPS)
    pairs, device = pairs_for(cell), pick_device("auto")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
    try:
        whole, sharded = (losses_of(cell, pairs, device, sharded=sharded) for sharded in (False, True))
    finally:
        dist.destroy_process_group()
    differences = [abs(a - b) / abs(a) for a, b in zip(whole["losses"], sharded["losses"], strict=True)]
    found = {
        "device": device.type,
        "backend": backend,
        "steps": cell.steps,
        "losses": ", ".join(f"{loss:.5f}" for loss in sharded["losses"]),
        "largest_difference": max(differences),
        **{f"{name}_whole": whole[name] for name in ("seconds", "peak_gib")},
        **{f"{name}_sharded": sharded[name] for name in ("seconds", "peak_gib")},
    }
    if found["largest_difference"] > CLOSE:
        raise AssertionError(f"sharded and whole losses differ: {found}")
    return found


def losses_of(cell: Any, pairs: list[TokenizedPair], device: torch.device, *, sharded: bool) -> dict[str, Any]:
    """The loss of every step; seconds are of the steps after the first."""
    started = [0.0]

    def begin(_: object) -> None:
        if sharded:  # one process is not sharded by itself
            shard_blocks(rm.model, cell.precision)

    def after_step(step: int) -> None:
        if step == 1:
            started[0] = time.perf_counter()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rm, settings = make_rm(cell, device), cell.settings.model_copy(update={"log_every": 1})
    with patch.dict(train_mode.HALF_BY_DEFAULT, {device.type: not sharded}):  # FSDP2 makes bf16 copies itself
        _, tracker = train_here(rm, settings, pairs, begin=begin, after_step=after_step)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "losses": [values["train/loss"] for _, values in tracker.rows],
        "seconds": time.perf_counter() - started[0],
        "peak_gib": peak,
    }
