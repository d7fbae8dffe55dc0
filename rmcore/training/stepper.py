"""Steps that survive what can be survived: again from their start, with the same random numbers.

Where a GPU's memory runs out, under half the token budget; where torch.compile fails, without it.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from rmcore.core.errors import TrainingError
from rmcore.training.compiling import COMPILE_ERRORS
from rmcore.training.feed import StepFeed
from rmcore.training.state import random_state, set_random_state
from rmcore.training.step import Batch, StepContext, StepResult, UnreadStep, read_steps, train_step


class Stepper:
    """Runs the steps of one training, one after the other."""

    def __init__(self, context: StepContext, feed: StepFeed) -> None:
        self.context, self.feed = context, feed
        self.token_budget = feed.token_budget
        """Halved whenever a step runs out of memory."""
        self._unread: list[UnreadStep] = []
        self._since = 0.0

    def run(self, step: int, indices: Sequence[int], batches: Sequence[Batch]) -> None:
        """Run step `step` (counted from 1) over the pairs at `indices`, which come cut into `batches`.

        Raises:
            TrainingError: see `train_step`; or not even single pairs fit into memory. The weights are as before the
                step, but for a HalfUpdateError.
        """
        if not self._unread:
            self._since = time.perf_counter()
        self.context.model.train()
        pair_ids = [self.feed.pairs[index].pair_id for index in indices]
        num_terms = self.feed.num_terms(indices)
        random = random_state(self.context.device)
        if self.token_budget != self.feed.token_budget:  # halved since these were cut
            batches = self._cut(indices)
        while True:
            try:
                self._unread.append(
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
                        "which cannot do the step again alone; run again without compile."
                    ) from error
                self.context.compiled.give_up(error)
            # Outside of the handler, whose traceback holds the tensors of the failed attempt.
            self.context.optimizer.zero_grad()
            set_random_state(random, self.context.device)
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()
            batches = self._cut(indices)

    def results(self) -> Iterator[tuple[StepResult, float]]:
        """Yield results of the steps since the last call, in order, with wall seconds: equal shares of their time.

        Waits for the device.

        Raises:
            TrainingError: see `read_steps`. The weights are those of the last result; the random state is not.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return
        results = read_steps(unread)
        seconds = (time.perf_counter() - self._since) / len(unread)
        for result in results:
            yield result, seconds

    def _cut(self, indices: Sequence[int]) -> list[Batch]:
        batches = self.feed.cut(indices, self.token_budget)
        return [batch.pin_memory() for batch in batches] if self.context.device.type == "cuda" else batches

    def _halve_budget(self, step: int, largest: int, error: torch.OutOfMemoryError) -> None:
        """Allow half of `largest`, the tokens of the largest micro-batch that was tried."""
        least = self.feed.least_budget()
        if largest <= least:
            raise TrainingError(
                f"step {step}: out of memory with {largest} tokens in a micro-batch, and one {self.feed.named} needs "
                f"up to {least} ({error}); lower max_seq_len, or use bf16, gradient_checkpointing or LoRA."
            ) from error
        halved = max(largest // 2, least)
        if self.feed.ranks.world > 1:
            raise TrainingError(
                f"step {step}: out of memory with {largest} tokens in a micro-batch on one of {self.feed.ranks.world} "
                f"processes, which cannot do it again alone ({error}); run again with token_budget={halved} or less."
            ) from error
        plain = self.feed.plain  # its loss depends on the cut
        print(
            f"warning: step {step} ran out of memory with {largest} tokens in a micro-batch; it is done again with "
            f"token_budget={halved}, which is kept. The gradient is {'another one' if plain else 'the same'}.",
            file=sys.stderr,
        )
        self.token_budget = halved
