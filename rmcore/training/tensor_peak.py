"""The most bytes of tensors that a block of code had alive at once, of those that it made.

A process's resident memory depends on the allocator and on what ran before; this does not. It watches every operation
that torch dispatches, so the block runs slower, and computes the same.

Source: the method of torch.distributed._tools.mem_tracker, which also sorts the bytes by kind and module.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):
    """Use as a context manager; then `num_bytes` is the peak.

    Counted are storages, each once, whatever views it has, from the operation that returns them first until they are
    freed. Storages that are older than the block (weights, optimizer state, inputs) are not counted, even where an
    operation changes them in place. Not seen: what a kernel allocates and frees inside, and what does not run in this
    thread.

    Example:
        >>> with TensorPeak() as peak:
        ...     a = torch.zeros(1000)
        ...     b = a.view(10, 100).add_(1)
        ...     del a, b
        ...     c = torch.zeros(500)
        >>> peak.num_bytes
        4000
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Most bytes alive at once so far."""
        self._alive: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._now = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count the storages that it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # What torch.tensor and from_numpy make is handed to this one operation before any other.
        older = set() if func is torch.ops.aten.lift_fresh.default else set(_storages((args, kwargs)))
        for storage in _storages(result):
            if storage not in older:
                self._count(storage)
        self.num_bytes = max(self.num_bytes, self._now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._freed)
        if reference not in self._alive:
            self._alive[reference] = storage.nbytes()
            self._now += storage.nbytes()

    def _freed(self, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        self._now -= self._alive.pop(reference)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in nested lists, tuples and dictionaries."""
    return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))
