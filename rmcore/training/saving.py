"""When resumable states are saved, and in which thread, so that the steps wait for little of it.

One process copies the tensors and continues with the next step; a thread writes the copy, digests and syncs it. Several
processes write together, between two steps.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from rmcore.core.errors import StoreError
from rmcore.models.device import free_bytes
from rmcore.training import resume
from rmcore.training.memory import peak_memory_bytes
from rmcore.training.ranks import Ranks
from rmcore.training.state import write_alone
from rmcore.training.state_transfer import write_parts

COSTS = 50
"""Least time between two states, in times for which the steps waited for the last one: 2 % of the training at most."""
COPY_SHARE = 0.5
"""Share of the free memory that a copy may take; the rest is for the cache of what is written, and for all others.
Trainings in other slots of the device that make their first copy in the same moment count the same memory as free."""
CPU = torch.device("cpu")


class StateSaver:
    """Saves the states of one training; to be entered, and left when no further step follows.

    While a state is being written none is due: the next one is saved after the first step that ends later.

    Args:
        folder: the training's.
        every_seconds: least time between two states.
        ranks: the processes that train together; all of them save.
    """

    def __init__(self, folder: Path, every_seconds: float, ranks: Ranks) -> None:
        self.folder, self.every_seconds, self.ranks = folder, every_seconds, ranks
        self._due = time.monotonic() + every_seconds
        self._thread = ThreadPoolExecutor(1, "state")
        self._writing: Future[None] | None = None
        self._copy: dict[str, Tensor] = {}  # kept from state to state: fresh memory costs more than the copying
        self._is_left = self._has_told = self._is_rarer = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the state that is being written; one that a second Ctrl-C leaves behind ends with its next file."""
        self._is_left = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._thread.shutdown(wait=False)
        try:
            if not self._is_left:
                self.wait()
        except StoreError as error:  # no step follows that would need it, and no other error is to be hidden by it
            print(f"warning: {error}", file=sys.stderr)

    def is_due(self) -> bool:
        """Whether a state is to be saved after this step.

        Raises:
            StoreError: the one before it could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is None and time.monotonic() >= self._due

    def wait(self) -> None:
        """Wait until no state is being written.

        Raises:
            StoreError: it could not be written. Earlier states are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        checkpoints: Sequence[Path],
        *,
        last: bool,
    ) -> None:
        """Save the state of `step`; every rank calls it. What is given may change as soon as it returns.

        Args:
            step: number of optimizer steps done.
            tensors: see `rmcore.training.state.collect_state`.
            record: the numbers.
            checkpoints: folders that the record names.
            last: whether to return when the state is on disk, as no further step follows.

        Raises:
            StoreError: this state, or the one before it, could not be written; of the last one only this. Earlier
                states are untouched.
        """
        is_copied = not last and self.ranks.world == 1 and self._has_room(tensors)
        started = time.monotonic()  # room is made once, which says nothing of the next state
        try:
            self.wait()
        except StoreError as error:
            if not last:
                raise
            print(f"warning: {error}", file=sys.stderr)
        if self.ranks.world > 1 and not self.ranks.is_main:
            write_parts(tensors, self.folder, None, self.ranks)
        else:
            copy = self._copied(tensors) if is_copied else None
            with ExitStack() as stack:
                place, digests = stack.enter_context(resume.new_state(self.folder, step, record, checkpoints))
                if self.ranks.world > 1:
                    digests.update(write_parts(tensors, self.folder, place, self.ranks))
                elif copy is None:
                    digests.update(write_alone(tensors, place))
                else:
                    self._writing = self._thread.submit(self._write, copy, place, digests, stack.pop_all())
        self.ranks.wait()
        now = time.monotonic()
        pause = COSTS * (now - started)
        if pause > self.every_seconds > 0 and self.ranks.is_main and not last and not self._is_rarer:
            self._is_rarer = True
            print(
                f"note: resumable states are saved every {pause / 60:.0f} min in place of {self.every_seconds / 60:g}: "
                f"steps waited {now - started:.1f} s for the last one.",
                file=sys.stderr,
            )
        self._due = now + max(self.every_seconds, pause)

    def _write(self, tensors: Mapping[str, Tensor], place: Path, digests: dict[str, str], state: ExitStack) -> None:
        with state:
            for name, digest in write_alone(tensors, place):
                digests[name] = digest
                if self._is_left:
                    raise StoreError("the training was ended before its state was written.")

    def _has_room(self, tensors: Mapping[str, Tensor]) -> bool:
        """Make room for a copy in host memory, pinned for tensors on a GPU; False where there is none for it."""
        needed = sum(map(_host_bytes, tensors.values()))
        if not self._copy:
            regrown = peak_memory_bytes(CPU) - psutil.Process().memory_info().rss  # what a step takes, and gives back
            if needed > COPY_SHARE * (free_bytes(CPU) - max(0, regrown)):
                return self._no_room(needed)
        try:
            for name, tensor in tensors.items():
                room = self._copy.get(name)
                if room is None or room.shape != tensor.shape:
                    self._copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        except RuntimeError:  # of torch, where memory cannot be pinned
            self._copy = {}
            return self._no_room(needed)
        return True

    def _no_room(self, needed: int) -> bool:
        if not self._has_told:
            print(
                f"note: steps wait while a resumable state is written: free memory has no room for a copy of "
                f"it ({needed / 2**30:.1f} GiB).",
                file=sys.stderr,
            )
        self._has_told = True
        return False

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            self._copy[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copy[name] for name in tensors}


def _host_bytes(tensor: Tensor) -> int:
    """Host memory of a copy: torch rounds each pinned block up to a power of two (CachingHostAllocator)."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes
