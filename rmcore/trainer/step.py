"""One optimizer step: whole pairs in, one exact gradient out.

Every micro-batch adds its *sum* of pair losses divided by the pairs of the whole step. Hence any cut of a step into
micro-batches gives the same loss and gradient, up to rounding.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from rmcore.batching import MicroBatch
from rmcore.config import TrainConfig
from rmcore.errors import TrainingError
from rmcore.losses import bradley_terry_loss_sum, reward_penalty_sum, split_rewards


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step saw, before its update. Means are over the pairs of the step."""

    num_pairs: int
    num_tokens: int
    """Padded tokens computed."""
    num_real_tokens: int
    loss: float
    """Mean training loss in nats, smoothing and penalty included."""
    pairwise_accuracy: float
    mean_margin: float
    grad_norm: float
    """Before clipping."""


def precision_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast to bfloat16 for `bf16`; nothing for `fp32`."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def accumulate_gradient(
    model: torch.nn.Module, batches: Iterable[MicroBatch], config: TrainConfig, *, num_pairs: int, device: torch.device
) -> Tensor:
    """Add the gradient of the mean loss over `num_pairs` pairs to `.grad`, micro-batch by micro-batch.

    Returns:
        (3,) float64 on the device: summed loss, wins of the chosen side, summed margin. Ties count half.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        with precision_context(config.precision, device):
            rewards = model(**batch.model_inputs(device)).logits
        chosen, rejected = split_rewards(rewards)
        loss = bradley_terry_loss_sum(chosen, rejected, beta=config.beta, label_smoothing=config.label_smoothing)
        if config.regularization_lambda:
            loss = loss + config.regularization_lambda * reward_penalty_sum(chosen, rejected)
        (loss / num_pairs).backward()
        margin = (chosen - rejected).detach().double()
        wins = (margin > 0).sum() + 0.5 * (margin == 0).sum()
        sums += torch.stack([loss.detach().double(), wins, margin.sum()])
    return sums


def train_step(
    model: torch.nn.Module,
    optimizer: Optimizer,
    batches: Sequence[MicroBatch],
    config: TrainConfig,
    *,
    step: int,
    pair_ids: Sequence[str],
    device: torch.device,
) -> StepResult:
    """Run one optimizer step over `batches`, which together hold the pairs named `pair_ids`.

    Raises:
        TrainingError: loss or gradient is not finite. The weights are left as they were before the step.
    """
    optimizer.zero_grad(set_to_none=True)
    num_pairs = sum(batch.num_pairs for batch in batches)
    sums = accumulate_gradient(model, batches, config, num_pairs=num_pairs, device=device)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    loss_sum, wins, margin_sum, norm = torch.cat([sums, grad_norm.detach().double().reshape(1)]).tolist()
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        named = ", ".join(pair_ids[:4]) + (", ..." if len(pair_ids) > 4 else "")
        raise TrainingError(
            f"step {step}: loss {loss_sum / num_pairs:.4g}, gradient norm {norm:.4g}: not finite (pairs {named}); "
            "the update was not applied. Lower the learning rate, lengthen the warm-up, or look at those pairs."
        )
    optimizer.step()
    return StepResult(
        num_pairs=num_pairs,
        num_tokens=sum(batch.input_ids.numel() for batch in batches),
        num_real_tokens=sum(int(batch.attention_mask.sum()) for batch in batches),
        loss=loss_sum / num_pairs,
        pairwise_accuracy=wins / num_pairs,
        mean_margin=margin_sum / num_pairs,
        grad_norm=norm,
    )
