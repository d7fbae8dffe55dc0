"""One optimizer step: micro-batches in, one update out.

Every micro-batch adds its *sum* of pair losses divided by the pairs of the whole step, over all processes. Hence any
cut of a step into micro-batches, any order of its pairs and any number of processes gives the same loss and gradient,
up to rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rmcore.batching import MicroBatch, Rows
from rmcore.errors import TrainingError
from rmcore.losses import PairLoss, split_rewards
from rmcore.optim import OptimizerSet
from rmcore.packed_forward import rewards_of
from rmcore.precision import precision_context
from rmcore.trainer.ranks import ALONE, Ranks

Forward = Callable[[Rows, Tensor], tuple[Tensor, Tensor]]
"""(rows, target_margins) of a micro-batch -> its summed loss, 0-d, and its (P,) margins."""


class HalfUpdateError(TrainingError):
    """An update stopped half way: the weights are those of no step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step saw, before its update. Counts and means are over the pairs of the step, of all ranks."""

    num_pairs: int
    num_tokens: int
    """Tokens computed: padding included, a prompt that both sides share once where rows are packed."""
    num_real_tokens: int
    """Tokens of both sides of each pair."""
    loss: float
    """Mean training loss in nats, smoothing and penalties included."""
    pairwise_accuracy: float
    mean_margin: float
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What stays the same from step to step."""

    model: torch.nn.Module
    forward: Forward
    optimizer: OptimizerSet
    clip: float
    device: torch.device
    ranks: Ranks = ALONE


def make_forward(model: torch.nn.Module, loss: PairLoss, precision: str, device: torch.device) -> Forward:
    """The whole computation of one micro-batch as one function."""

    def forward(rows: Rows, target_margins: Tensor) -> tuple[Tensor, Tensor]:
        with precision_context(precision, device):
            rewards = rewards_of(model, rows)
        chosen, rejected = split_rewards(rewards)
        return loss(chosen, rejected, target_margins), chosen - rejected

    return forward


def accumulate_gradient(context: StepContext, batches: Sequence[MicroBatch], *, num_pairs: int) -> Tensor:
    """Add the gradient of the mean loss over `num_pairs` pairs, those of all ranks, to `.grad`.

    Sharded gradients are summed over the ranks once, with the last micro-batch.

    Returns:
        (3,) float64 on the device, of this rank: summed loss, wins of the chosen side, summed margin. Ties count half.
    """
    device = context.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for position, batch in enumerate(batches):
        synchronise_gradients(context.model, position == len(batches) - 1)
        moved = batch.to(device)
        loss, margins = context.forward(moved.rows, moved.target_margins)
        if batch.idle:
            (0.0 * loss).backward()
            continue
        # Sharded data parallelism averages over ranks; what is wanted is the sum.
        (loss * (context.ranks.world / num_pairs)).backward()
        margins = margins.detach().double()
        wins = (margins > 0).sum() + 0.5 * (margins == 0).sum()
        sums += torch.stack([loss.detach().double(), wins, margins.sum()])
    return sums


def synchronise_gradients(model: torch.nn.Module, on: bool) -> None:
    """Switch the reduction of gradients over ranks on or off, where the model is sharded (FSDP2)."""
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is not None:
        switch(on)


def train_step(
    context: StepContext, batches: Sequence[MicroBatch], *, step: int, pair_ids: Sequence[str]
) -> StepResult:
    """Run one optimizer step over this rank's `batches`; all ranks' together hold the pairs named `pair_ids`.

    Raises:
        TrainingError: loss or gradient is not finite. The weights are left as they were before the step.
        HalfUpdateError: the update itself ran out of memory.
        torch.OutOfMemoryError: a gradient did. The weights are left as they were before the step.
    """
    optimizer, num_pairs = context.optimizer, len(pair_ids)
    optimizer.zero_grad()
    sums = accumulate_gradient(context, batches, num_pairs=num_pairs)
    tokens = [
        sum(batch.rows.num_tokens for batch in batches),
        sum(batch.rows.num_real_tokens for batch in batches if not batch.idle),
    ]
    totals = context.ranks.sum(torch.cat([sums, sums.new_tensor(tokens)]))
    norm = _gradient_norm(context)
    loss_sum, wins, margin_sum, num_tokens, num_real_tokens = totals.tolist()
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        named = ", ".join(pair_ids[:4]) + (", ..." if len(pair_ids) > 4 else "")
        raise TrainingError(
            f"step {step}: loss {loss_sum / num_pairs:.4g}, gradient norm {norm:.4g}: not finite (pairs {named}); "
            "the update was not applied. Lower the learning rate, lengthen the warm-up, or look at those pairs."
        )
    if optimizer.sharpness_aware:
        try:
            optimizer.ascend()
            optimizer.zero_grad()
            accumulate_gradient(context, batches, num_pairs=num_pairs)
        finally:
            optimizer.descend()
        if not math.isfinite(_gradient_norm(context)):
            raise TrainingError(
                f"step {step}: the gradient at the perturbed weights is not finite; the update was not applied. Lower "
                "sam_rho or the learning rate."
            )
    try:
        optimizer.step()
    except torch.OutOfMemoryError as error:
        raise HalfUpdateError(
            f"step {step}: out of memory in the update ({error}); its optimizer's state does not fit beside the model, "
            "whatever the token budget. Use another optimizer (sgd and lion keep half of what adamw keeps) or LoRA; "
            "what is on disk is whole."
        ) from error
    return StepResult(
        num_pairs=num_pairs,
        num_tokens=int(num_tokens),
        num_real_tokens=int(num_real_tokens),
        loss=loss_sum / num_pairs,
        pairwise_accuracy=wins / num_pairs,
        mean_margin=margin_sum / num_pairs,
        grad_norm=norm,
    )


def _gradient_norm(context: StepContext) -> float:
    """Clip the gradient; its norm before that, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(context.model.parameters(), context.clip)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
