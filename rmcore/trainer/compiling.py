"""torch.compile of a micro-batch's whole computation, and what happens when it cannot be compiled."""

import sys

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError

from rmcore.trainer.step import Forward


class CompiledForward:
    """A `Forward` compiled with dynamic shapes; at the first failure it says so and goes on without.

    Micro-batches differ in rows and length: with dynamic shapes one compiled graph serves them all.
    """

    def __init__(self, forward: Forward) -> None:
        self._eager = forward
        self._compiled: Forward | None = torch.compile(forward, dynamic=True)

    @property
    def works(self) -> bool:
        """Whether the compiled form is in use."""
        return self._compiled is not None

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, target_margins: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one micro-batch."""
        if self._compiled is not None:
            try:
                return self._compiled(input_ids, attention_mask, target_margins)
            except (TorchDynamoException, CppCompileError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                print(
                    f"warning: torch.compile failed ({type(error).__name__}: {reason}); training goes on without it: "
                    "slower, same result. Leave compile off, or mend the compiler (C++ on a CPU, Triton on a GPU).",
                    file=sys.stderr,
                )
                self._compiled = None
        return self._eager(input_ids, attention_mask, target_margins)
