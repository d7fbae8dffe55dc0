"""Attention of a packed row as batched matrix products with an explicit softmax, for sequences short enough for it.

On a CPU torch's fused kernel computes one sequence a call, and its backward pass in bfloat16 takes two to ten times as
long as the matrix products in it. Here sequences of nearly equal length are padded to one shape and computed together,
in batches whose weights stay in a core's cache. `LONGEST` says up to which length that measured better
(table in benchmarks/results/training-throughput.md); longer sequences keep the
fused kernel.

The arithmetic is that of `scaled_dot_product_attention` up to rounding, and it can be differentiated twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd import grad

from rmcore.models.packing.layout import Span

LONGEST = {torch.bfloat16: 512}
"""Keys of the longest sequence that is computed here, by dtype; a dtype that is not named keeps the fused kernel. So
attention weights, which are kept for the backward pass, take no more than `rmcore.training.memory` counts for them."""
ROUNDED_TO = 16
"""Lengths are rounded up to multiples of this: fewer shapes, each of which costs a matrix kernel that is compiled."""
BATCH_BYTES = 2**21
"""Attention weights of one batch, where it has more than one sequence: what they pass through stays in the cache."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences padded to Q queries and K keys. Padding repeats a sequence's first token, and is seen by nobody."""

    spans: tuple[Span, ...]
    shape: tuple[int, int]
    mask: Tensor | None
    """(B or 1, 1, 1, Q, K), added to the scores of a causal model; None: each query sees all keys of its sequence."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sequences of one packed row that are computed here, as batches, and where their tokens stand."""

    batches: tuple[Batch, ...]
    query_rows: Tensor
    """(sum of B * heads * Q,) long: rows of (T * heads, D) that the padded queries of all batches are."""
    key_rows: Tensor
    """(sum of B * key heads * K,) long: the same of the keys, in (T * key heads, D)."""
    query_places: Tensor
    """(N * heads,) long: where in the padded queries the N tokens of these sequences are, in the order of the row."""
    own_key_places: Tensor
    """(N * key heads,) long: where in the padded keys they are as keys of their own sequence."""
    padding: Tensor
    """Long: padded queries that are nobody's."""
    token_rows: Tensor | None
    """(N,) long: places of these tokens in the row; None where they are all of it."""
    num_tokens: int
    """T."""

    @classmethod
    def make(
        cls, spans: Sequence[Span], *, num_tokens: int, heads: int, key_heads: int, causal: bool, dtype: torch.dtype
    ) -> Self:
        """Put `spans`, in the order of a row of `num_tokens`, into batches of one shape each."""
        weight_bytes = heads * dtype.itemsize
        groups: list[list[Span]] = []
        for span in sorted(spans, key=_shape, reverse=True):
            same = groups and _shape(groups[-1][0]) == _shape(span)
            queries, keys = _shape(span)
            if same and (len(groups[-1]) + 1) * queries * keys * weight_bytes <= BATCH_BYTES:
                groups[-1].append(span)
            else:
                groups.append([span])
        batches = tuple(
            Batch(tuple(group), _shape(group[0]), _causal_mask(group, dtype) if causal else None) for group in groups
        )
        query_rows, query_places = _rows_and_places(batches, heads, queries=True)
        key_rows, own_key_places = _rows_and_places(batches, key_heads, queries=False)
        taken = np.zeros(len(query_rows), dtype=bool)
        taken[query_places] = True
        tokens = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
        return cls(
            batches=batches,
            query_rows=torch.from_numpy(query_rows),
            key_rows=torch.from_numpy(key_rows),
            query_places=torch.from_numpy(query_places),
            own_key_places=torch.from_numpy(own_key_places),
            padding=torch.from_numpy(np.flatnonzero(~taken)),
            token_rows=None if len(tokens) == num_tokens else torch.from_numpy(tokens),
            num_tokens=num_tokens,
        )


def _shape(span: Span) -> tuple[int, int]:
    """Queries and keys, each rounded up."""
    queries, keys = (-(-number // ROUNDED_TO) * ROUNDED_TO for number in (span.length, span.num_keys))
    return queries, keys


def _causal_mask(spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
    """Make what is added to a batch's scores: (B or 1, 1, 1, Q, K). Padding is later than every query, so hidden."""
    queries, keys = _shape(spans[0])
    prefixes = sorted({span.prefix for span in spans})
    prefix = torch.tensor(prefixes if len(prefixes) == 1 else [span.prefix for span in spans])[:, None, None]
    unseen = torch.arange(keys) > torch.arange(queries)[:, None] + prefix  # (B or 1, Q, K)
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)[:, None, None]


def _rows_and_places(batches: Sequence[Batch], heads: int, *, queries: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (T * heads, D) that fill the padded batches, and the places there of each own token, by place in the row.

    Returns:
        (sum of B * heads * L,) rows and (N * heads,) places; head after head of a sequence there, token after token
        here.
    """
    rows, places, starts = [], [], []
    end = 0
    every_head = np.arange(heads)
    for batch in batches:
        length = batch.shape[0 if queries else 1]
        for span in batch.spans:
            prefix = 0 if queries else span.prefix
            tokens = np.full(length, span.start)
            tokens[:prefix] = np.arange(span.prefix_start, span.prefix_start + prefix)
            tokens[prefix : prefix + span.length] = np.arange(span.start, span.start + span.length)
            rows.append((tokens * heads + every_head[:, None]).ravel())  # (heads, L)
            own = end + prefix + np.arange(span.length)
            places.append((own[:, None] + every_head * length).ravel())  # (own tokens, heads)
            starts.append(span.start)
            end += heads * length
    in_row_order = np.argsort(np.asarray(starts), kind="stable")
    return np.concatenate(rows), np.concatenate([places[at] for at in in_row_order])


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scale: float) -> Tensor:
    """Attention of the sequences in `buckets`: (N, heads, D) of rows (T, heads, D) and (T, key heads, D)."""
    output: Tensor = _BucketedAttention.apply(query, key, value, buckets, scale)
    return output


class _BucketedAttention(torch.autograd.Function):
    """Batch after batch, forwards and backwards, with nothing kept of the padded copies."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scale: float) -> Tensor:
        needed = any(tensor.requires_grad for tensor in (query, key, value))
        padded = _padded(query, key, value, buckets)
        output = padded[0].new_empty(len(padded[0]), value.shape[-1])
        kept: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for batch, own, own_key, own_value, place in _pieces(padded, buckets):
                weights = _weights(own, own_key, batch, scale)
                torch.bmm(weights, own_value, out=output[place].view(*own.shape[:2], -1))
                if needed:
                    kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.buckets, ctx.scale = buckets, scale
        return output.index_select(0, buckets.query_places).view(-1, *query.shape[1:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated: by torch, from plain operations
            output = plain_attention(query, key, value, ctx.buckets, ctx.scale)
            wanted = [tensor for tensor in (query, key, value) if tensor.requires_grad]
            found = iter(grad(output, wanted, grads[0], create_graph=True))
            return *(next(found) if tensor.requires_grad else None for tensor in (query, key, value)), None, None
        with torch.autocast(query.device.type, enabled=False):
            return *_gradients(query, key, value, grads[0], kept, ctx.buckets, ctx.scale), None, None


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, kept: Sequence[Tensor], buckets: Buckets, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    padded = _padded(query, key, value, buckets)
    spread = _to_row(grad, buckets).reshape(-1, grad.shape[-1])
    grad_output = spread.index_select(0, buckets.query_rows).index_fill_(0, buckets.padding, 0.0)
    grads = [torch.empty_like(tensor) for tensor in padded]
    at_key = 0
    for weights, (_, own, own_key, own_value, place) in zip(kept, _pieces(padded, buckets), strict=True):
        given = grad_output[place].view(*own.shape[:2], -1)
        keys = slice(at_key, at_key := at_key + own_key.shape[0] * own_key.shape[1])
        torch.bmm(weights.transpose(1, 2), given, out=grads[2][keys].view(own_value.shape))
        by_weight = torch.bmm(given, own_value.transpose(1, 2))
        by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype).mul_(scale)
        torch.bmm(by_score, own_key, out=grads[0][place].view(own.shape))
        torch.bmm(by_score.transpose(1, 2), own, out=grads[1][keys].view(own_key.shape))
    return (
        _to_row(grads[0].index_select(0, buckets.query_places).view(-1, *query.shape[1:]), buckets),
        _keys_to_row(grads[1], key.shape[1], buckets),
        _keys_to_row(grads[2], key.shape[1], buckets),
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scale: float) -> Tensor:
    """The same by operations that torch can differentiate as often as it likes."""
    padded = _padded(query, key, value, buckets)
    outputs = []
    with torch.autocast(query.device.type, enabled=False):
        for batch, own, own_key, own_value, _ in _pieces(padded, buckets):
            scores = torch.bmm(own, own_key.transpose(1, 2)) * scale
            scores = _by_sequence(scores, batch) + _all_masked(batch, scores)
            scores = scores.view(len(own), -1, own_key.shape[1])
            outputs.append(torch.bmm(scores.softmax(-1), own_value).view(-1, value.shape[-1]))
    return torch.cat(outputs).index_select(0, buckets.query_places).view(-1, *query.shape[1:-1], value.shape[-1])


def _padded(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (., D) of all batches, one after the other, each (B, heads, L)."""
    at = (buckets.query_rows, buckets.key_rows, buckets.key_rows)
    rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (query, key, value))
    padded = [row.index_select(0, places) for row, places in zip(rows, at, strict=True)]
    return padded[0], padded[1], padded[2]


def _pieces(padded: tuple[Tensor, Tensor, Tensor], buckets: Buckets) -> Any:
    """Each batch with its queries (B * key heads, R * Q, D), keys and values (B * key heads, K, D), and its rows.

    The R query heads that share a key head stand one behind the other, so a matrix product takes them together.
    """
    query, key, value = padded
    heads, key_heads = _heads(padded, buckets)
    at, at_key = 0, 0
    for batch in buckets.batches:
        (queries, keys), number = batch.shape, len(batch.spans)
        place = slice(at, at := at + number * heads * queries)
        key_place = slice(at_key, at_key := at_key + number * key_heads * keys)
        yield (
            batch,
            query[place].view(number * key_heads, -1, query.shape[-1]),
            key[key_place].view(number * key_heads, keys, -1),
            value[key_place].view(number * key_heads, keys, -1),
            place,
        )


def _heads(padded: tuple[Tensor, Tensor, Tensor], buckets: Buckets) -> tuple[int, int]:
    queries = sum(len(batch.spans) * batch.shape[0] for batch in buckets.batches)
    keys = sum(len(batch.spans) * batch.shape[1] for batch in buckets.batches)
    return len(padded[0]) // queries, len(padded[1]) // keys


def _by_sequence(scores: Tensor, batch: Batch) -> Tensor:
    """Scores (B * key heads, R * Q, K) as (B, key heads, R, Q, K)."""
    queries, keys = batch.shape
    number = len(batch.spans)
    return scores.view(number, len(scores) // number, -1, queries, keys)


def _weights(query: Tensor, key: Tensor, batch: Batch, scale: float) -> Tensor:
    """Attention weights (B * key heads, R * Q, K)."""
    scores = torch.baddbmm(query.new_empty(()), query, key.transpose(1, 2), beta=0, alpha=scale)
    by_sequence = _by_sequence(scores, batch)
    if batch.mask is not None:
        by_sequence.add_(batch.mask)
    else:
        for one, span in zip(by_sequence, batch.spans, strict=True):
            one[..., span.num_keys :].fill_(-torch.inf)  # a few columns: adding a mask takes fifteen times as long
    return scores.softmax(-1)


def _all_masked(batch: Batch, scores: Tensor) -> Tensor:
    """The mask of a batch as a tensor whether it is causal or not: (B or 1, 1, 1, Q or 1, K)."""
    if batch.mask is not None:
        return batch.mask
    own = torch.tensor([span.num_keys for span in batch.spans])[:, None, None, None, None]
    unseen = torch.arange(batch.shape[1]) >= own
    return scores.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


def _to_row(tokens: Tensor, buckets: Buckets) -> Tensor:
    """Spread (N, heads, D) over the row, zeros elsewhere: (T, heads, D)."""
    if buckets.token_rows is None:
        return tokens
    return tokens.new_zeros(buckets.num_tokens, *tokens.shape[1:]).index_copy_(0, buckets.token_rows, tokens)


def _keys_to_row(padded: Tensor, key_heads: int, buckets: Buckets) -> Tensor:
    """Gradients of padded keys or values as (T, key heads, D) of the row; a prefix gathers from all its sides."""
    width = padded.shape[-1]
    row = _to_row(padded.index_select(0, buckets.own_key_places).view(-1, key_heads, width), buckets)
    at = 0
    for batch in buckets.batches:
        keys = batch.shape[1]
        for span in batch.spans:
            if span.prefix:
                own = padded[at : at + key_heads * keys].view(key_heads, keys, width)
                row[span.prefix_start : span.prefix_start + span.prefix] += own[:, : span.prefix].transpose(0, 1)
            at += key_heads * keys
    return row
