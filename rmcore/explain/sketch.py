"""Inner products of all pairs' margin gradients from sketches of them: one gradient a pair, in memory that is given.

The exact products of n gradients over N weights take n^2 N operations, minutes for 2,000 pairs of a model of 6 M. Here
each gradient is shortened to `width` numbers as it comes: its coordinates get random signs, and each stretch of `width`
of them is added to the sum at a random turn, so that any two coordinates of different stretches meet with probability
1/width. For sketches S,

    E <S g, S h> = <g, h>,      Var <S g, S h> <= 2 |g|^2 |h|^2 / width,

so at 65,536 products are off by some half a percent of the norms. Gradients of no more than `width` numbers, and those
of the token embeddings, which are sparse, are multiplied exactly.

Source: Charikar, Chen and Farach-Colton 2002 (count sketch); Weinberger et al. 2009, arXiv:0902.2206 (its inner
products). Random projection of gradients for influence: Park et al. 2023 (TRAK), arXiv:2303.14186.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from rmcore.core.errors import CurvatureError
from rmcore.core.progress import Report, silent
from rmcore.landscape.margin_gram import FIRST_DERIVATIVE_KERNELS, MEMORY_SHARE, MarginRows
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.parameters import measuring
from rmcore.landscape.vectors import inner_products
from rmcore.training.memory import free_bytes

WIDTH = 2**16
LEAST_WIDTH = 2**12
"""Below, a product would be off by more than two percent of the norms, as large as many of the products."""


class SketchedGram(NamedTuple):
    """The inner products of n margin gradients, and the margins.

    products: (n, n) float64 on the CPU.
    margins: (n,) float64 on the CPU, logits.
    width: numbers that each gradient was shortened to; None where the products are exact.
    """

    products: Tensor
    margins: Tensor
    width: int | None


def sketched_gram(
    operator: PairCurvature,
    *,
    width: int | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    report: Report = silent,
) -> SketchedGram:
    """Inner products of the gradients of all margins of `operator`.

    Args:
        operator: model, pairs and parameters; its matrix is not used.
        width: see above, None: `WIDTH`; less where the memory does not hold it, down to `LEAST_WIDTH`.
        memory_bytes: for sketches, embedding gradients and products on the model's device; None takes half of what is
            free. The model and the activations of one pair come on top.
        seed: of signs and turns.
        report: called after each gradient.

    Raises:
        CurvatureError: a margin or gradient is not finite, or the memory does not hold the narrowest sketches.
        ModelError: the model does not give one number a row.
    """
    with measuring(operator.module, operator.parameters), sdpa_kernel(FIRST_DERIVATIVE_KERNELS):
        rows = MarginRows(operator)
        num_pairs = len(rows.pairs)
        room = int(MEMORY_SHARE * free_bytes(operator.device)) if memory_bytes is None else memory_bytes
        room -= 8 * num_pairs**2 + (rows.tokens.num_bytes if rows.tokens else 0) + 3 * rows.row_bytes
        fits = max(room, 0) // (num_pairs * torch.finfo(rows.dtype).bits // 8)
        sketch = _Sketch(rows, min(WIDTH if width is None else width, fits), seed)
        row = torch.empty(rows.num_columns, dtype=rows.dtype, device=rows.device)
        store = torch.empty((num_pairs, sketch.num_numbers), dtype=rows.dtype, device=rows.device)
        for index in range(num_pairs):
            rows.write(index, row)
            store[index] = sketch(row)
            report(index + 1, num_pairs, "margin gradients")
        products = inner_products(store, store).double()
        if rows.tokens is not None:
            products += rows.tokens.gram(num_pairs)
    if not bool(torch.isfinite(products).all()):
        raise CurvatureError(
            f"the margin gradients of {num_pairs} pairs have NaN or infinite entries: weights overflow. Evaluate the "
            "checkpoint first; go back to an earlier one, or use float64."
        )
    return SketchedGram(products.cpu(), rows.margins.cpu(), sketch.width)


class _Sketch:
    """Shortens the dense columns of a row.

    Raises:
        CurvatureError: `width` is below `LEAST_WIDTH`, and the rows are longer.
    """

    def __init__(self, rows: MarginRows, width: int, seed: int) -> None:
        columns = rows.num_columns
        self.width = None if columns <= width else width
        self.num_numbers = columns if self.width is None else width
        if self.width is None:
            return
        if width < LEAST_WIDTH:
            raise CurvatureError(
                f"the memory leaves {width} numbers for each of {len(rows.pairs)} margin gradients of {columns:,}, and "
                f"products of fewer than {LEAST_WIDTH} are too far off. Give more memory, fewer pairs, or a smaller "
                "set of parameters (a layer, 'head')."
            )
        draw = torch.Generator().manual_seed(seed)
        signs = 2 * torch.randint(2, (columns,), generator=draw, dtype=torch.int8) - 1
        self._signs = signs.to(rows.device).split(width)
        self._turns = torch.randint(width, (len(self._signs),), generator=draw).tolist()

    def __call__(self, row: Tensor) -> Tensor:
        """Shorten a row of (num_columns,) to (num_numbers,)."""
        if self.width is None:
            return row
        found = row.new_zeros(self.num_numbers)
        for part, signs, turn in zip(row.split(self.num_numbers), self._signs, self._turns, strict=True):
            signed = part * signs
            first = min(len(signed), self.num_numbers - turn)  # the rest begins anew at the front
            found[turn : turn + first] += signed[:first]
            found[: len(signed) - first] += signed[first:]
        return found
