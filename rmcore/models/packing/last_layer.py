"""The last transformer layer of a packed row, computed no further than rewards are read from it.

Nothing but the states at the reading places leaves the last layer: of a causal model one token a side, of an encoder
each side's first. So it computes keys and values of all tokens, and queries, output projection, MLP and what follows
for these alone, in a pass of two parts through its own `forward`: the first, over all tokens, ends where attention has
its keys and values (`KeysKeptError`), the second, over the tokens that are read, attends to these.
"""

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from rmcore.core.errors import ModelError
from rmcore.models.layers import transformer_layers
from rmcore.models.packing.attention import KeysKeptError


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
