"""Steps that are repeated after a failure that can be handled, from their start and with the same random numbers.

After a GPU ran out of memory with half the token budget; after torch.compile failed without it.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from rmcore.core.errors import TrainingError
from rmcore.models.compiling import COMPILE_ERRORS
from rmcore.training.feed import StepFeed
from rmcore.training.state import random_state, set_random_state
from rmcore.training.step import Batch, PendingStepMetrics, StepContext, StepResult, read_steps, train_step


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
