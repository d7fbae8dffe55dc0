"""One optimizer step: micro-batches in, one update out.

Every micro-batch adds its *sum* of pair losses divided by the pairs of the whole step, over all processes. Hence any
cut of a step into micro-batches, any order of its pairs and any number of processes gives the same loss and gradient,
up to rounding. (Plain batching is there to show what happens otherwise: see `rmcore.models.plain_batching`.)

A step whose loss or gradient is not finite must not change the weights. Either the host reads both before the update,
which on a GPU costs it the lead over the device; or the update looks at a flag on the device, which once raised stays
so, and the host reads what many steps saw at once, later (`StepContext.failed`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rmcore.core.errors import TrainingError
from rmcore.models.batching import MicroBatch
from rmcore.models.observation_batching import ObservationBatch
from rmcore.models.packing.forward import rewards_of
from rmcore.models.packing.rows import Rows
from rmcore.models.precision import precision_context
from rmcore.training.compiling import CompiledLayers
from rmcore.training.half_weights import HalfWeights
from rmcore.training.losses import PairLoss, split_rewards
from rmcore.training.optimizers import OptimizerSet
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.sharding import between_micro_batches

Batch = MicroBatch | ObservationBatch
Forward = Callable[[Rows, Any], tuple[Tensor, Tensor]]
"""(rows, labels) of a micro-batch -> its summed loss, 0-d, and its (P,) margins, of P compared answers."""


class HalfUpdateError(TrainingError):
    """An update stopped half way: the weights are those of no step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one optimizer step, before its update. Counts and means are over its pairs of all ranks."""

    num_pairs: int
    """Observations, where these are not pairs."""
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
    """The model, optimizer and settings that stay the same from step to step."""

    model: torch.nn.Module
    forward: Forward
    optimizer: OptimizerSet
    clip: float
    device: torch.device
    ranks: Ranks = ALONE
    failed: Tensor | None = None
    """0-d float32 on the device, for an optimizer that `can_skip`: 1 once a step was not finite; no later update is
    applied. None: the host reads each step before its update."""
    compiled: CompiledLayers | None = None
    """Layers that gradients are computed with; None: the plain ones."""
    half: HalfWeights | None = None
    """bfloat16 weights that gradients are computed with, where `forward` is to compute as the weights are; None: the
    float32 ones."""
    holds_whole: bool = True
    """Whether, between the micro-batches of a step, each of several ranks has room for all gathered weights and
    gradients; see `between_micro_batches`."""

    @property
    def deferred(self) -> bool:
        """Whether steps are read later, many at once."""
        return self.failed is not None

    @contextmanager
    def computing_form(self) -> Iterator[None]:
        """Have the model in the form that gradients are computed with inside the block."""
        with ExitStack() as stack:
            for part in (self.compiled, self.half):
                if part is not None:
                    stack.enter_context(part.active())
            yield


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """One step's numbers where they were computed."""

    step: int
    pair_ids: Sequence[str]
    num_terms: float
    """Divisor of the summed loss: pairs, or weighted terms of the likelihood of other observations."""
    numbers: Tensor
    """(7,) float64, of all ranks: summed loss, wins, summed margin, margins; tokens, real tokens; gradient norm."""

    def not_finite(self) -> Tensor:
        """0-d bool: the step must not change the weights."""
        return ~(self.numbers[0].isfinite() & self.numbers[6].isfinite())

    def result(self, numbers: Sequence[float]) -> StepResult:
        """Make the result of the step from its `numbers`, once they have been read from the device.

        Raises:
            TrainingError: the step was not finite.
        """
        loss_sum, wins, margin_sum, num_margins, num_tokens, num_real_tokens, norm = numbers
        num_pairs = len(self.pair_ids)
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            named = ", ".join(self.pair_ids[:4]) + (", ..." if num_pairs > 4 else "")
            raise TrainingError(
                f"step {self.step}: loss {loss_sum / self.num_terms:.4g}, gradient norm {norm:.4g}: not finite (pairs "
                f"{named}); the update was not applied. Lower the learning rate, lengthen the warm-up, or look at "
                "those pairs."
            )
        return StepResult(
            num_pairs=num_pairs,
            num_tokens=int(num_tokens),
            num_real_tokens=int(num_real_tokens),
            loss=loss_sum / self.num_terms,
            pairwise_accuracy=wins / num_margins if num_margins else math.nan,
            mean_margin=margin_sum / num_margins if num_margins else math.nan,
            grad_norm=norm,
        )


def make_forward(model: torch.nn.Module, loss: PairLoss, precision: str, device: torch.device) -> Forward:
    """The whole computation of one micro-batch as one function."""

    def forward(rows: Rows, target_margins: Tensor) -> tuple[Tensor, Tensor]:
        with precision_context(precision, device):
            rewards = rewards_of(model, rows)  # (R,), R = 2P
        # Outside autocast: the loss is computed in float32 whatever the model's precision.
        chosen, rejected = split_rewards(rewards)  # (P,), (P,)
        return loss(chosen, rejected, target_margins), chosen - rejected

    return forward


def accumulate_gradient(context: StepContext, batches: Sequence[Batch], *, num_terms: float) -> Tensor:
    """Add the gradient of the mean loss over `num_terms` terms, pairs mostly, those of all ranks, to `.grad`.

    Pairs count by the weight of their micro-batch (1 but for plain batching), in the gradient alone.

    Returns:
        (4,) float64 on the device, of this rank: summed loss, wins of the better side, summed margin, number of
        margins. Ties count half.
    """
    with context.computing_form():
        return _accumulate(context, batches, num_terms)


def _accumulate(context: StepContext, batches: Sequence[Batch], num_terms: float) -> Tensor:
    device = context.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for position, batch in enumerate(batches):
        between_micro_batches(context.model, last=position == len(batches) - 1, whole=context.holds_whole)
        moved = batch.to(device)
        loss, margins = context.forward(moved.rows, moved.labels)
        if batch.idle:
            # Sharded weights are gathered and gradients reduced by all ranks together: one that skipped its backward
            # pass would leave the others waiting for ever.
            (0.0 * loss).backward()
            continue
        # Sharded data parallelism averages over ranks; what is wanted is the sum.
        (loss * (batch.weight * context.ranks.world / num_terms)).backward()
        margins = margins.detach().double()  # (P,); float64: sums over many pairs are not rounded
        wins = (margins > 0).sum() + 0.5 * (margins == 0).sum()
        sums += torch.stack([loss.detach().double(), wins, margins.sum(), wins.new_full((), len(margins))])
    return sums


def train_step(
    context: StepContext,
    batches: Sequence[Batch],
    *,
    step: int,
    pair_ids: Sequence[str],
    num_terms: float | None = None,
) -> UnreadStep:
    """Run one optimizer step over this rank's `batches`; all ranks' together hold the pairs named `pair_ids`.

    `num_terms` is what the summed loss is divided by, where that is not the number of pairs.

    Where the context is deferred, nothing here waits for the device, and `read_steps` raises what this would have.

    Raises:
        TrainingError: loss or gradient is not finite. The weights are left as they were before the step.
        HalfUpdateError: the update itself ran out of memory.
        torch.OutOfMemoryError: a gradient did. The weights are left as they were before the step.
    """
    optimizer = context.optimizer
    terms = len(pair_ids) if num_terms is None else num_terms
    optimizer.zero_grad()
    sums = accumulate_gradient(context, batches, num_terms=terms)
    # Filled on the device: a tensor made of Python numbers would be copied there, and waited for.
    tokens = sums.new_full((1,), sum(batch.rows.num_tokens for batch in batches))
    real_tokens = sums.new_full((1,), sum(batch.rows.num_real_tokens for batch in batches if not batch.idle))
    totals = context.ranks.sum(torch.cat([sums, tokens, real_tokens]))  # (6,): one reduction for all six numbers
    numbers = torch.cat([totals, _gradient_norm(context).double()[None]])
    if context.failed is None:
        seen = UnreadStep(step, pair_ids, terms, numbers.cpu())
        seen.result(seen.numbers.tolist())
        if optimizer.sharpness_aware:
            _sharpness_aware_gradient(context, batches, step=step, num_terms=terms)
    else:
        seen = UnreadStep(step, pair_ids, terms, numbers)
        context.failed.logical_or_(seen.not_finite())
    try:
        optimizer.step(skip=context.failed)
    except torch.OutOfMemoryError as error:
        raise HalfUpdateError(
            f"step {step}: out of memory in the update ({error}); its optimizer's state does not fit beside the model, "
            "whatever the token budget. Use another optimizer (sgd and lion keep half of what adamw keeps) or LoRA; "
            "what is on disk is whole."
        ) from error
    return seen


def read_steps(steps: Sequence[UnreadStep]) -> Iterator[StepResult]:
    """Wait for the device, once, then give what these consecutive steps saw, one by one.

    Raises:
        TrainingError: in the place of the first step that was not finite. Neither it nor any after it was applied.
    """
    rows = torch.stack([seen.numbers for seen in steps]).tolist()
    return (seen.result(numbers) for seen, numbers in zip(steps, rows, strict=True))


def _sharpness_aware_gradient(context: StepContext, batches: Sequence[Batch], *, step: int, num_terms: float) -> None:
    """Replace the gradient by the one at the weights that SAM perturbs; the weights come back."""
    optimizer = context.optimizer
    try:
        optimizer.ascend()
        optimizer.zero_grad()
        accumulate_gradient(context, batches, num_terms=num_terms)
    finally:
        optimizer.descend()
    if not _gradient_norm(context).isfinite():
        raise TrainingError(
            f"step {step}: the gradient at the perturbed weights is not finite; the update was not applied. Lower "
            "sam_rho or the learning rate."
        )


def _gradient_norm(context: StepContext) -> Tensor:
    """Clip the gradient; its norm before that, over all ranks: 0-d on the device."""
    with_gradient = {p: p.grad for p in context.model.parameters() if p.grad is not None}
    if any(gradient.dtype == torch.bfloat16 for gradient in with_gradient.values()):  # whose norms torch would round
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in with_gradient.values()]
        exact: Tensor = torch.stack(norms).norm()
        torch.nn.utils.clip_grads_with_norm_(with_gradient, context.clip, exact)
        return exact
    norm: Tensor = torch.nn.utils.clip_grad_norm_(context.model.parameters(), context.clip)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
