"""Counting products with a matrix, and the memory of a Lanczos basis: what estimators need besides their maths."""

import torch
from torch import Tensor

from rmcore.core.progress import Report
from rmcore.landscape.eigensolvers import Product
from rmcore.models.device import free_bytes


class ProductCounter:
    """Products done, of at most `total`, each reported."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.report, self.done = total, report, 0

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
            self.report(self.done, self.total, "products")

    def finish(self) -> None:
        """Close the gap where fewer products sufficed."""
        if self.done < self.total:
            self.report(self.done, self.done, "products")


def basis_excess(num_steps: int, size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a Lanczos basis does not fit into the free memory, or None where it does."""
    needed, free = min(num_steps, size) * size * dtype.itemsize, free_bytes(device)
    if needed <= free:
        return None
    return (
        f"the Lanczos basis of {min(num_steps, size):,} steps over {size:,} parameters takes {needed / 1e9:,.1f} GB "
        f"and {free / 1e9:,.1f} GB are free."
    )
