"""One model over several processes: FSDP2 (`fully_shard`) under torchrun.

Zhao et al. 2023, arXiv:2304.11277. Each process keeps a slice of every weight, gradient and optimizer moment, gathers a
layer's weights when it computes that layer, and sees other pairs than the rest. Gradients are summed over processes
once a step, with the last micro-batch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rmcore.errors import ModelError
from rmcore.trainer.ranks import Ranks, environment_ranks


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started (RANK, WORLD_SIZE); alone where it did not.

    gloo on a CPU, NCCL on GPUs, one GPU a process (LOCAL_RANK).
    """
    ranks = environment_ranks()
    if ranks.world == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard `model` over all ranks in place: one unit for each transformer block, one for the rest.

    Raises:
        ModelError: the model has no repeated blocks, so nothing could be gathered piece by piece.
    """
    if ranks.world == 1:
        return
    blocks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(blocks, key=len, default=[])
    if not longest:
        raise ModelError(
            f"{type(model).__name__} has no list of transformer blocks, so it cannot be sharded layer by layer; train "
            "it in one process."
        )
    for block in longest:
        fully_shard(block)
    fully_shard(model)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward without backward leaves behind in sharded modules.

    Whoever held on to them would hold freed memory once something else frees them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The unsharded weights on the CPU, by name. Every rank must call this; all get the result."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
