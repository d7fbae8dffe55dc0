"""torch's varlen kernel on a CPU: attention in plain torch, sequence by sequence, with the kernel's own rules.

`torch.nn.attention.varlen` registers its operation for GPUs; importing this module registers it for tensors on a CPU
too. All around it is torch's: the checks of `varlen_attn`, what is kept for the backward pass, what is compiled.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

Options = tuple[float | None, bool]
"""Factor of the scores, and whether the model is causal."""


def sequences(rows: tuple[Tensor, ...], ends: tuple[Tensor, Tensor], options: Options) -> Iterator[tuple[Any, ...]]:
    """Each sequence: its place among queries and keys; query (h, q, D), key (h, k, D), weights (h, q, k), float64."""
    query, key = rows[0].double(), rows[1].double().repeat_interleave(rows[0].shape[1] // rows[1].shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if options[0] is None else options[0]
    for (a, b), (c, d) in zip(*(one.unfold(0, 2, 1).tolist() for one in ends), strict=True):
        own, own_key = query[a:b].transpose(0, 1), key[c:d].transpose(0, 1)
        scores = own @ own_key.transpose(1, 2) * scale
        if options[1]:  # aligned at the ends: the last query sees all keys
            scores = scores.masked_fill(~torch.ones(b - a, d - c).bool().tril(d - c - (b - a)), -torch.inf)
        yield slice(a, b), slice(c, d), own * scale, own_key * scale, scores.softmax(-1)


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert query.dtype == key.dtype == value.dtype
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key))
    assert max_q >= cu_seq_q.diff().max()
    assert max_k >= cu_seq_k.diff().max()
    assert window_size == ([-1, 0] if is_causal else [-1, -1])
    wide = value.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(0, 1)
    parts = [
        weights @ wide[:, keys]
        for _, keys, _, _, weights in sequences((query, key), (cu_seq_q, cu_seq_k), (scale, is_causal))
    ]
    out = torch.cat(parts, dim=1).transpose(0, 1).to(query.dtype).contiguous()
    return out, query.new_empty((query.shape[1], len(query)), dtype=torch.float), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    wide = value.double().repeat_interleave(repeats, dim=1).transpose(0, 1)
    given = grad_out.double().transpose(0, 1)
    grads = [torch.zeros(query.shape[1], len(one), one.shape[2], dtype=torch.float64) for one in (query, key, value)]
    for queries, keys, own, own_key, weights in sequences((query, key), (cu_seq_q, cu_seq_k), (scale, is_causal)):
        by_weight = given[:, queries] @ wide[:, keys].transpose(1, 2)
        by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True))
        grads[0][:, queries] += by_score @ own_key
        grads[1][:, keys] += by_score.transpose(1, 2) @ own
        grads[2][:, keys] += weights.transpose(1, 2) @ given[:, queries]
    # A key head's gradient is the sum over the query heads that share it.
    folded = [grads[0], *(one.unflatten(0, (-1, repeats)).sum(1) for one in grads[1:])]
    rows = zip(folded, (query, key, value), strict=True)
    return tuple(one.transpose(0, 1).to(like.dtype).contiguous() for one, like in rows)  # type: ignore[return-value]
