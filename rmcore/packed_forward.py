"""Rewards of packed rows: the same numbers as side by side, from one forward pass without padding.

Three steps replace a Hugging Face classifier's own forward: its backbone runs over the packed row with attention that
follows the plan (`packed_attention`), the states at the reading places are taken, and its own head turns them into
rewards. Nothing of the model is copied or rewritten.

Whether a model can be packed is not looked up in a list of names: `find_packing` computes a few random sides both ways
on the model itself and compares. A model with positions or attention that a packed row cannot express gives other
numbers there and is left to padding, with the reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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

from rmcore.batching import PaddedRows, Rows, pad_rows
from rmcore.errors import ModelError
from rmcore.packing import AttentionPlan, PackedRow, Packing, VarlenIndex, pack_sides
from rmcore.precision import precision_context

ATTENTION = "rm_packed"
"""Name under which Hugging Face's layers find `packed_attention`."""
FORWARD_METHOD = "packed_rewards"
"""Where a sharded model carries the packed forward as a method, because only there its weights get gathered."""
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention", "window_size")
"""Names of the config field that limits how far back a token sees."""
KERNEL_SHARES_KEY_HEADS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's varlen kernel takes fewer key heads than query heads by itself; not in torch 2.11."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Terms of some models' attention that no kernel used here computes."""


def rewards_of(model: nn.Module, rows: Rows) -> Tensor:
    """Rewards of the S sides in `rows`, (S,), in the precision of the context. `rows` lie on the model's device."""
    if isinstance(rows, PaddedRows):
        return model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, 0]
    return getattr(model, FORWARD_METHOD, partial(packed_rewards, model))(rows)


def packed_rewards(model: nn.Module, row: PackedRow) -> Tensor:
    """Rewards of the S sides of a packed row: (S,)."""
    plain = _without_adapters(model)
    states = _packed_states(plain, row)
    if hasattr(plain, "score"):
        return plain.score(states)[:, 0]
    firsts = states[:, None]  # an encoder's head reads the first token of each of S sequences
    pooler = getattr(plain.base_model, "pooler", None)
    return plain.classifier(firsts if pooler is None else plain.dropout(pooler(firsts)))[:, 0]


def _without_adapters(model: Any) -> Any:
    """The Hugging Face model inside PEFT's wrapper, whose layers carry the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _packed_states(plain: Any, row: PackedRow) -> Tensor:
    """Last hidden states at the reading places: (S, H)."""
    options = {"use_cache": False} if row.plan.causal else {}
    output = plain.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        # Four dimensions mean to Hugging Face that there is nothing to work out; the plan says all.
        attention_mask=torch.zeros((1, 1, 1, 1), device=row.input_ids.device),
        packing=row.plan,
        **options,
    )
    return output.last_hidden_state[0, row.read_at]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: AttentionPlan | None = None,
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
        dropout: probability for attention weights.
        scaling: factor of the scores; 1 / sqrt(D) if left out.
        **options: what else the layer says, passed on where rows are not packed.

    Returns:
        (1, T, heads, D), and no weights.

    Raises:
        ModelError: the layer asks for a term that is not computed here.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    asked = [name for name in UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise ModelError(f"its attention uses {', '.join(asked)}, which packed attention does not compute")
    if packing.varlen is not None:
        if dropout:
            raise ModelError("its attention uses dropout, which the varlen kernel does not compute")
        return _all_at_once((query, key, value), packing.varlen, packing.causal, scaling), None
    return _one_by_one(query, key, value, packing, dropout, scaling), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout: float, scaling: float | None
) -> Tensor:
    """Each query sequence with its keys through `scaled_dot_product_attention`."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    lengths = [length for prefix, first, *others in plan.groups for length in (prefix + first, *others)]
    # Split once: its backward is one concatenation, where a slice a sequence would fill a whole row with zeros each.
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attend = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    outputs = []
    for prefix, _, *others in plan.groups:
        own_query, first_key, first_value = next(pieces)
        outputs.append(attend(own_query, first_key, first_value, is_causal=plan.causal))
        for length in others:
            own_query, own_key, own_value = next(pieces)
            keys = torch.cat([first_key[:, :, :prefix], own_key], dim=2)
            values = torch.cat([first_value[:, :, :prefix], own_value], dim=2)
            sees = torch.ones(length, prefix + length, dtype=torch.bool, device=query.device).tril(prefix)
            outputs.append(attend(own_query, keys, values, attn_mask=sees))
    return torch.cat(outputs, dim=2).transpose(1, 2)


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
    repeats = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if repeats > 1 and KERNEL_SHARES_KEY_HEADS:
        options["enable_gqa"] = True
    elif repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if index.key_at is not None:
        key, value = key.index_select(0, index.key_at), value.index_select(0, index.key_at)
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        index.query_ends,
        index.key_ends,
        index.longest_query,
        index.longest_key,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
        **options,
    )
    return output[None]


def find_packing(model: nn.Module, *, longest_side: int, precision: str, pad_id: int) -> Packing:
    """How the rows of `model` are to be packed; from then on its attention is `packed_attention`.

    Args:
        model: a Hugging Face sequence classifier, or PEFT's wrapper around one, on its device, not sharded.
        longest_side: most tokens of a side.
        precision: fp32 or bf16.
        pad_id: token id of padding, which the trial avoids.

    Raises:
        ModelError: it cannot be packed; the message is the reason, as part of a sentence.
    """
    plain = _without_adapters(model)
    device = plain.device
    _refuse_windows(plain.config.get_text_config(), longest_side)
    if device.type == "cuda" and precision != "bf16":
        raise ModelError("on a GPU the packed attention kernel computes in bf16 only (train.precision=bf16)")
    if plain.config._attn_implementation not in ("sdpa", ATTENTION):
        raise ModelError(f"its attention is {plain.config._attn_implementation}, not sdpa")
    packing = Packing(causal=hasattr(plain, "score"), kernel="sdpa", first_position=_first_position(plain))
    before = plain.config._attn_implementation
    plain.set_attn_implementation(ATTENTION)
    try:
        with torch.no_grad(), _evaluation_mode(model):
            _compare(model, packing, "fp32", pad_id)
            if device.type == "cuda":
                packing = Packing(packing.causal, "varlen", packing.first_position)
                _compare(model, packing, precision, pad_id)
    except (ModelError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        plain.set_attn_implementation(before)
        if isinstance(error, ModelError):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"a packed row does not pass through {type(plain).__name__} ({reason})") from error
    return packing


def _refuse_windows(config: Any, longest_side: int) -> None:
    """A window counts places in the row, where a later side stands far from the prefix that it continues."""
    if getattr(config, "use_sliding_window", True) is False:
        return
    for name in WINDOWS:
        window = getattr(config, name, None)
        if isinstance(window, int) and 0 < window < longest_side:
            raise ModelError(f"its attention sees {window} tokens back ({name}), sides have up to {longest_side}")


def _first_position(plain: nn.Module) -> int:
    """RoBERTa's positions begin behind the id of its pad token; its embedding of positions says so."""
    for name, module in plain.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _compare(model: nn.Module, packing: Packing, precision: str, pad_id: int) -> None:
    """Compute a few random sides packed, padded and alone; refuse unless all three agree.

    Rewards, and where a head is the identity or zero the states as well, may differ by rounding: by what padding
    changes, twenty times over, or a little more than one unit in the last place.
    """
    plain = _without_adapters(model)
    sides, groups = _trial_sides(plain.config.get_text_config().vocab_size, pad_id)
    device = plain.device
    with precision_context(precision, device):
        packed_row = pack_sides(sides, groups, packing).to(device)
        padded = rewards_of(model, pad_rows(sides, pad_id=pad_id).to(device)).double()
        alone = torch.cat([rewards_of(model, pad_rows([side], pad_id=pad_id).to(device)) for side in sides]).double()
        packed = packed_rewards(model, packed_row).double()
    epsilon = torch.finfo(torch.bfloat16 if precision == "bf16" else plain.dtype).eps
    scale = alone.abs().max()
    allowed = 20 * (padded - alone).abs().max() + max(4 * epsilon, 1e-5) * scale
    difference = (packed - alone).abs().max()
    if packed.shape != alone.shape or not difference <= allowed:
        raise ModelError(
            f"rewards of a packed trial differ by {difference:.2g} of {scale:.2g} from those one by one, so its "
            "positions or its attention depend on more than what a packed row can say"
        )


def _trial_sides(vocabulary: int, pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Two pairs, three answers to one prompt and a lone side, of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        ids = torch.randint(0, max(2, vocabulary - 1), (count,), generator=generator).tolist()
        return [token + (token >= pad_id) if vocabulary > pad_id else token for token in ids]

    sides: list[list[int]] = []
    groups = []
    for prefix, lengths in ((7, (5, 9)), (3, (6, 2)), (12, (4, 1, 8)), (0, (10,))):
        start = draw(prefix)
        groups.append(list(range(len(sides), len(sides) + len(lengths))))
        sides += [start + draw(length) for length in lengths]
    return sides, groups
