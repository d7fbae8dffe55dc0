"""One model over several processes: FSDP2 (`fully_shard`) under torchrun.

Zhao et al. 2023, arXiv:2304.11277. Each process keeps a slice of every weight, gradient and optimizer moment, gathers a
layer's weights when it computes that layer, and sees other pairs than the rest. Gradients are summed over processes
once a step, with the last micro-batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from rmcore.core.errors import LostProcessError, ModelError
from rmcore.models.packing.forward import FORWARD_METHOD, packed_outputs
from rmcore.training.optimizers import LIKELIHOOD_PREFIX, whole
from rmcore.training.ranks import Ranks, environment_ranks

LIKELIHOOD = LIKELIHOOD_PREFIX.removesuffix(".")
GONE = ("remote process exited", "closed by", "Connection", "timed out", "Timeout")
"""Words of NCCL's errors where it is another process that is the matter."""
LONGEST_WAIT = timedelta(hours=2)
"""The others wait while the first process writes a large state to a slow disk."""


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started (RANK, WORLD_SIZE); alone where it did not.

    gloo on a CPU. On GPUs, one a process (LOCAL_RANK), NCCL for what lies there and gloo for what the hosts agree on.

    Raises:
        LostProcessError: inside, another process has ended or cannot be reached any more.
    """
    ranks = environment_ranks()
    if ranks.world == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)
    is_joined = True
    try:
        yield ranks
    except RuntimeError as error:
        is_joined = device.type != "cuda"  # NCCL would wait here for the others, who wait in a collective for this one
        if not _is_of_the_connection(error):
            raise
        raise LostProcessError(
            "another process of this training has ended, or its host cannot be reached: its own message says why. The "
            f"same command on all hosts resumes from the state that was saved last. ({_first_and_last(error)})"
        ) from error
    except BaseException:
        is_joined = device.type != "cuda"
        raise
    finally:
        if is_joined:
            dist.destroy_process_group()


def _is_of_the_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because somebody is gone, and not because it was asked for something impossible."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError) or "gloo/transport" in str(error):
        return True
    return isinstance(error, dist.DistBackendError) and any(words in str(error) for words in GONE)


def _first_and_last(error: RuntimeError) -> str:
    """NCCL tells what was tried first and why it failed last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard `model` over all ranks in place: one unit for each transformer block, one for the rest.

    Raises:
        ModelError: the model has no repeated blocks, so nothing could be gathered piece by piece.
    """
    if ranks.world > 1:
        shard_blocks(model)


def shard_blocks(model: nn.Module) -> None:
    """Shard `model` in place over the processes of the default group, of which there may be one alone.

    Raises:
        ModelError: see `shard`.
    """
    blocks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(blocks, key=len, default=[])
    if not longest:
        raise ModelError(
            f"{type(model).__name__} has no list of transformer blocks, so it cannot be sharded layer by layer; train "
            "it in one process."
        )
    for block in longest:
        fully_shard(block)
    if hasattr(model, LIKELIHOOD):  # runs after the model, so it gathers its own few numbers
        fully_shard(model.get_submodule(LIKELIHOOD))
    fully_shard(model)
    sharded: Any = model
    setattr(sharded, FORWARD_METHOD, MethodType(packed_outputs, model))
    register_fsdp_forward_method(sharded, FORWARD_METHOD)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward without backward leaves behind in sharded modules.

    Whoever held on to them would hold freed memory once something else frees them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The unsharded weights on the CPU, by name. Every rank must call this; those that do not `keep` get empty ones."""
    state = model.state_dict()
    return {name: whole(tensor, keep=keep) for name, tensor in state.items() if isinstance(tensor, Tensor)}
