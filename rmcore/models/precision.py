"""The reward head in float32 while the backbone computes in bfloat16.

A reward is one number, and bfloat16 keeps 8 bits of it: near 10 it knows steps of 0.06, as large as many margins. The
head is a tiny part of the work, so it always computes in full precision.

The backbone does so in two ways: by autocast, over float32 weights, for a block of code (`float32_head`), or because
its own weights were rounded when they were loaded, and then for good (`with_float32_head`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rmcore.core.errors import ModelError
from rmcore.models.layers import REWARD_HEAD_PATTERNS, is_reward_head

Precision = Literal["fp32", "bf16"]
"""fp32: as the weights are. bf16: autocast, with the head in float32."""
WIDE_FLOATS = (torch.float32, torch.float64)


def precision_context(precision: str, device: torch.device) -> AbstractContextManager:
    """Autocast to bfloat16 for `bf16`; nothing for `fp32`."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def reward_heads(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that are the reward head, by full name: `score`, `classifier`, ...

    Raises:
        ModelError: there is none.
    """
    heads = {
        name: module
        for name, module in model.named_modules()
        if is_reward_head(name) and not is_reward_head(name.rpartition(".")[0])
    }
    if not heads:
        raise ModelError(
            f"{type(model).__name__} has no module named {', '.join(REWARD_HEAD_PATTERNS)}, so its reward head is not "
            "known; use a Hugging Face sequence-classification class."
        )
    return heads


@contextmanager
def float32_head(model: nn.Module) -> Iterator[None]:
    """While active, the reward head of `model` runs without autocast, on its input as float32; its weights must be so.

    Only the head's `forward` is replaced, bound to its module, so that a deep copy has a head of its own; hooks and
    parameters stay. May be nested.

    Raises:
        ModelError: see `reward_heads`.
    """
    heads = list(reward_heads(model).values())
    before = [vars(head).get("forward") for head in heads]
    for head in heads:
        head.forward = MethodType(_forward_in_float32, head)
    try:
        yield
    finally:
        for head, forward in zip(heads, before, strict=True):
            if forward is None:
                del head.forward
            else:
                head.forward = forward


def with_float32_head(model: nn.Module) -> None:
    """Have the reward head of a model with bfloat16 weights compute in float32 from now on, its weights included.

    A bfloat16 head becomes float32 by this, but does not get back what it lost.

    Raises:
        ModelError: see `reward_heads`.
    """
    for head in reward_heads(model).values():
        head.float()
        head.forward = MethodType(_forward_in_float32, head)


def round_backbone(model: nn.Module) -> None:
    """Round all parameters but the reward head's to bfloat16, in place and one at a time; the head stays float32.

    Gradients are dropped: torch compiles nothing whose gradient has another format.

    Raises:
        ModelError: see `reward_heads`.
    """
    with_float32_head(model)
    for name, parameter in model.named_parameters():
        if not is_reward_head(name):
            parameter.grad = None
            parameter.data = parameter.data.to(torch.bfloat16)


def exact_in_bfloat16(model: nn.Module) -> list[nn.Linear]:
    """Frozen linear layers of `model` whose float32 weights are bfloat16 numbers: those of files of bfloat16 weights.

    Autocast rounds the weights of these layers for each product, so held in bfloat16 they give the same bits.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
        and id(module.weight) not in embedded
        and torch.equal(module.weight.bfloat16().float(), module.weight)
    ]


class InFloat32(TorchFunctionMode):
    """Inside the block operations on bfloat16 compute in float32, on operands that are widened for each of them.

    So a model whose weights are rounded computes as exactly as they are, without a second copy of them: a weight is
    widened while it is used. Slow, and for forward passes: what is written in place goes to the copy.

    Args:
        exact: gives the float32 numbers that a tensor is the rounded form of, where they are known, else the tensor.
    """

    def __init__(self, exact: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        super().__init__()
        self._exact = exact

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with wide operands; of an embedding, or a tensor's attribute, what comes out is made wide."""
        if func.__name__ == "__get__":
            return self._widened(func(*args, **(kwargs or {})))
        if func in (functional.embedding, torch.embedding):
            return self._widened(
                func(*map(self._known, args), **{k: self._known(v) for k, v in (kwargs or {}).items()})
            )
        return func(*map(self._widened, args), **{name: self._widened(value) for name, value in (kwargs or {}).items()})

    def _known(self, value: Any) -> Any:
        return self._exact(value) if isinstance(value, Tensor) else value

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = self._exact(value)
            return value.float() if value.dtype == torch.bfloat16 else value
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            wide = [self._widened(one) for one in value]
            return wide if isinstance(value, list) else tuple(wide)
        return torch.float32 if value is torch.bfloat16 else value


def narrow_floats(model: nn.Module) -> list[str]:
    """Names of the floating-point formats narrower than float32 that parameters have: ["bfloat16"], or none."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return sorted(str(kind).removeprefix("torch.") for kind in kinds if kind not in WIDE_FLOATS)


def _forward_in_float32(head: nn.Module, features: Tensor, *arguments: Any, **options: Any) -> Any:
    with torch.autocast(features.device.type, enabled=False):
        return type(head).forward(head, features.float(), *arguments, **options)
