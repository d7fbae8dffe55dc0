"""Before the first step: the form of the rows, the token budget, what all steps share, taking up a saved state."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.core.hardware import choose_precision
from rmcore.models.compiling import CompiledLayers
from rmcore.models.device import total_bytes
from rmcore.models.layers import recompute_layers
from rmcore.models.packing.layout import Packing
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training import state as states
from rmcore.training.half_weights import HalfWeights, find_half_weights, uses_half_weights
from rmcore.training.likelihood.attached import make_observation_forward
from rmcore.training.losses import make_bradley_terry
from rmcore.training.memory import choose_memory
from rmcore.training.optimizers import OptimizerSet, make_optimizer
from rmcore.training.ranks import Ranks
from rmcore.training.resume import ResumePoint
from rmcore.training.sharding import reshard, shard
from rmcore.training.state_transfer import state_on_this_host
from rmcore.training.step import StepContext, make_forward

BF16_NOTE = "note: trains in bf16, with weights, reward head and loss in float32; train.precision=fp32 rounds nothing."
WHOLE_SHARE = 0.25
"""Share of the memory besides a rank's slices that gathered weights and gradients may take: activations have half."""
TINY_PARAMETERS = 5_000_000
"""Parameters below which a model counts as tiny where its name is not known; `tiny-wide`, the largest, has 3.3 M."""
SCORES_COMPILED = {"cuda": True, "cpu": False}
"""Whether the evaluations of a training that compiles its layers use them, too; compiling again, without gradients,
takes longer on a CPU than it saves."""


def with_precision(config: TrainConfig, rm: BradleyTerryRM, device: torch.device) -> TrainConfig:
    """The same settings, with what `precision=auto` stands for where `rm` trains on `device`, which is said."""
    if config.precision != "auto":
        return config
    chosen = choose_precision(device.type, tiny=rm.num_parameters < TINY_PARAMETERS)
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
        return None
    if config.compile and found.reads_last:
        print("note: the last layer is computed for all tokens: its two parts are not compiled.", file=sys.stderr)
        return replace(found, reads_last=False)
    return found


def narrows_base(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether `narrow_base` changes no number of the training: autocast rounds the same."""
    return config.chosen_precision == "bf16" and ranks.world == 1


def share_memory(rm: BradleyTerryRM, config: TrainConfig, packing: Packing | None, ranks: Ranks) -> tuple[int, float]:
    """Tokens of a micro-batch, and the share of recomputed layers: the same on all ranks, which must all ask.

    Raises:
        ConfigError: see `choose_memory`.
    """
    own = choose_memory(
        rm.model, config, packing, max_seq_len=rm.renderer.rendering.max_seq_len, device=rm.device, world=ranks.world
    )
    chosen = ranks.gather(own)  # GPUs may differ, and all must cut a step alike
    return min(budget for budget, _ in chosen), max(share for _, share in chosen)


def make_context(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks, *, half: bool | None = None) -> StepContext:
    """Bring the model into its training form, sharded where there are several ranks; what all steps share.

    `half` says whether bf16 computes with bfloat16 copies of the weights rather than by autocast; None: where that was
    found to be faster.
    """
    recompute_layers(rm.model, rm.recomputed_share if config.gradient_checkpointing else 0.0)
    shard(rm, ranks, config.chosen_precision)
    device = rm.device
    optimizer = make_optimizer(rm.model, config)
    if config.optimizer == "adamw8bit":  # the weights are narrow now
        rm.split = optimizer
    wanted = uses_half_weights(config, device) if half is None else half and config.chosen_precision == "bf16"
    weights = _half_weights(rm, device) if wanted and ranks.world == 1 else None
    computes_as_it_is = weights is not None or ranks.world > 1  # see `shard`
    precision = "fp32" if computes_as_it_is else config.chosen_precision
    if rm.companion is None:
        forward = make_forward(rm.model, make_bradley_terry(config), precision, device)
    else:
        forward = make_observation_forward(rm, precision, device)
    compiled = CompiledLayers(rm.model) if config.compile else None
    # One of several ranks that failed to compile would compute again alone, and the others would wait for ever.
    rm.compiled = compiled if SCORES_COMPILED[device.type] and ranks.world == 1 else None
    return StepContext(
        model=rm.model,
        forward=forward,
        optimizer=optimizer,
        clip=config.clip,
        device=device,
        ranks=ranks,
        failed=torch.zeros((), device=device) if can_defer(optimizer, device) else None,
        compiled=compiled,
        half=weights,
        holds_whole=_holds_whole(rm, config, ranks),
    )


def _half_weights(rm: BradleyTerryRM, device: torch.device) -> HalfWeights | None:
    try:
        return find_half_weights(rm.model, device)
    except ModelError as reason:
        print(f"note: {reason}; it trains by autocast.", file=sys.stderr)
        return None


def _holds_whole(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> bool:
    """Whether memory takes the whole model's gathered weights and float32 gradients on each rank, activations aside."""
    if ranks.world == 1:
        return True
    gathered = (2 if config.chosen_precision == "bf16" else 4) + 4
    state = 16 * rm.num_parameters // ranks.world  # weights, gradients and two moments, in float32
    room = WHOLE_SHARE * max(0, total_bytes(rm.device) - state)
    return all(ranks.gather(gathered * rm.num_parameters <= room))


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
