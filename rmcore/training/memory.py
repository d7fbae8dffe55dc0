"""The memory of a device, and how many tokens of a micro-batch fit into it."""

import resource
import sys
from collections.abc import Callable

import psutil
import torch
from torch import nn

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.models.device import total_bytes
from rmcore.models.layers import can_recompute
from rmcore.models.packing.layout import Packing
from rmcore.training.step_memory import StepCounter, StepMemory

MAX_TOKEN_BUDGET = {"cpu": 8192, "cuda": 65536}
"""Beyond this a micro-batch no longer gets faster on the device, it only takes memory. A default, not a finding."""
ENOUGH_TOKENS = 4096
"""Tokens of a micro-batch from which activations are kept and not recomputed. Recomputing costs a third of the matrix
products, 2 FLOPs a weight and token; halving a micro-batch moves 18 bytes a weight once more (casts, gradients). At 640
TFLOP/s and 2.5 TB/s the two are level at 2,300 tokens, where matrices are filled badly already."""
USABLE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of what weights and optimizer state leave that a micro-batch may take. The rest is for all others on a CPU; on
a GPU for its context, kernels' scratch memory and gaps between allocations."""


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


def choose_memory(
    model: nn.Module,
    config: TrainConfig,
    packing: Packing | None,
    *,
    max_seq_len: int,
    device: torch.device,
    world: int = 1,
    total: int | None = None,
) -> tuple[int, float]:
    """Choose the token budget of training micro-batches, and which share of the layers is recomputed, where left out.

    Both from the memory that the device has, and not from what happens to be free: the cut decides how a step rounds
    and what dropout draws, and a busy machine must not train other weights under the same key. As few layers are
    recomputed as leave room for `ENOUGH_TOKENS`, or for a named budget; on a CPU a named one is taken to fit.

    Args:
        model: the reward model's, whole or sharded; it is only looked at.
        config: settings of the training.
        packing: how its rows are packed.
        max_seq_len: most tokens of a side.
        device: where it is trained.
        world: processes that share it.
        total: bytes of the device's memory; left out: those of `device`.

    Raises:
        ConfigError: not even one pair of two longest sides fits, in one process.
    """
    named, recomputes = config.token_budget, config.gradient_checkpointing
    if named is not None and (recomputes is not None or device.type == "cpu"):
        return named, float(bool(recomputes))
    total = total_bytes(device) if total is None else total
    least, most, usable = 2 * max_seq_len, MAX_TOKEN_BUDGET[device.type], USABLE_SHARE[device.type]
    enough = max(ENOUGH_TOKENS, least) if named is None else named
    counter = StepCounter(model, config, device, world)

    def count(share: float) -> StepMemory:
        return counter.memory(packing, max_seq_len=max_seq_len, recomputed=share)

    try:
        share = 1.0 if recomputes else 0.0
        memory = count(share)
        if recomputes is None and can_recompute(model) and memory.tokens(total, usable) < enough:
            share, memory = _fewest_recomputed(count, memory, enough, total, usable)
    except ModelError as reason:
        budget = named or least
        print(
            f"note: micro-batches of {budget} tokens, because the memory that one takes cannot be counted: {reason}; "
            "train.token_budget and train.gradient_checkpointing decide.",
            file=sys.stderr,
        )
        return budget, float(bool(recomputes))
    fitting = memory.tokens(total, usable)
    if named is not None:
        return named, share
    if fitting < least and world > 1:  # whole gradients and gathered weights are counted, of which a part is there
        print(
            f"note: micro-batches of {least} tokens, the fewest: with the whole model gathered on a process about "
            f"{fitting} fit. It is gathered layer by layer; set train.token_budget if memory is left.",
            file=sys.stderr,
        )
        return least, share
    if fitting < least:
        raise ConfigError(
            f"the memory of the device ({total / 2**30:.0f} GiB) holds micro-batches of about {fitting} tokens besides "
            f"weights and optimizer state, and one pair of 2 x {max_seq_len} tokens needs {least}; lower max_seq_len, "
            "use bf16, gradient_checkpointing or LoRA, or set a token_budget."
        )
    return min(most, fitting), share


def _fewest_recomputed(
    count: Callable[[float], StepMemory], kept: StepMemory, enough: int, total: int, usable: float
) -> tuple[float, StepMemory]:
    """The smallest share of layers to recompute that leaves room for `enough` tokens, all of them where none does.

    Bytes are about linear in the share, which is looked for between none, `kept`, and all.
    """
    every = count(1.0)
    more = kept.bytes_at(enough) - usable * (total - kept.larger.kept)
    share = more / max(1.0, kept.bytes_at(enough) - every.bytes_at(enough))
    if share < 1:
        some = count(share)
        if some.tokens(total, usable) >= enough:
            return share, some
    return 1.0, every
