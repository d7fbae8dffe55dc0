"""torch.compile of each transformer layer, and what happens when one cannot be compiled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import CppCompileError

from rmcore.models.layers import transformer_layers

COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError)
"""Exceptions of a failed compilation: of the forward pass, or of the backward pass, compiled when first run."""


class CompiledLayers:
    """The layers of a model compiled with dynamic shapes, where they are `active`, until `give_up`; else plain.

    Layers of one class share their code, so whatever the depth of the model few graphs are compiled: one for all rows
    of two sequences and more, and perhaps one for a case in which two sizes happen to be equal. The whole model as
    one graph took minutes at 2 layers (benchmarks/results/training-throughput.md).

    `forward` is compiled rather than the module (`Module.compile`): hooks, FSDP2's among them, stay outside, and
    recomputation in the backward pass inside.
    """

    def __init__(self, model: nn.Module, **how: Any) -> None:
        """Prepare the layers of `model`, which must be in its training form already: sharded, if it will be.

        `how` are further arguments of `torch.compile`.
        """
        layers = transformer_layers(model)
        # Of the class: the last layer may have a forward of its own, which rows of other plans use.
        forwards = [MethodType(type(layer).forward, layer) for layer in layers]
        self._compiled = [
            (layer, torch.compile(forward, dynamic=True, fullgraph=True, **how))
            for layer, forward in zip(layers, forwards, strict=True)
        ]
        if not layers:
            print(
                f"note: train.compile compiles layer by layer, and {type(model).__name__} has no layers of a class "
                "that is known; it trains without.",
                file=sys.stderr,
            )

    @property
    def works(self) -> bool:
        """Whether compiled layers are in use."""
        return bool(self._compiled)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the layers run compiled inside the block, backward pass included.

        Outside they are the plain ones, which have second derivatives; compiled code has none. Parameters and their
        names are the same.
        """
        compiled = list(self._compiled)
        before = [vars(layer).get("forward") for layer, _ in compiled]  # the last layer of packed rows has its own
        for layer, forward in compiled:
            layer.forward = forward
        try:
            yield
        finally:
            for (layer, _), own in zip(compiled, before, strict=True):
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` gives with compiled layers; with plain ones, from now on, where compiling them fails.

        For a forward pass; a training repeats the whole step.
        """
        try:
            with self.active():
                return compute()
        except COMPILE_ERRORS as error:
            if not self.works:
                raise
            self.give_up(error)
        return compute()

    def give_up(self, error: Exception) -> None:
        """Continue without compilation after `error`, and say so."""
        reason = next(iter(str(error).strip().splitlines()), "no message")
        print(
            f"warning: torch.compile failed ({type(error).__name__}: {reason}); it continues without: slower, "
            "same result. Repair the compiler (C++ on a CPU, Triton on a GPU); a training leaves it out with "
            "train.compile=false.",
            file=sys.stderr,
        )
        self._compiled = []
