"""Rewards of packed rows: the same numbers as side by side, from one forward pass without padding.

Three steps replace a Hugging Face classifier's own forward: its backbone runs over the packed row with attention that
follows the plan (`packed_attention`), the states at the reading places are taken, and its own head turns them into
rewards. Nothing of the model is copied or rewritten.

Nothing but the states at the reading places leaves the last layer: of a causal model one token a side, of an encoder
each side's first. Where the trial allows it that layer computes keys and values of all tokens, and queries, output
projection, MLP and what follows for these alone, in a pass of two parts through its own `forward`: the first, over all
tokens, ends where attention has its keys and values (`KeysKeptError`), the second, over the tokens that are read,
attends to these.

Whether a model can be packed is not looked up in a list of names: `find_packing` computes a few random sides both ways
on the model itself and compares. A model with positions or attention that a packed row cannot express gives other
numbers there and is left to padding, with the reason.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rmcore.core.errors import ModelError
from rmcore.models.layers import transformer_layers, without_adapters
from rmcore.models.packing.attention import ATTENTION, KeysKeptError, kernel_groups_heads
from rmcore.models.packing.layout import PackedRow, Packing, PaddedRows, Rows, pack_sides, pad_rows, reading_place
from rmcore.models.precision import InFloat32, precision_context

FORWARD_METHOD, TRIAL_METHOD = "packed_outputs", "packed_trial"
"""Where a sharded model carries the packed forward and the trial as methods: only there its weights get gathered."""
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention", "window_size")
"""Names of the config field that limits how far back a token sees."""
FOREIGN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Exceptions that a model raises on a row that it is not made for."""
ROW_MIXERS = (nn.Conv1d, nn.RNNBase)
"""Layers that mix neighbouring places of a row."""


def rewards_of(model: nn.Module, rows: Rows) -> Tensor:
    """Rewards of the S sides in `rows`, (S,), in the precision of the context. `rows` lie on the model's device."""
    return outputs_of(model, rows)[:, 0]  # (S, 1) -> (S,)


def outputs_of(model: nn.Module, rows: Rows) -> Tensor:
    """All that the head says of the S sides in `rows`: (S, 1), or (S, 1 + A), the reward first, with attributes."""
    if isinstance(rows, PaddedRows):
        # A cache of keys and values is of no use, and compiled layers would need a graph for each place in it.
        options = {"use_cache": False} if hasattr(without_adapters(model), "score") else {}
        return model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, **options).logits
    return getattr(model, FORWARD_METHOD, partial(packed_outputs, model))(rows)


def packed_outputs(model: nn.Module, row: PackedRow) -> Tensor:
    """All that the head says of the S sides of a packed row; see `outputs_of`."""
    plain = without_adapters(model)
    return _outputs_of_states(plain, _packed_states(plain, row))


def _outputs_of_states(plain: Any, states: Tensor) -> Tensor:
    """Turn S states (S, H) into outputs (S, 1) by the model's own head."""
    if hasattr(plain, "score"):
        return plain.score(states)
    firsts = states[:, None]  # an encoder's head reads the first token of each of S sequences
    pooler = getattr(plain.base_model, "pooler", None)
    return plain.classifier(firsts if pooler is None else plain.dropout(pooler(firsts)))


def _packed_states(plain: Any, row: PackedRow) -> Tensor:
    """Last hidden states at the reading places: (S, H)."""
    options = {"use_cache": False} if row.plan.causal else {}
    reading = row.plan.reading
    if reading is not None:
        compute_where_read(plain)
    output = plain.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        # Four dimensions mean to Hugging Face that there is nothing to work out: the plan says all. A layer that does
        # not get the plan would use this mask, and its result must not pass for one.
        attention_mask=torch.full((1, 1, 1, 1), torch.nan, device=row.input_ids.device),
        packing=row.plan,
        **options,
    )
    states = output.last_hidden_state[0]  # (L, H), or (U, H)
    if reading is None:
        return states[row.read_at]
    if len(states) != len(reading.at):
        raise ModelError(f"{len(states)} states come out of the model where {len(reading.at)} are read")
    return states[reading.of_side]


def find_packing(model: nn.Module, *, longest_side: int, precision: str, pad_id: int) -> Packing:
    """How the rows of `model` are to be packed; from then on its attention is `packed_attention`.

    Args:
        model: a Hugging Face sequence classifier, or PEFT's wrapper around one, on its device; where it is sharded, all
            processes must call this.
        longest_side: most tokens of a side.
        precision: fp32 or bf16.
        pad_id: token id of padding.

    Raises:
        ModelError: it cannot be packed; the message is the reason, as part of a sentence.
        torch.OutOfMemoryError: the model does not even leave room for the trial.
    """
    plain = without_adapters(model)
    device, config, before = plain.device, plain.config.get_text_config(), plain.config._attn_implementation
    packing = Packing(
        causal=hasattr(plain, "score"),
        kernel="sdpa",
        first_position=_first_position(plain),
        pad_id=config.pad_token_id,
        reads_last=True,
    )
    _refuse_windows(config, longest_side, causal=packing.causal)
    _refuse_recurrence(plain, config)
    _refuse_moving_positions(config, longest_side)
    if device.type == "cuda" and precision != "bf16" and plain.dtype != torch.bfloat16:
        raise ModelError(
            "on a GPU the packed attention kernel computes in bf16 only (train.precision=bf16, or --dtype bfloat16)"
        )
    if before not in ("sdpa", ATTENTION):
        raise ModelError(f"its attention is {before}, not sdpa")
    plain.set_attn_implementation(ATTENTION)
    trial = getattr(model, TRIAL_METHOD, partial(packed_trial, model))
    accepted = False
    try:
        with torch.no_grad(), evaluation_mode(model):
            # First sdpa in fp32, where agreement can be required to a few bits, then the kernel that training uses.
            with InFloat32() if plain.dtype == torch.bfloat16 else nullcontext():
                packing = trial(packing, "fp32", pad_id)
            if device.type == "cuda":
                packing = replace(packing, kernel="varlen", grouped=_shares_key_heads(config, device))
                packing = trial(packing, precision, pad_id)
        accepted = True
    except (ModelError, torch.OutOfMemoryError):
        raise
    except FOREIGN_ERRORS as error:
        raise ModelError(f"a packed row does not pass through {type(plain).__name__} ({_reason(error)})") from error
    finally:
        if not accepted:  # a refused model is padded from now on, and must compute as if nothing had been tried
            plain.set_attn_implementation(before)
    return packing


def _shares_key_heads(config: Any, device: torch.device) -> bool:
    """Whether attention takes the model's key heads as they are; where it does not, that is said."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if key_heads == heads:
        return False
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    taken = kernel_groups_heads(heads, key_heads, width, device)
    if not taken:
        print(
            f"note: the varlen kernel of torch {torch.__version__} does not compute {key_heads} key heads with {heads} "
            "query heads, so keys and values are repeated for it: more memory and time, the same result.",
            file=sys.stderr,
        )
    return taken


def _refuse_windows(config: Any, longest_side: int, *, causal: bool) -> None:
    """A window counts places in the row, where a later side is far from the prefix that it continues."""
    if getattr(config, "use_sliding_window", True) is False:
        return
    for name in WINDOWS:
        window = getattr(config, name, None)
        if not isinstance(window, int) or window <= 0:
            continue
        reach = window if causal else window // 2  # an encoder's window is half before, half after
        if reach < longest_side:
            raise ModelError(f"its attention sees {reach} tokens back ({name}), sides have up to {longest_side}")


def _refuse_recurrence(plain: nn.Module, config: Any) -> None:
    """Layers that hand a state or a convolution along the row would carry it from one side into the next.

    transformers resets it at a boundary (`seq_idx`, `cu_seq_lens_q`) by CUDA kernels alone (mamba-ssm, causal-conv1d,
    flash-linear-attention); its own code refuses both arguments.
    """
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    kinds |= {str(kind) for kind in getattr(config, "layers_block_type", None) or ()}
    recurrent = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    mixing = next((type(module).__name__ for module in plain.modules() if isinstance(module, ROW_MIXERS)), None)
    if recurrent or mixing:
        raise ModelError(f"its layers carry a state along the row ({', '.join(recurrent) or mixing})")


def _refuse_moving_positions(config: Any, longest_side: int) -> None:
    """Rotary positions whose frequencies follow the longest position of a batch, beyond the original length."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [value for value in settings.values() if isinstance(value, dict)] or [settings]
    for rope in by_layer:
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest_side > limit:
            raise ModelError(f"its {kind} positions change beyond {limit} tokens, sides have up to {longest_side}")


def _first_position(plain: nn.Module) -> int:
    """RoBERTa's positions begin behind the id of its pad token; its embedding of positions says so."""
    for name, module in plain.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Have all of `model` in evaluation mode inside the block; afterwards each module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def packed_trial(model: nn.Module, packing: Packing, precision: str, pad_id: int) -> Packing:
    """Compute a few random sides packed, padded and alone; refuse unless all three agree.

    Rewards, and the states that they are read from in case the head makes nothing of them, may differ by rounding: by
    twenty times what padding changes, or a little more than one unit in the last place.

    Returns:
        `packing`, with a last layer that is computed for all tokens where less of it does not agree, which is said.
    """
    plain = without_adapters(model)
    sides, groups = _trial_sides(plain.config.get_text_config().vocab_size, pad_id)
    device = plain.device
    together = pad_rows(sides, pad_id=pad_id).to(device)
    singles = [pad_rows([side], pad_id=pad_id).to(device) for side in sides]
    places = torch.tensor([reading_place(side, packing) for side in sides], device=device)
    epsilon = torch.finfo(torch.bfloat16 if precision == "bf16" else plain.dtype).eps

    def states(rows: PaddedRows, at: Tensor) -> Tensor:
        found = plain.base_model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).last_hidden_state
        return found[torch.arange(len(at), device=device), at]

    with precision_context(precision, device):
        padded = {"rewards": rewards_of(model, together), "states": states(together, places)}
        alone = {
            "rewards": torch.cat([rewards_of(model, one) for one in singles]),
            "states": torch.cat([states(one, at[None]) for one, at in zip(singles, places, strict=True)]),
        }

    def compare(form: Packing) -> None:
        with precision_context(precision, device):
            packed_states = _packed_states(plain, pack_sides(sides, groups, form).to(device))
            packed = {"rewards": _outputs_of_states(plain, packed_states)[:, 0], "states": packed_states}
        for name, found in packed.items():
            expected = alone[name].double()  # (S,) or (S, H)
            scale = expected.abs().max()
            rounding = min(20 * (padded[name].double() - expected).abs().max(), max(16 * epsilon, 1e-3) * scale)
            difference = (found.double() - expected).abs().max()
            if found.shape != expected.shape or not difference <= rounding + max(4 * epsilon, 1e-5) * scale:
                raise ModelError(
                    f"{name} of a packed trial differ by {difference:.2g} of {scale:.2g} from those one by one, so its "
                    "positions or its attention depend on more than what a packed row can say"
                )

    compare(replace(packing, reads_last=False))
    if packing.reads_last:
        try:
            compare(packing)
        except torch.OutOfMemoryError:
            raise
        except (ModelError, *FOREIGN_ERRORS) as error:
            print(
                f"note: the last layer is computed for all tokens, not only where rewards are read: {_reason(error)}.",
                file=sys.stderr,
            )
            return replace(packing, reads_last=False)
    return packing


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _trial_sides(vocabulary: int, pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Two pairs, three answers to one prompt and a lone side, of random tokens; one ends in the pad token."""
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
    sides[1].append(pad_id)
    return sides, groups


def compute_where_read(plain: nn.Module) -> None:
    """Have the last layer of a Hugging Face model follow `AttentionPlan.reading` from now on, where a plan has one.

    Only the layer's `forward` is replaced, as in `rmcore.models.precision.float32_head`: hooks, of sharding among them,
    and recomputation stay around it.

    Raises:
        ModelError: no layer of the model is known.
    """
    layers = transformer_layers(plain)
    if not layers:
        raise ModelError("its layers are of no class that is known")
    if "forward" not in vars(layers[-1]):  # else it is this already, perhaps compiled
        layers[-1].forward = MethodType(_forward_where_read, layers[-1])


def _forward_where_read(layer: nn.Module, states: Tensor, *arguments: Any, **options: Any) -> Any:
    """The layer's output for states (1, T, H): of all tokens, or of the U tokens of the plan's reading."""
    forward = partial(type(layer).forward, layer)
    plan = options.get("packing")
    if plan is None or plan.reading is None:
        return forward(states, *arguments, **options)
    kept: list[Tensor] = []
    try:
        forward(states, *arguments, **options, kept=kept)
    except KeysKeptError:
        pass
    else:
        raise ModelError("its last layer has no attention that packing knows")
    narrow = partial(_where_read, at=plan.reading.at, num_tokens=states.shape[1])
    narrowed = {name: narrow(value) for name, value in options.items()}
    return forward(narrow(states), *map(narrow, arguments), **narrowed, kept=kept)


def _where_read(value: Any, *, at: Tensor, num_tokens: int) -> Any:
    """Take the tokens `at` of what a layer gets for each token, such as rotary positions; all else as it is."""
    if isinstance(value, tuple):
        return tuple(_where_read(one, at=at, num_tokens=num_tokens) for one in value)
    is_by_token = isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)
    return value.index_select(1, at) if is_by_token else value
