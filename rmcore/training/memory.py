"""How many tokens fit into one micro-batch: an estimate from the architecture and the free memory."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from rmcore.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CGROUP = Path("/sys/fs/cgroup")
BYTES_PER_HIDDEN = 34
"""Activation bytes a token, layer and hidden unit in 16 bit (Korthikanti et al. 2022, arXiv:2205.05198, equation 1)."""
BYTES_PER_SCORE = 5
"""The same for each attention head and key (the s^2 term); zero with a fused kernel, so this is on the safe side."""
MAX_TOKEN_BUDGET = {"cpu": 8192, "cuda": 65536}
"""Beyond this a micro-batch no longer gets faster on the device, it only takes memory. A default, not a finding."""
USABLE_SHARE = 0.5
"""Share of the free memory that activations may take; the rest is for gradients, optimizer state and everybody else."""


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU what can be had without swapping, within a container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit, used = (CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


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


def activation_bytes_per_token(
    config: "PretrainedConfig", max_seq_len: int, precision: str, *, gradient_checkpointing: bool = False
) -> int:
    """Bytes that forward keeps for backward, a token; with checkpointing one layer's, and each layer's input."""
    text = config.get_text_config()
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    width = 1 if precision == "bf16" else 2
    layer = BYTES_PER_HIDDEN * hidden + BYTES_PER_SCORE * heads * max_seq_len
    return int(width * (layer + 2 * layers * hidden if gradient_checkpointing else layers * layer))


def choose_token_budget(
    config: "PretrainedConfig",
    *,
    num_trained: int,
    max_seq_len: int,
    precision: str,
    gradient_checkpointing: bool,
    device: torch.device,
) -> int:
    """Pick the token budget of training micro-batches from the free memory, with the weights loaded already.

    `num_trained` parameters get gradients and optimizer moments in this process.

    Raises:
        ConfigError: not even one pair of two longest sides fits.
    """
    state = 12 * num_trained  # gradients and two float32 moments
    room = USABLE_SHARE * max(0, free_bytes(device) - state)
    per_token = activation_bytes_per_token(
        config, max_seq_len, precision, gradient_checkpointing=gradient_checkpointing
    )
    fitting = int(room // per_token)
    if fitting < 2 * max_seq_len:
        raise ConfigError(
            f"free memory holds about {fitting} tokens of activations, one pair of 2 x {max_seq_len} tokens needs "
            f"{2 * max_seq_len}; lower max_seq_len, use bf16 or gradient_checkpointing, or set token_budget yourself."
        )
    return max(2 * max_seq_len, min(MAX_TOKEN_BUDGET[device.type], fitting))
