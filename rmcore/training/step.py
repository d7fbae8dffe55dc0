"""One optimizer step: micro-batches in, one update out.

Every micro-batch adds its *sum* of pair losses divided by the pairs of the whole step, over all processes. Hence any
cut of a step into micro-batches, any order of its pairs and any number of processes gives the same loss and gradient,
up to rounding. (Plain batching shows what happens otherwise: see `rmcore.models.batching`.)

A step whose loss or gradient is not finite must not change the weights. Either the host reads both before the update,
which on a GPU forces a host-device synchronisation in every step; or the update is masked by a flag on the device,
which stays set once it is set, and the host reads the metrics of many steps at once, later (`StepContext.failed`).

`Stepper` repeats a step after a failure that can be handled, from its start and with the same random numbers: after a
GPU ran out of memory with half the token budget; after torch.compile failed without it.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rmcore.core.errors import TrainingError
from rmcore.models.compiling import COMPILE_ERRORS, CompiledLayers
from rmcore.models.packing.forward import rewards_of
from rmcore.models.packing.layout import Rows
from rmcore.models.precision import precision_context
from rmcore.training.feed import Batch, StepFeed
from rmcore.training.losses import PairLoss, split_rewards
from rmcore.training.optimizers import OptimizerSet
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import StepResult
from rmcore.training.sharding import between_micro_batches
from rmcore.training.state import random_state, set_random_state
from rmcore.training.train_mode import HalfWeights

Forward = Callable[[Rows, Any], tuple[Tensor, Tensor]]
"""(rows, labels) of a micro-batch -> its summed loss, 0-d, and its (P,) margins, of P compared answers."""


class PartialUpdateError(TrainingError):
    """An update failed after it had changed some of the weights, so they belong to no step."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The model, optimizer and settings that stay the same from step to step."""

    model: torch.nn.Module
    forward: Forward
    optimizer: OptimizerSet
    clip: float
    """Largest gradient norm; a larger gradient is scaled down to it."""
    device: torch.device
    ranks: Ranks = ALONE
    failed: Tensor | None = None
    """0-d float32 on the device, for an optimizer that `can_skip`: set to 1 by the first step that is not finite, after
    which no update is applied. None: the host reads the metrics of each step before its update."""
    compiled: CompiledLayers | None = None
    """The compiled layers that gradients are computed with; None: layers are not compiled."""
    half: HalfWeights | None = None
    """bfloat16 copies of the weights that gradients are computed with, in place of autocast; None: the float32
    weights themselves."""
    holds_whole: bool = True
    """Whether each of several ranks has memory for all gathered weights and gradients between the micro-batches of a
    step; see `between_micro_batches`."""

    @property
    def deferred(self) -> bool:
        """Whether the host reads the metrics of many steps at once, after their updates."""
        return self.failed is not None

    @contextmanager
    def compute_context(self) -> Iterator[None]:
        """Compute with compiled layers and bfloat16 copies of the weights inside the block, where they are in use."""
        with ExitStack() as stack:
            for part in (self.compiled, self.half):
                if part is not None:
                    stack.enter_context(part.active())
            yield


@dataclass(frozen=True, slots=True)
class PendingStepMetrics:
    """The metrics of one step on the device where they were computed."""

    step: int
    pair_ids: Sequence[str]
    num_terms: float
    """Divisor of the summed loss: the number of pairs, or of weighted likelihood terms of other observations."""
    numbers: Tensor
    """(7,) float64, over all ranks: summed loss, wins, summed margin, number of margins, tokens, real tokens, gradient
    norm."""

    def not_finite(self) -> Tensor:
        """Return a 0-d bool on the device: whether this step must not change the weights."""
        return ~(self.numbers[0].isfinite() & self.numbers[6].isfinite())

    def result(self, numbers: Sequence[float]) -> StepResult:
        """Return the result of the step from its `numbers`, as read from the device.

        Raises:
            TrainingError: the step was not finite.
        """
        loss_sum, wins, margin_sum, num_margins, num_tokens, num_real_tokens, norm = numbers
        num_pairs = len(self.pair_ids)
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            named = ", ".join(self.pair_ids[:4]) + (", ..." if num_pairs > 4 else "")
            raise TrainingError(
                f"step {self.step}: loss {loss_sum / self.num_terms:.4g}, gradient norm {norm:.4g}: not finite (pairs "
                f"{named}). The update was not applied. Lower the learning rate, lengthen the warm-up, or look at "
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
    """Return the computation of one micro-batch, from its rows to its summed loss, as one function."""

    def forward(rows: Rows, target_margins: Tensor) -> tuple[Tensor, Tensor]:
        with precision_context(precision, device):
            rewards = rewards_of(model, rows)  # (R,), R = 2P
        # Outside autocast: the loss is computed in float32 whatever the model's precision.
        chosen, rejected = split_rewards(rewards)  # (P,), (P,)
        return loss(chosen, rejected, target_margins), chosen - rejected

    return forward


def accumulate_gradient(context: StepContext, batches: Sequence[Batch], *, num_terms: float) -> Tensor:
    """Add the gradient of this rank's share of the mean loss to `.grad`.

    Args:
        context: model, loss and ranks.
        batches: this rank's micro-batches. The weight of a micro-batch (1 except with plain batching) scales its
            gradient, not the returned loss.
        num_terms: divisor of the summed loss: the terms (mostly pairs) of the whole step over all ranks.

    Returns:
        (4,) float64 on the device, over this rank: summed loss, wins of the chosen side with ties counted half, summed
        margin, number of margins.
    """
    with context.compute_context():
        return _accumulate(context, batches, num_terms)


def _accumulate(context: StepContext, batches: Sequence[Batch], num_terms: float) -> Tensor:
    device = context.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for position, batch in enumerate(batches):
        between_micro_batches(context.model, last=position == len(batches) - 1, whole=context.holds_whole)
        moved = batch.to(device)
        loss, margins = context.forward(moved.rows, moved.labels)
        if batch.idle:
            # All ranks gather sharded weights and reduce gradients together: if one skipped its backward pass, the
            # others would wait for it for ever.
            (0.0 * loss).backward()
            continue
        # FSDP averages gradients over ranks, and the sum is needed.
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
) -> PendingStepMetrics:
    """Run one optimizer step.

    Where the context is deferred, nothing here waits for the device, and `read_steps` raises the errors instead.

    Args:
        context: model, loss, optimizer and ranks.
        batches: this rank's micro-batches.
        step: number of the step, counted from 1.
        pair_ids: the pairs of the step over all ranks.
        num_terms: divisor of the summed loss; None: the number of pairs.

    Raises:
        TrainingError: loss or gradient is not finite. The weights are as before the step.
        PartialUpdateError: the update ran out of memory.
        torch.OutOfMemoryError: the computation of a gradient ran out of memory. The weights are as before the step.
    """
    optimizer = context.optimizer
    terms = len(pair_ids) if num_terms is None else num_terms
    # 1. The gradient of this rank's share of the mean loss, micro-batch by micro-batch.
    optimizer.zero_grad()
    sums = accumulate_gradient(context, batches, num_terms=terms)
    # 2. The step's numbers over all ranks. (Sharded gradients are summed over ranks by now.)
    # new_full fills on the device; a tensor from Python numbers would be copied there and force a synchronisation.
    tokens = sums.new_full((1,), sum(batch.rows.num_tokens for batch in batches))
    real_tokens = sums.new_full((1,), sum(batch.rows.num_real_tokens for batch in batches if not batch.idle))
    totals = context.ranks.sum(torch.cat([sums, tokens, real_tokens]))  # (6,): one all-reduce for all
    norm = _gradient_norm(context, clips=context.failed is None)
    numbers = torch.cat([totals, norm.double()[None]])
    # 3. A step that is not finite must not change the weights: read now and raised, or masked and read later.
    divisor = None
    if context.failed is None:
        pending = PendingStepMetrics(step, pair_ids, terms, numbers.cpu())
        pending.result(pending.numbers.tolist())  # raises before the update
        if optimizer.sharpness_aware:
            _sharpness_aware_gradient(context, batches, step=step, num_terms=terms)
    else:
        pending = PendingStepMetrics(step, pair_ids, terms, numbers)
        context.failed.logical_or_(pending.not_finite())
        # Clips as `clip_grads_with_norm_` does, in the pass of the update over the gradients and not in one of its own.
        divisor = ((norm.float() + 1e-6) / context.clip).clamp(min=1.0)
    # 4. The update.
    try:
        optimizer.step(skip=context.failed, divisor=divisor)
    except torch.OutOfMemoryError as error:
        raise PartialUpdateError(
            f"step {step}: out of memory in the update ({error}). The optimizer's state does not fit next to the model "
            "with any token budget. Use another optimizer (the state of sgd is half of adamw's) or LoRA. "
            "The checkpoints on disk are complete."
        ) from error
    return pending


def read_steps(steps: Sequence[PendingStepMetrics]) -> Iterator[StepResult]:
    """Wait for the device once, then yield the results of these consecutive steps in order.

    Raises:
        TrainingError: at the first step that was not finite. Neither its update nor a later one was applied.
    """
    rows = torch.stack([pending.numbers for pending in steps]).tolist()
    return (pending.result(numbers) for pending, numbers in zip(steps, rows, strict=True))


def _sharpness_aware_gradient(context: StepContext, batches: Sequence[Batch], *, step: int, num_terms: float) -> None:
    """Replace the gradient by that at SAM's perturbed weights, and restore the weights."""
    optimizer = context.optimizer
    try:
        optimizer.ascend()
        optimizer.zero_grad()
        accumulate_gradient(context, batches, num_terms=num_terms)
    finally:
        optimizer.descend()
    if not _gradient_norm(context, clips=True).isfinite():
        raise TrainingError(
            f"step {step}: the gradient at the perturbed weights is not finite. The update was not applied. Lower "
            "the learning rate."
        )


def _gradient_norm(context: StepContext, *, clips: bool) -> Tensor:
    """Return the norm of the gradient, over all ranks, 0-d on the device; then clip the gradient if `clips`."""
    with_gradient = {p: p.grad for p in context.model.parameters() if p.grad is not None}
    if any(gradient.dtype == torch.bfloat16 for gradient in with_gradient.values()):  # torch would round their norms
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in with_gradient.values()]
        norm: Tensor = torch.stack(norms).norm()
    else:
        norm = torch.nn.utils.get_total_norm(with_gradient.values())
    if clips:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, context.clip, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Stepper:
    """Runs the steps of one training, one after the other."""

    def __init__(self, context: StepContext, feed: StepFeed) -> None:
        self.context, self.feed = context, feed
        self.token_budget = feed.token_budget
        """Halved whenever a step runs out of memory."""
        self._pending: list[PendingStepMetrics] = []
        self._since = 0.0

    def run(self, step: int, indices: Sequence[int], batches: Sequence[Batch]) -> None:
        """Run step `step` (counted from 1) over the pairs at `indices`, which `batches` holds as micro-batches.

        Raises:
            TrainingError: see `train_step`; or not even single pairs fit into memory. The weights are as before the
                step, except after a PartialUpdateError.
        """
        if not self._pending:
            self._since = time.perf_counter()
        self.context.model.train()
        pair_ids = [self.feed.pairs[index].pair_id for index in indices]
        num_terms = self.feed.num_terms(indices)
        random = random_state(self.context.device)
        if self.token_budget != self.feed.token_budget:  # halved since these were built
            batches = self._cut(indices)
        while True:
            try:
                self._pending.append(
                    train_step(self.context, batches, step=step, pair_ids=pair_ids, num_terms=num_terms)
                )
                return
            except torch.OutOfMemoryError as error:
                self._halve_budget(step, max(batch.rows.num_tokens for batch in batches), error)
            except COMPILE_ERRORS as error:
                if self.context.compiled is None:
                    raise
                if self.feed.ranks.world > 1:
                    raise TrainingError(
                        f"step {step}: torch.compile failed on one of {self.feed.ranks.world} processes ({error}), "
                        "which cannot repeat the step alone. Run again with train.compile=false."
                    ) from error
                self.context.compiled.give_up(error)
            # Not in the except block: its traceback holds the tensors of the failed attempt.
            self.context.optimizer.zero_grad()
            set_random_state(random, self.context.device)
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()
            batches = self._cut(indices)

    def results(self) -> Iterator[tuple[StepResult, float]]:
        """Wait for the device, and yield the result of each step since the last call with its mean wall seconds.

        Raises:
            TrainingError: see `read_steps`. The weights are those of the last result; the random state is not.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        results = read_steps(pending)
        seconds = (time.perf_counter() - self._since) / len(pending)
        for result in results:
            yield result, seconds

    def _cut(self, indices: Sequence[int]) -> list[Batch]:
        batches = self.feed.cut(indices, self.token_budget)
        return [batch.pin_memory() for batch in batches] if self.context.device.type == "cuda" else batches

    def _halve_budget(self, step: int, largest: int, error: torch.OutOfMemoryError) -> None:
        """Set the token budget to half of `largest`, the tokens of the largest micro-batch of the failed attempt."""
        least = self.feed.least_budget()
        if largest <= least:
            raise TrainingError(
                f"step {step}: out of memory with {largest} tokens in a micro-batch, and one {self.feed.named} needs "
                f"up to {least} ({error}). Lower max_seq_len, or use bf16, gradient_checkpointing or LoRA."
            ) from error
        halved = max(largest // 2, least)
        if self.feed.ranks.world > 1:
            raise TrainingError(
                f"step {step}: out of memory with {largest} tokens in a micro-batch on one of {self.feed.ranks.world} "
                f"processes, which cannot repeat it alone ({error}). Run again with token_budget={halved} or less."
            ) from error
        plain = self.feed.plain  # its loss depends on the cut
        print(
            f"warning: step {step} ran out of memory with {largest} tokens in a micro-batch. It is repeated with "
            f"token_budget={halved}, as are later steps. The gradient is {'not the same' if plain else 'the same'}.",
            file=sys.stderr,
        )
        self.token_budget = halved
