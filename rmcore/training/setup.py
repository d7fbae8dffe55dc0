"""Before the first step: the form of the rows, the token budget, what all steps share, taking up a saved state."""

import sys
from pathlib import Path

import numpy as np
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import choose_precision
from rmcore.models.packing.layout import Packing
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training import state as states
from rmcore.training.compiling import CompiledForward
from rmcore.training.likelihood.attached import make_observation_forward
from rmcore.training.losses import make_bradley_terry
from rmcore.training.memory import choose_token_budget
from rmcore.training.optimizers import OptimizerSet, make_optimizer
from rmcore.training.ranks import Ranks
from rmcore.training.resume import ResumePoint
from rmcore.training.sharding import reshard, shard
from rmcore.training.state_transfer import state_on_this_host
from rmcore.training.step import StepContext, make_forward

BF16_NOTE = "note: trains in bf16, with weights, reward head and loss in float32; train.precision=fp32 rounds nothing."
TINY_PARAMETERS = 5_000_000
"""Parameters below which a model counts as tiny where its name is not known; `tiny-wide`, the largest, has 3.3 M."""


def with_precision(config: TrainConfig, rm: BradleyTerryRM) -> TrainConfig:
    """The same settings, with what `precision=auto` stands for on the device of `rm`, which is said."""
    if config.precision != "auto":
        return config
    chosen = choose_precision(rm.device.type, tiny=rm.num_parameters < TINY_PARAMETERS)
    if chosen == "bf16":
        print(BF16_NOTE, file=sys.stderr)
    return config.model_copy(update={"precision": chosen})


def choose_packing(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> Packing | None:
    """How rows are packed in training; None: padded. All ranks must ask: weights that are sharded are gathered for it.

    Raises:
        ConfigError: some ranks can pack and others cannot, so they would cut a step differently and wait for ever.
    """
    found = _own_packing(rm, config)
    by_rank = ranks.gather(found)
    if any(other != found for other in by_rank):
        raise ConfigError(
            f"of {ranks.world} processes some can pack rows and some cannot ({by_rank}): their devices or libraries "
            "differ. Train with packing=false, or on machines that are alike."
        )
    return found


def _own_packing(rm: BradleyTerryRM, config: TrainConfig) -> Packing | None:
    if config.batching == "plain":  # which is padded by definition
        return None
    found = rm.packing(config.chosen_precision)
    reshard(rm.model)
    if found is None:
        return None
    reason = None
    if config.compile and found.kernel == "sdpa":
        reason = "torch.compile needs attention as one operation"
    elif config.dropout and found.kernel == "varlen":
        reason = "the kernel that packs on a GPU has no dropout (train.dropout=false)"
    if reason:
        print(f"note: pairs are padded, not packed: {reason}.", file=sys.stderr)
    return None if reason else found


def choose_budget(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> int:
    """Tokens of a micro-batch: as configured, else what memory allows; the same on all ranks, which must all ask."""
    own = config.token_budget or choose_token_budget(
        rm.model.config,
        num_trained=rm.num_trained_parameters // ranks.world,
        max_seq_len=rm.renderer.rendering.max_seq_len,
        precision=config.chosen_precision,
        gradient_checkpointing=config.gradient_checkpointing,
        device=rm.device,
    )
    return min(ranks.gather(own))  # each sees other free memory, and all must cut a step alike


def make_context(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> StepContext:
    """Bring the model into its training form, sharded where there are several ranks; what all steps share."""
    if config.gradient_checkpointing:
        rm.enable_gradient_checkpointing()
    shard(rm, ranks)
    device = rm.device
    if rm.companion is None:
        forward = make_forward(rm.model, make_bradley_terry(config), config.chosen_precision, device)
    else:
        forward = make_observation_forward(rm, config.chosen_precision, device)
    optimizer = make_optimizer(rm.model, config)
    return StepContext(
        model=rm.model,
        forward=CompiledForward(forward) if config.compile else forward,
        optimizer=optimizer,
        clip=config.clip,
        device=device,
        ranks=ranks,
        failed=torch.zeros((), device=device) if can_defer(optimizer, device) else None,
    )


def can_defer(optimizer: OptimizerSet, device: torch.device) -> bool:
    """Whether steps need not be read before their update. On a CPU reading is free, so a bad step ends at once."""
    return device.type == "cuda" and optimizer.can_skip


def restore_training(
    point: ResumePoint, folder: Path, rm: BradleyTerryRM, context: StepContext, *, num_steps: int
) -> np.ndarray:
    """Put weights, optimizer and, for as many ranks as then, random states back; the rewards under the best weights."""
    ranks = context.ranks
    with state_on_this_host(point, folder, ranks) as state:
        randoms, rewards = states.load_state(state, rm.model, context.optimizer)
    if len(randoms) == ranks.world:
        states.set_random_state(randoms[ranks.rank], context.device)
    if ranks.is_main:
        for note in point.notes:
            print(f"warning: {note}", file=sys.stderr)
        print(f"resumed from step {point.step} of {num_steps} ({point.state.parent})", file=sys.stderr)
    return rewards
