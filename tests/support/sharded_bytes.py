"""A step's micro-batches in one of two processes: what each of them leaves in memory, in bytes a parameter.

The spec is [folder, precision, whole, variables]; each process writes RANK.json: bytes of whole weights and whole
gradients after the first of two micro-batches, and after both, and the sum of the final gradients.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nano_model import nano_config
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.models import tiny
from rmcore.models.batching import micro_batches
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import make_context
from rmcore.training.sharding import process_group, shard
from rmcore.training.step import accumulate_gradient
from rmcore.training.train_mode import training_form


def whole_bytes(model) -> dict[str, float]:
    """Bytes a parameter of weights and gradients that are not slices, as FSDP2 keeps them."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    parameters = [one for group in groups if group is not None for one in group.fsdp_params]
    count = sum(one._orig_size.numel() for one in parameters)
    gathered = [one._unsharded_param for one in parameters if hasattr(one, "_unsharded_param")]
    weights = sum(tensor.untyped_storage().nbytes() for tensor in gathered)
    kept = [one.unsharded_accumulated_grad for one in parameters] + [tensor.grad for tensor in gathered]
    return {
        "weights": weights / count,
        "gradients": sum(tensor.nbytes for tensor in kept if tensor is not None) / count,
    }


def run_from_file(spec: str) -> int:
    """As `rmcore.core.child_process` runs a module."""
    folder, precision, whole, variables = json.loads(Path(spec).read_text())
    os.environ.update(variables)
    torch.set_num_threads(1)
    tiny.tiny_config = nano_config
    device = torch.device("cpu")
    pairs = generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=1), seed=0).pairs[:8]
    config = TrainConfig(precision=precision, token_budget=600)
    # Before joining a group, in which rank 0 alone would write `tiny`.
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=device)
    with process_group(device) as ranks:
        shard(rm, ranks, precision)
        packing = rm.packing(precision)
        with training_form(rm, config):
            context = replace(make_context(rm, config, ranks), holds_whole=whole)
            tokenized = rm.renderer.tokenize_pairs(pairs)
            batches = micro_batches(
                tokenized, token_budget=300, pad_id=rm.pad_id, packing=packing, rank=ranks.rank, world=ranks.world
            )
            found = []

            def forward(rows, labels):
                found.append(whole_bytes(rm.model))  # what the micro-batch before left
                return context.forward(rows, labels)

            accumulate_gradient(replace(context, forward=forward), batches, num_terms=len(pairs))
        found.append(whole_bytes(rm.model))
        gradients = [parameter.grad for parameter in rm.model.parameters() if parameter.grad is not None]
        cpu = torch.device("cpu")
        groups = (dist.group.WORLD, ranks.patient)
        told = {
            "minutes": [group._get_backend(cpu).options._timeout.total_seconds() / 60 for group in groups],
            "packed": packing is not None,
            "embedded": rm.model.get_input_embeddings().weight.numel() / rm.num_parameters,
            "between": found[1:-1],
            "after": found[-1],
            "formats": sorted({str(gradient.dtype) for gradient in gradients}),
            "sliced": all(isinstance(gradient, DTensor) for gradient in gradients),
            "norm": float(sum(gradient.full_tensor().double().square().sum() for gradient in gradients).sqrt()),
        }
        (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(told))
    return 0
