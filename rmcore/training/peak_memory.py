"""The memory that training needs beside the model: gradients, activations, temporaries, optimizer state.

In bytes of tensors, so that recipes can be compared: resident memory says more about allocator and libraries.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rmcore.training.compiling import CompiledForward
from rmcore.training.record import Progress
from rmcore.training.step import StepContext
from rmcore.training.tensor_peak import TensorPeak

MEASURED_STEP = 2
"""On a CPU: the first step that has an optimizer state from its beginning."""


class PeakMeter:
    """Measures one training and notes the peak in its progress, from where it is saved, so a kill does not lose it.

    On a GPU the device's own count is read: most bytes allocated since the meter was made, less those of then (the
    weights); evaluations and callbacks are in it. On a CPU one step is measured, by `TensorPeak`, which makes that step
    slower and changes no number. Several processes on a CPU, and compiled code there, are not measured: torch does not
    dispatch what they do.
    """

    def __init__(self, context: StepContext, at: Progress, num_steps: int) -> None:
        """Begin, with the weights in their place and nothing else."""
        self._context, self._at = context, at
        self._on_gpu = context.device.type == "cuda"
        dispatched = context.ranks.world == 1 and not isinstance(context.forward, CompiledForward)
        self._measured_step = min(MEASURED_STEP, num_steps) if dispatched and not self._on_gpu else None
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(context.device)  # which may be that of loading
            self._weights = torch.cuda.memory_allocated(context.device)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run step `step` (counted from 1) inside the block."""
        if step != self._measured_step:
            yield
            return
        state_bytes = self._context.optimizer.state_bytes
        with TensorPeak() as peak:
            yield
        self._at.peak_training_bytes = state_bytes + peak.num_bytes

    def note(self) -> None:
        """Note what a GPU counted so far; an earlier attempt may have seen more."""
        if self._on_gpu:
            seen = torch.cuda.max_memory_allocated(self._context.device) - self._weights
            self._at.peak_training_bytes = max(seen, self._at.peak_training_bytes or 0)
