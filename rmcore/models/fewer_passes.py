"""RMS norms and rotary positions of a Hugging Face model in fewer passes over memory, on a CPU.

Torch runs one operation after the other there, each of which reads and writes whole tensors, and these two parts are
written in a dozen of them each, backward pass included (benchmarks/results/training-throughput.md). Functions of the
same formula, without second derivatives, take their place in the steps of a training where a trial of a class on random
numbers gives the same. A class that computes another formula keeps its own code; so do scoring, compiled layers, in
which passes are joined already, bfloat16 tensors, which a class rounds on the way, and other devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rmcore.models.packing.forward import FOREIGN_ERRORS
from rmcore.models.precision import WIDE_FLOATS

ROTATION = "apply_rotary_pos_emb"
"""Function by which attention layers of transformers rotate queries and keys."""


class FewerPasses:
    """RMS norms and rotary positions of a model in fewer passes, where they are `active`."""

    def __init__(self, model: nn.Module) -> None:
        """Find the modules of `model` whose class computes one of the formulas here."""
        self._forwards: list[tuple[nn.Module, MethodType]] = []
        for module in model.modules():
            kind: Any = type(module)
            if hasattr(module, "variance_epsilon") and _is_rms_norm(kind):
                self._forwards.append((module, MethodType(_norm_forward, module)))
            elif (forward := _rotating_forward(kind)) is not None:
                self._forwards.append((module, MethodType(forward, module)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let these modules run so inside the block, backward pass included. Parameters and their names are the same.

        No more than their `forward` is replaced, as in `rmcore.models.compiling`.
        """
        for module, forward in self._forwards:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.forward


class _RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * weight of states (..., H). Zhang & Sennrich 2019, arXiv:1910.07467."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = scale.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()  # (..., 1)
        ctx.save_for_backward(states, weight, scale)
        return (states * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, scale = ctx.saved_tensors
        with torch.autocast(states.device.type, enabled=False):
            products = (grads[0] * states).flatten(0, -2)  # (T, H)
            of_weight = scale.reshape(1, -1).mm(products)[0] if weight.requires_grad else None
            along = products.mv(weight).view(scale.shape).mul_(scale.square()).div_(-states.shape[-1])
            return (grads[0] * weight).addcmul_(states, along).mul_(scale), of_weight, None


def _norm_forward(norm: Any, states: Tensor) -> Tensor:
    if not states.dtype == norm.weight.dtype in WIDE_FLOATS:
        own: Tensor = type(norm).forward(norm, states)
        return own
    output: Tensor = _RMSNorm.apply(states, norm.weight, norm.variance_epsilon)
    return output


class _Rotation(torch.autograd.Function):
    """x cos + rotate_half(x) sin of states (1, heads, T, D), cos and sin (1, 1, T, D). arXiv:2104.09864."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (first, second), (of_first, of_second) = states.chunk(2, -1), sin.chunk(2, -1)
        rotated = states * cos
        one, other = rotated.chunk(2, -1)
        one.addcmul_(second, of_first, value=-1)
        other.addcmul_(first, of_second)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (first, second), (of_first, of_second) = grads[0].chunk(2, -1), sin.chunk(2, -1)
        rotated = grads[0] * cos
        half = rotated.shape[-1] // 2
        rotated[..., :half].addcmul_(second, of_second)
        rotated[..., half:].addcmul_(first, of_first, value=-1)
        return rotated, None, None


def _rotate(original: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> Any:
    if how or cos.dtype not in WIDE_FLOATS:
        return original(query, key, cos, sin, *how)
    cos, sin = cos[:, None], sin[:, None]  # for all heads
    return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


@cache
def _is_rms_norm(kind: Any) -> bool:
    states, weight = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    norm = SimpleNamespace(weight=weight[0], variance_epsilon=0.1)
    return _agree(lambda: kind.forward(norm, states), lambda: _RMSNorm.apply(states, norm.weight, 0.1))


@cache
def _rotating_forward(kind: Any) -> FunctionType | None:
    """The `forward` of a class with `_rotate` in the place of the function that it calls; None: it is to stay."""
    forward = kind.forward
    if ROTATION not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    original = forward.__globals__.get(ROTATION)
    query, key, (cos, sin) = torch.randn(4, 1, 2, 3, 8, generator=torch.Generator().manual_seed(0)).split([1, 1, 2])
    given = (query[0], key[0, :, :1], cos[:, 0], sin[:, 0])
    rotate = partial(_rotate, original)
    if not _agree(lambda: original(*given), lambda: rotate(*given)):
        return None
    own = FunctionType(
        forward.__code__, forward.__globals__ | {ROTATION: rotate}, None, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _agree(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether both give the same tensors up to rounding."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(one(), other(), rtol=1e-5, atol=1e-6)
    except FOREIGN_ERRORS:
        return False
    return True
