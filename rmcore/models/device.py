"""Which device a model runs on."""

import os
import re

import torch

from rmcore.config.pipeline import DEVICES
from rmcore.core.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:1`; each process that torchrun starts gets the GPU of its LOCAL_RANK.

    Raises:
        ConfigError: another name, a GPU is asked for and torch does not see it, or one GPU is named for several ranks.
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
