"""Attention along the plan of a packed row, as Hugging Face's layers call attention.

Importing this module registers `packed_attention` under the name ATTENTION. A model set to it computes packed rows
along their plan, and all else by `sdpa` as before.
"""

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rmcore.core.errors import ModelError
from rmcore.models.packing.buckets import LONGEST, Buckets, bucketed_attention
from rmcore.models.packing.layout import AttentionPlan, Span, VarlenIndex, spans_of

ATTENTION = "rm_packed"
"""Name under which Hugging Face's layers find `packed_attention`."""
ENABLES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's varlen kernel has to be told of fewer key heads than query heads. In torch 2.11 it has no argument
for that, and whether it computes them all the same is what `kernel_groups_heads` finds out."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Terms of some models' attention that no kernel used here computes."""


class KeysKeptError(Exception):
    """Ends a layer's forward pass where no more than its keys and values was wanted."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: AttentionPlan | None = None,
    kept: list[Tensor] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as Hugging Face's layers call it: along the plan of a packed row, and `sdpa` where there is none.

    Args:
        module: the attention layer.
        query: (1, heads, T, D).
        key: (1, key heads, T, D).
        value: (1, key heads, T, D).
        attention_mask: meant for rows that are not packed.
        packing: which tokens see which.
        kept: of a last layer that computes no more than what is read (`rmcore.models.packing.forward`): empty, and
            keys and values are put there; or they, and `query` is (1, heads, U, D), of the tokens of `packing.reading`.
        dropout: probability for attention weights.
        scaling: factor of the scores; 1 / sqrt(D) if left out.
        **options: what else the layer says, passed on where rows are not packed.

    Returns:
        (1, T, heads, D), and no weights.

    Raises:
        ModelError: the layer asks for a term that is not computed here.
        KeysKeptError: keys and values were put into `kept`; there is no output.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    asked = [name for name in UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise ModelError(f"its attention uses {', '.join(asked)}, which packed attention does not compute")
    if packing.varlen is not None and dropout:
        raise ModelError("its attention uses dropout, which the varlen kernel does not compute")
    if kept is not None:
        if not kept:
            kept += [key, value]
            raise KeysKeptError
        return _where_read((query, kept[0], kept[1]), packing, dropout, scaling), None
    if packing.varlen is not None:
        return _all_at_once((query, key, value), packing.varlen, packing.causal, scaling), None
    return _along_plan(query, key, value, packing, dropout, scaling), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def _along_plan(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout: float, scaling: float | None
) -> Tensor:
    """Short sequences in batches, long ones each by the fused kernel, in the order of the row."""
    kind = query.device.type
    # Rotary positions leave queries and keys in float32 under autocast, which knows torch's own operations only.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    most_keys = 0 if dropout or kind != "cpu" else LONGEST.get(dtype, 0)
    spans = spans_of(plan.groups)
    short = [span for span in spans if span.num_keys <= most_keys]
    if not short:
        return _one_by_one(query, key, value, spans, plan, dropout, scaling).transpose(1, 2)
    heads, key_heads = query.shape[1], key.shape[1]
    name = ("buckets", heads, key_heads, dtype)
    if name not in plan.made:
        plan.made[name] = Buckets.make(
            short, num_tokens=query.shape[2], heads=heads, key_heads=key_heads, causal=plan.causal, dtype=dtype
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (T, heads, D)
    batched = bucketed_attention(rows[0], rows[1], rows[2], plan.made[name], scale)
    if len(short) == len(spans):
        return batched[None]
    long = [span for span in spans if span.num_keys > most_keys]
    alone = _one_by_one(query, key, value, long, plan, dropout, scaling)[0].transpose(0, 1)
    pieces = {True: iter(batched.split([span.length for span in short]))}
    pieces[False] = iter(alone.split([span.length for span in long]))
    return torch.cat([next(pieces[span.num_keys <= most_keys]) for span in spans])[None]


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    plan: AttentionPlan,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Each of `spans` with its keys through `scaled_dot_product_attention`: (1, heads, tokens of these, D)."""
    lengths = [span.length for span in spans_of(plan.groups)]
    if query.device.type == "cpu":  # with `enable_gqa` two threads trained half as fast there
        key, value = _repeated(query, key, value)
    # Split once: its backward is one concatenation, where a slice a sequence would fill a whole row with zeros each.
    split = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
    pieces = {span.start: own for span, *own in zip(spans_of(plan.groups), *split, strict=True)}
    grouped = query.shape[1] != key.shape[1]
    attend = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    outputs = []
    for span in spans:
        own_query, own_key, own_value = pieces[span.start]
        if not span.prefix:
            outputs.append(attend(own_query, own_key, own_value, is_causal=plan.causal))
            continue
        _, first_key, first_value = pieces[span.prefix_start]
        keys = torch.cat([first_key[:, :, : span.prefix], own_key], dim=2)
        values = torch.cat([first_value[:, :, : span.prefix], own_value], dim=2)
        mask = _mask(plan, span.length, span.prefix, query)
        outputs.append(attend(own_query, keys, values, attn_mask=mask))
    return torch.cat(outputs, dim=2)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads (dimension 1) of keys and values for the query heads of their groups."""
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def _mask(plan: AttentionPlan, length: int, prefix: int, like: Tensor) -> Tensor:
    """Make the mask that a further side of `length` tokens adds to its scores: (length, prefix + length).

    In floating point, because a boolean one is turned into that by every layer, and kept for its backward pass.
    """
    name = ("mask", length, prefix, like.dtype)
    if name not in plan.made:
        unseen = like.new_full((length, prefix + length), -torch.inf)
        plan.made[name] = unseen.triu(prefix + 1)
    mask: Tensor = plan.made[name]
    return mask


def _where_read(
    rows: tuple[Tensor, Tensor, Tensor], plan: AttentionPlan, dropout: float, scaling: float | None
) -> Tensor:
    """Attention of the tokens of `plan.reading`, query (1, heads, U, D), to keys and values of the row.

    The queries of a group see its tokens, which are neighbours in the row, through a mask; no key is copied.

    Returns:
        (1, U, heads, D).
    """
    if plan.reading is None:
        raise ModelError("its rows do not say where rewards are read")
    if plan.reading.varlen is not None:
        return _all_at_once(rows, plan.reading.varlen, plan.causal, scaling)
    query, key, value = rows
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    name = ("reading", dtype)
    if name not in plan.made:
        plan.made[name] = _seen_where_read(plan, plan.reading.spans, query.new_empty((), dtype=dtype))
    masks: list[Tensor] = plan.made[name]
    key_heads, width = key.shape[1], query.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    own = (query[0] * scale).to(dtype).unflatten(0, (key_heads, -1))  # (key heads, R, U, D)
    queries = own.split([len(mask) for mask in masks], dim=2)
    keys, values = (tensor[0].to(dtype).split([mask.shape[1] for mask in masks], dim=1) for tensor in (key, value))
    outputs = []
    with torch.autocast(kind, enabled=False):
        for one, own_key, own_value, mask in zip(queries, keys, values, masks, strict=True):
            scores = (one.flatten(1, 2) @ own_key.transpose(1, 2)).unflatten(1, (-1, len(mask))) + mask
            weights = torch.nn.functional.dropout(scores.softmax(-1), dropout)  # (key heads, R, m, n)
            outputs.append((weights.flatten(1, 2) @ own_value).unflatten(1, (-1, len(mask))))
    return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1)[None]


def _seen_where_read(plan: AttentionPlan, spans: Sequence[Span], like: Tensor) -> list[Tensor]:
    """Give what is added to the scores of each group with n tokens, m of which are read: (m, n)."""
    masks, start, left = [], 0, list(spans)
    for group in plan.groups:
        end = start + sum(group)
        own = [span for span in left if span.start < end]
        del left[: len(own)]
        mask = like.new_full((len(own), end - start), -torch.inf)
        for seen, span in zip(mask, own, strict=True):
            seen[: span.prefix] = 0.0
            seen[span.start - start : span.start - start + span.length] = 0.0
        masks.append(mask)
        start = end
    return masks


def _all_at_once(
    rows: tuple[Tensor, Tensor, Tensor], index: VarlenIndex, causal: bool, scaling: float | None
) -> Tensor:
    """All query sequences in one call of torch's varlen kernel (FlashAttention, Dao 2023, arXiv:2307.08691).

    Where a sequence has more keys than queries, its causal mask is aligned at the ends: the last query sees all keys.
    """
    kind = rows[0].device.type
    # Rotary positions leave queries and keys in float32 under autocast, which knows torch's own operations only.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows[0].dtype
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in rows)  # (T, heads, D)
    if index.key_at is not None:
        key, value = key.index_select(0, index.key_at), value.index_select(0, index.key_at)
    return _varlen(query, key, value, index, causal, scaling)[None]


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, index: VarlenIndex, causal: bool, scaling: float | None
) -> Tensor:
    """Call the kernel: (T, heads, D) of queries like that, and of keys and values (K, key heads, D)."""
    is_enabled = query.shape[1] != key.shape[1] and index.grouped and ENABLES_GROUPS
    options: dict[str, Any] = {"enable_gqa": True} if is_enabled else {}
    if not index.grouped:
        key, value = _repeated(query, key, value)
    output: Any = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        index.query_ends,
        index.key_ends,
        index.longest,
        index.longest,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
        **options,
    )
    result: Tensor = output
    return result


def kernel_groups_heads(heads: int, key_heads: int, width: int, device: torch.device) -> bool:
    """Try whether the varlen kernel computes attention and its gradient with fewer key heads than query heads.

    Compared with itself on keys and values that are repeated for each query head, over one random row.
    """
    generator = torch.Generator(device).manual_seed(0)
    tokens = 24
    shapes = ((tokens, heads, width), (tokens, key_heads, width), (tokens, key_heads, width))
    rows = [torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_() for shape in shapes]
    ends = torch.tensor([0, 7, tokens], dtype=torch.int32, device=device)
    found = []
    try:
        for grouped in (False, True):
            index = VarlenIndex(ends, ends, key_at=None, longest=tokens, grouped=grouped)
            with torch.enable_grad():
                output = _varlen(rows[0], rows[1], rows[2], index, True, None)
                gradients = torch.autograd.grad(output.float().square().sum(), rows)
            found.append([output, *gradients])
    except (RuntimeError, ValueError):
        if not found:
            raise  # the kernel does not even take repeated heads
        return False
    # A sum over a group's heads is rounded in bfloat16 in the one and perhaps in float32 in the other.
    return all(
        torch.allclose(one.float(), other.float(), rtol=0.0, atol=float(one.detach().abs().max()) * 2.0**-5)
        for one, other in zip(*found, strict=True)
    )
