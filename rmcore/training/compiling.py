"""torch.compile of a micro-batch's whole computation, and what happens when it cannot be compiled."""

import sys

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError

from rmcore.models.packing.rows import Rows
from rmcore.training.step import Forward

COMPILE_ERRORS = (TorchDynamoException, CppCompileError)
"""Exceptions of a failed compilation: of the forward pass, or of the backward pass, compiled when first run."""


class CompiledForward:
    """A `Forward` compiled with dynamic shapes, until `give_up`; then the plain one.

    Micro-batches differ in rows and length. With dynamic shapes few compiled graphs serve them all: one for two pairs
    and more, one for single pairs, because torch.compile always treats a size of 1 as a constant, and for packed rows
    one more where no pair shares a prompt. Each takes minutes of C++ compilation on a CPU, once.
    """

    def __init__(self, forward: Forward) -> None:
        self._eager = forward
        self._compiled: Forward | None = torch.compile(forward, dynamic=True)

    @property
    def works(self) -> bool:
        """Whether the compiled form is in use."""
        return self._compiled is not None

    def give_up(self, error: Exception) -> None:
        """Go on without compilation after `error`, and say so."""
        reason = next(iter(str(error).strip().splitlines()), "no message")
        print(
            f"warning: torch.compile failed ({type(error).__name__}: {reason}); training continues without it: slower, "
            "same result. Leave compile off, or repair the compiler (C++ on a CPU, Triton on a GPU).",
            file=sys.stderr,
        )
        self._compiled = None

    def __call__(self, rows: Rows, target_margins: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one micro-batch.

        Raises:
            one of COMPILE_ERRORS: it could not be compiled.
        """
        return (self._compiled or self._eager)(rows, target_margins)
