"""The sides that one forward pass computes: as rows padded to one length, or packed into one row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rmcore.models.packing.layout import PackedRow


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """R sides as rows of one length L."""

    input_ids: Tensor  # (R, L) long, right-padded
    attention_mask: Tensor  # (R, L) long, 1 on real tokens
    num_real_tokens: int
    """Tokens that are not padding."""

    @property
    def num_tokens(self) -> int:
        """R x L: tokens computed."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "PaddedRows":
        """The same on `device`; from page-locked memory without waiting."""
        ids, mask = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.attention_mask))
        return PaddedRows(ids, mask, self.num_real_tokens)

    def pin_memory(self) -> "PaddedRows":
        """The same in page-locked memory, from where a GPU copies asynchronously."""
        return PaddedRows(self.input_ids.pin_memory(), self.attention_mask.pin_memory(), self.num_real_tokens)


Rows = PaddedRows | PackedRow
"""The sides that one forward pass computes, in either form."""


def pad_rows(sides: Sequence[Sequence[int]], *, pad_id: int) -> PaddedRows:
    """Right-pad R sides to the longest; the mask alone says what is real."""
    longest = max(len(side) for side in sides)
    input_ids = np.full((len(sides), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros((len(sides), longest), dtype=np.int64)
    for position, side in enumerate(sides):
        input_ids[position, : len(side)] = side
        attention_mask[position, : len(side)] = 1
    return PaddedRows(torch.from_numpy(input_ids), torch.from_numpy(attention_mask), sum(len(side) for side in sides))
