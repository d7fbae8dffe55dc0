"""Which device a model runs on, and its memory."""

import os
import re
import sys
from functools import cache
from pathlib import Path

import psutil
import torch

from rmcore.config.model import WeightDtype
from rmcore.config.pipeline import DEVICES
from rmcore.core.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")


def pick_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:1`; each process that torchrun starts gets the GPU of its LOCAL_RANK.

    Raises:
        ConfigError: another name, a GPU is requested and torch does not see it, or one GPU is named for several ranks.
    """
    if not re.fullmatch(DEVICES, name):
        raise ConfigError(f"device={name} is none of auto, cpu, cuda, cuda:0, cuda:1, …; choose one of them.")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch sees no GPU here; use device=cpu or auto, or check the driver.")
    local_rank = os.environ.get("LOCAL_RANK")
    if ":" in name:
        device, seen = torch.device(name), torch.cuda.device_count()
        if local_rank is not None:
            raise ConfigError(f"device={name} under torchrun, which gives each process a GPU; use device=cuda.")
        if device.index >= seen:
            raise ConfigError(f"device={name}, but torch sees {seen} GPUs here, counted from cuda:0; name one of them.")
        return device
    return torch.device("cuda") if local_rank is None else torch.device("cuda", int(local_rank))


@cache  # said once
def scoring_dtype(name: str) -> WeightDtype:
    """Choose the format of the weights of a model that gives rewards on the device called `name`, and say it.

    On a GPU bfloat16: half of the memory and its traffic, and the kernel for packed rows computes in nothing wider.

    Raises:
        ConfigError: see `pick_device`.
    """
    if pick_device(name).type != "cuda":
        return "float32"
    print(
        "note: weights are bfloat16, as is usual for rewards on a GPU; dtype=float32 rounds nothing.", file=sys.stderr
    )
    return "bfloat16"


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU what can be had without swapping, within a container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit, used = (CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def total_bytes(device: torch.device) -> int:
    """Memory of the device, used or not; on a CPU at most a container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total, limit = int(psutil.virtual_memory().total), CGROUP / "memory.max"
    is_limited = limit.is_file() and limit.read_text().strip() != "max"
    return min(total, int(limit.read_text())) if is_limited else total
