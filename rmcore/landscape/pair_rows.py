"""Micro-batches of whole pairs as the landscape reads them, and the margins of one.

The trainer's micro-batches fit; so does any mapping with the two tensors, which is what a notebook has at hand.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rmcore.core.errors import DataError, ModelError
from rmcore.training.losses import split_rewards


class PairRows(Protocol):
    """The rows of P whole pairs, R = 2P: the P chosen rows first, then the P rejected ones, in the same order.

    `rmcore.models.packing.rows.PaddedRows` is one.
    """

    @property
    def input_ids(self) -> Tensor:
        """(R, L) long."""

    @property
    def attention_mask(self) -> Tensor:
        """(R, L) long, 1 on real tokens."""


MicroBatch = PairRows | Mapping[str, Tensor]
"""`PairRows`, or a mapping with its two names as keys."""


class Rows(NamedTuple):
    """A micro-batch after checking."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def num_pairs(self) -> int:
        """P."""
        return len(self.input_ids) // 2

    def pair_tokens(self) -> list[tuple[list[int], list[int]]]:
        """The real tokens of both sides of each pair."""
        sides = [ids[mask.bool()].tolist() for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)]
        return list(zip(sides[: self.num_pairs], sides[self.num_pairs :], strict=True))


def checked_rows(micro_batch: MicroBatch) -> Rows:
    """The two tensors of a micro-batch of whole pairs.

    Raises:
        DataError: a tensor is missing, shapes differ, or a pair was cut in two.
    """
    get = micro_batch.get if isinstance(micro_batch, Mapping) else partial(getattr, micro_batch)
    ids, mask = get("input_ids", None), get("attention_mask", None)
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        raise DataError(
            f"a micro-batch ({type(micro_batch).__name__}) lacks the tensors input_ids and attention_mask: "
            "it cannot be scored. Build them with rmcore.models.batching.pad_pairs."
        )
    if ids.ndim != 2 or len(ids) == 0 or len(ids) % 2 or mask.shape != ids.shape:
        raise DataError(
            f"a micro-batch has input_ids {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}: both must be "
            "(2P, tokens), chosen rows first. rmcore.models.batching.pad_pairs builds them and never cuts a pair."
        )
    return Rows(ids, mask)


def margins(module: nn.Module, rows: Rows, device: torch.device) -> Tensor:
    """(P,) reward_chosen - reward_rejected of one micro-batch, in logits, float32 or wider.

    Raises:
        ModelError: the model does not give one number a row.
    """
    logits = module(input_ids=rows.input_ids.to(device), attention_mask=rows.attention_mask.to(device)).logits
    if logits.shape != (len(rows.input_ids), 1):
        raise ModelError(
            f"the model gives logits {tuple(logits.shape)} for {len(rows.input_ids)} rows: a reward model has exactly "
            "one label. Load it with num_labels=1."
        )
    chosen, rejected = split_rewards(logits)
    return chosen - rejected
