"""Counting products with a matrix, and the memory of a Lanczos basis: what estimators need besides their maths."""

from collections.abc import Callable

import torch
from torch import Tensor

from rmcore.landscape.eigensolvers import Product
from rmcore.training.memory import free_bytes

Progress = Callable[[int, int], None]
"""Called as progress(done, total)."""


class ProductCounter:
    """Products done, of at most `total`, each reported to `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress, self.done = total, progress, 0

    def counting(self, product: Product) -> Product:
        """The same product, counted: of one vector (N,), or of K at once (K, N)."""

        def counted(vectors: Tensor) -> Tensor:
            images = product(vectors)
            self.add(1 if vectors.ndim == 1 else len(vectors))
            return images

        return counted

    def add(self, number: int) -> None:
        """So many more products are done."""
        for _ in range(number):
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)

    def finish(self) -> None:
        """Close the gap where fewer products sufficed."""
        if self.progress is not None and self.done < self.total:
            self.progress(self.done, self.done)


def basis_excess(num_steps: int, size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a Lanczos basis does not fit into the free memory, or None where it does."""
    needed, free = min(num_steps, size) * size * dtype.itemsize, free_bytes(device)
    if needed <= free:
        return None
    return (
        f"the Lanczos basis of {min(num_steps, size):,} steps over {size:,} parameters takes {needed / 1e9:,.1f} GB "
        f"and {free / 1e9:,.1f} GB are free."
    )
