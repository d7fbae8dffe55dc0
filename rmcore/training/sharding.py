"""One model over several processes: FSDP2 (`fully_shard`) under torchrun.

Zhao et al. 2023, arXiv:2304.11277. Each process keeps a slice of every weight, gradient and optimizer moment, gathers a
layer's weights when it computes that layer, and sees other pairs than the rest.

Where memory allows, gathered weights and gradients of the whole model stay until the last micro-batch of a step, whose
backward pass sums gradients over processes once. Where it does not, each micro-batch gathers and sums again.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rmcore.core.errors import ConfigError, LostProcessError, ModelError
from rmcore.models.layers import transformer_layers, without_adapters
from rmcore.models.loading import check_finite
from rmcore.models.packing.forward import FORWARD_METHOD, TRIAL_METHOD, packed_outputs, packed_trial
from rmcore.models.packing.layout import Packing
from rmcore.models.precision import Precision, reward_heads
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.weight_files import Place
from rmcore.training.optimizers import LIKELIHOOD_PREFIX, whole
from rmcore.training.ranks import LONGEST_WAIT, TO_BE_ALONE, Ranks, environment_ranks

LIKELIHOOD = LIKELIHOOD_PREFIX.removesuffix(".")
GONE = ("remote process exited", "closed by", "Connection", "timed out", "Timeout")
"""Words of NCCL's errors where it is another process that is the matter."""
LONGEST_STEP = timedelta(minutes=10)
"""Until a process that does not come to a collective of a step counts as lost: compiling is in it, disks are not."""
PATIENCE = timedelta(seconds=10)
"""Until a process that waits for others to join says so."""
MASTER = MixedPrecisionPolicy()
"""Weights are gathered, computed with and reduced as they are: float32."""
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Weights are gathered and computed with in bfloat16, gradients summed over micro-batches and ranks in float32."""

EMBEDDED = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
"""Embeddings are looked up, and gradients of a token's places summed, in float32; what comes out is bfloat16."""


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started (RANK, WORLD_SIZE); alone where it did not.

    gloo on a CPU. On GPUs, one a process (LOCAL_RANK), NCCL for what is there and gloo for what the hosts agree on.

    Raises:
        ConfigError: there are several processes, and the environment does not say where they meet.
        LostProcessError: inside, another process has ended or cannot be reached any more.
    """
    ranks = environment_ranks()
    if ranks.world == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _saying_who_is_missing(ranks):
        # By a store of its own, because hosts may start long after one another.
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=LONGEST_WAIT)))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LONGEST_STEP)
    is_joined = True
    try:
        yield replace(ranks, patient=dist.new_group(backend="gloo", timeout=LONGEST_WAIT))
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


@contextmanager
def _saying_who_is_missing(ranks: Ranks) -> Iterator[None]:
    """Say whom this process waits for inside, once it has waited for `PATIENCE`."""
    meeting = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    place = f"RANK={ranks.rank} of WORLD_SIZE={ranks.world}"
    if not all(meeting):
        raise ConfigError(f"{place}, and MASTER_ADDR or MASTER_PORT, where they meet, is not set. {TO_BE_ALONE}")
    waits = f"note: {place}: this process waits for the others at {':'.join(meeting)}. {TO_BE_ALONE}"
    timer = threading.Timer(PATIENCE.total_seconds(), lambda: print(waits, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_of_the_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because a rank is gone, and not because its arguments were impossible."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError) or "gloo/transport" in str(error):
        return True
    return isinstance(error, dist.DistBackendError) and any(words in str(error) for words in GONE)


def _first_and_last(error: RuntimeError) -> str:
    """NCCL tells what was tried first and why it failed last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def shard(rm: BradleyTerryRM, ranks: Ranks, precision: Precision = "fp32") -> None:
    """Shard the model over all ranks in place: one unit for each transformer layer, one for the rest.

    Weights that are still in their files are read then: each rank reads the slices that it keeps. Nothing is done where
    there is one rank, or the model is sharded already.

    In bf16 it then computes with bfloat16 weights, but for the reward head and the embeddings of tokens, and its
    gradients are float32 all the same.

    Raises:
        ModelError: no layer of the model is known, so nothing could be gathered piece by piece; or, on all ranks, its
            weights cannot be read, or are not finite.
    """
    if ranks.world == 1 or isinstance(rm.model, FSDPModule):
        return
    places = rm.deferred.leave_out(rm.model) if rm.deferred is not None else {}
    shard_blocks(rm.model, precision)
    rm.deferred = None
    told = [problem for problem in ranks.gather(_fill(rm.model, places)) if problem]
    if told:
        raise ModelError(told[0])


def _fill(model: nn.Module, places: Mapping[str, Place]) -> str:
    """Read this rank's slices of the parameters that have no memory yet; what went wrong, if anything did."""
    empty: dict[str, Any] = model.state_dict()
    try:
        for name, place in places.items():
            tensor = empty[name]
            [mine] = tensor.__create_chunk_list__()  # torch's protocol of distributed checkpoints
            local = torch.empty(mine.sizes, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
            if local.numel():
                local.copy_(place.read_rows(mine.offsets[0], mine.sizes[0]))  # FSDP2 shards rows
            check_finite([(name, local)], str(place.file))
            shape = {"shape": tensor.shape, "stride": tensor.stride()}
            filled = DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **shape)
            holder, _, leaf = name.rpartition(".")
            # One by one: FSDP2 copies what it must pad.
            model.get_submodule(holder).load_state_dict({leaf: filled}, strict=False, assign=True)
    except ModelError as error:
        return str(error)
    except (OSError, SafetensorError) as error:
        return f"the weights of the model could not be read ({error}); save or download it again."
    return ""


def shard_blocks(model: nn.Module, precision: Precision = "fp32") -> None:
    """Shard `model` in place over the processes of the default group, of which there may be one alone.

    Raises:
        ModelError: see `shard`.
    """
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers of a class that is known, so it cannot be sharded layer by layer; "
            "train it in one process."
        )
    policy = HALF if precision == "bf16" else MASTER
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    if precision == "bf16":
        for head in reward_heads(model).values():
            fully_shard(head, mp_policy=MASTER)
        tokens = without_adapters(model).get_input_embeddings()
        named = model.named_parameters(remove_duplicate=False)
        if sum(parameter is tokens.weight for _, parameter in named) == 1:  # a unit's weights are in no other
            fully_shard(tokens, mp_policy=EMBEDDED)
    if hasattr(model, LIKELIHOOD):  # runs after the model, so it gathers its own few numbers
        fully_shard(model.get_submodule(LIKELIHOOD), mp_policy=MASTER)
    fully_shard(model, mp_policy=policy)

    def trial(model: nn.Module, packing: Packing, asked: str, pad_id: int) -> Packing:
        return packed_trial(model, packing, "bf16" if precision == "bf16" else asked, pad_id)

    sharded: Any = model
    for name, method in ((FORWARD_METHOD, packed_outputs), (TRIAL_METHOD, trial)):
        setattr(sharded, name, MethodType(method, model))
        register_fsdp_forward_method(sharded, name)


def between_micro_batches(model: nn.Module, *, last: bool, whole: bool) -> None:
    """Say what a micro-batch's backward pass does where the model is sharded: free the weights and sum gradients.

    Args:
        model: the model; nothing is done where it is not sharded.
        last: it is the step's last micro-batch.
        whole: until then every process has room for the whole model's gathered weights and gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not whole)
        model.set_reshard_after_backward(last or not whole)
        model.set_reshard_after_forward(not whole)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward without backward leaves behind in sharded modules.

    A reference kept to them would be one to freed memory once something else frees them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The unsharded weights on the CPU, by name. Every rank must call this; those that do not `keep` get empty ones."""
    state = model.state_dict()
    return {name: whole(tensor, keep=keep) for name, tensor in state.items() if isinstance(tensor, Tensor)}
