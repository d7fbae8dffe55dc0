"""AdamW that keeps 6 bytes a weight, and the gradient 2 more: float32 weights in two halves, moments in 8 bits.

A float32 weight is split by its bits into the bfloat16 number next to it, which is the model's parameter and what it
computes with, and a 16-bit remainder. Together they are the float32 weight exactly (`join`), so small updates add up as
they do in float32; nothing else of the weights is kept. Gradients come in bfloat16.

Each moment is a code of 8 bits a weight and a float32 scale for `BLOCK` of them: 0, or `scale * 2 ** (STEP * (code -
largest code))`, with a sign for the mean. Codes are spaced evenly in the logarithm, so small and large ones are off by
the same share (14 % at most), and are rounded up or down by chance such that they are right on average: rounded to the
nearest, a mean squared gradient that decays by 0.1 % a step would never move. Chance is a hash of step and place, so a
resumed training draws the same.

Sources: AdamW by Loshchilov & Hutter 2019, arXiv:1711.05101; 8-bit moments in blocks by Dettmers et al. 2022,
arXiv:2110.02861. torchao's 8-bit AdamW holds whole weights, and its state is no plain tensors, which resuming reads.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rmcore.core.errors import ModelError
from rmcore.models.compiling import COMPILE_ERRORS

BLOCK = 256
"""Weights that share a scale."""
STEP = 0.1875
"""Spacing of the codes in powers of 2."""
MEAN_CODES, SQUARE_CODES = 127, 255
"""Largest codes. They reach down to 2 ** -24 and 2 ** -48 of the largest moment of a block; smaller ones are 0."""
CHUNK = 2**24
"""Weights that are updated at a time, a multiple of BLOCK. Not compiled, the arithmetic takes 40 bytes for each."""
EPSILON = 1e-8
STATE = ("remainder", "mean", "mean_scale", "square", "square_scale", "step")


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into bfloat16 ones and int16 remainders; exactly, whatever their bits are.

    Raises:
        ModelError: the numbers are not float32.
    """
    if wide.dtype != torch.float32:
        raise ModelError(f"adamw8bit splits float32 weights, and these are {wide.dtype}: split already, or converted.")
    bits = wide.contiguous().view(torch.int32)
    # Half of the last place up: the nearest bfloat16, and a remainder that fits into 16 bits with its sign.
    upper = bits.add(0x8000).bitwise_right_shift(16).to(torch.int16)
    remainder = bits.sub(upper.to(torch.int32).bitwise_left_shift(16)).to(torch.int16)
    return upper.view(torch.bfloat16), remainder


def join(narrow: Tensor, remainder: Tensor) -> Tensor:
    """Join what `split` gave: the float32 numbers, bit for bit."""
    upper = narrow.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift(16)
    return upper.add(remainder.to(torch.int32)).view(torch.float32)


class SplitAdamW(Optimizer):
    """AdamW over float32 parameters, which become bfloat16 when it is made, and float32 again by `widen`.

    Args:
        groups: as `torch.optim.AdamW` takes them.
        lr: learning rate.
        betas: decays of the mean of the gradient and of its square.
        compiled: whether the arithmetic is compiled, into one kernel on a GPU, which reads 8 bytes a weight and writes
            6; where that fails, it continues without and says so.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], *, compiled: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._update: Callable[..., None] = torch.compile(update_, dynamic=True) if compiled else update_
        self.found_inf: Tensor | None = None
        """0-d float32: 1 where this update is to be skipped. Set before each step, as it is for fused kernels."""
        self.grad_scale: Tensor | None = None
        """0-d float32, by which gradients are divided; set likewise."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _fresh_state(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, device, gradient = self.state[parameter], parameter.device, parameter.grad
        assert gradient is not None  # noqa: S101 - `step` has looked
        skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        state["step"] += 1.0 - skipped
        lr, decay = (torch.full((), group[name], device=device) for name in ("lr", "weight_decay"))
        numbers = (state["step"].to(device), lr, decay, skipped, divisor, group["betas"])
        flat = [one.view(-1) for one in (parameter.detach(), state["remainder"], state["mean"], state["square"])]
        flat.append(gradient.reshape(-1))
        count = parameter.numel()
        whole = count - count % BLOCK
        for start in range(0, count, CHUNK):
            end = min(start + CHUNK, whole)
            if end > start:
                self._update_blocks([one[start:end] for one in flat], state, start, numbers)
        if whole < count:  # the last block is a part of one
            rest = [one[whole:] for one in flat]
            padded = [nn.functional.pad(one, (0, BLOCK - count % BLOCK)) for one in rest]
            self._update_blocks(padded, state, whole, numbers)
            for one, new in zip(rest[:4], padded, strict=False):
                one.copy_(new[: len(one)])

    def _update_blocks(
        self, weights: Sequence[Tensor], state: dict[str, Tensor], start: int, numbers: tuple[Any, ...]
    ) -> None:
        blocks = [one.view(-1, BLOCK) for one in weights]
        scales = [state[name][start // BLOCK :][: len(blocks[0])] for name in ("mean_scale", "square_scale")]
        # `data` is no view: code is compiled for the shape of the tensor behind a view, so again for each parameter.
        tensors = [one.data for one in (*blocks, *scales)]
        # A tensor, as is the step: code is compiled for a Python number.
        place = torch.full((), start, device=blocks[0].device)
        try:
            self._update(*tensors, place, *numbers)
        except COMPILE_ERRORS as error:
            if self._update is update_:
                raise
            print(f"warning: the update cannot be compiled ({type(error).__name__}); it is slower.", file=sys.stderr)
            eager: Any = update_  # of the type that the compiled one has
            self._update = eager
            eager(*tensors, place, *numbers)

    def keep_costliest_gradients(self) -> None:
        """Drop all gradients but that of the largest parameter, which is updated as where compiling fails."""
        eager: Any = update_
        self._update = eager
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        largest = max(parameters, key=lambda parameter: parameter.numel(), default=None)
        for parameter in parameters:
            if parameter is not largest:
                parameter.grad = None

    def joined(self, parameter: Tensor) -> Tensor:
        """The float32 weights that a parameter is the upper half of."""
        return join(parameter.detach(), self.state[parameter]["remainder"])

    def widen(self) -> None:
        """Make the parameters float32 again; the optimizer is of no use afterwards."""
        for group in self.param_groups:
            for parameter in group["params"]:
                wide = self.joined(parameter)
                self.state.pop(parameter)
                parameter.grad = None
                parameter.data = wide


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Split a parameter in place; its remainder, and moments of 0."""
    parameter.data, remainder = split(parameter.data)
    num_blocks = -(-parameter.numel() // BLOCK)
    scales = [torch.zeros(num_blocks, device=parameter.device) for _ in range(2)]
    mean = torch.zeros_like(remainder, dtype=torch.int8)
    square = torch.zeros_like(remainder, dtype=torch.uint8)
    step = torch.zeros((), device=parameter.device)
    return dict(zip(STATE, (remainder, mean, scales[0], square, scales[1], step), strict=True))


def update_(
    narrow: Tensor,
    remainder: Tensor,
    mean_code: Tensor,
    square_code: Tensor,
    gradient: Tensor,
    mean_scale: Tensor,
    square_scale: Tensor,
    place: Tensor,
    step: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    skipped: Tensor,
    divisor: Tensor,
    betas: tuple[float, float],
) -> None:
    """Write what the first four, (B, BLOCK), and the scales, (B,), become in update number `step`, counted from 1.

    All of it in one pass over B blocks of weights, so that compiled it is one kernel. `place` of the first weight
    within its parameter, and `step`, are what chance depends on. Where `skipped` is 1, what is written is what was
    there; `gradient` is divided by `divisor`. Tensors without dimensions are numbers.
    """
    beta1, beta2 = betas
    gradient = gradient.float() / divisor
    mean = torch.lerp(decoded(mean_code, mean_scale, MEAN_CODES), gradient, 1 - beta1)
    square = torch.lerp(decoded(square_code, square_scale, SQUARE_CODES), gradient.square(), 1 - beta2)
    root = (square / (1 - beta2**step)).sqrt() + EPSILON
    wide = join(narrow, remainder) * (1 - lr * weight_decay) - lr * (mean / (1 - beta1**step)) / root
    chance = _chance(gradient.numel(), place, step).view_as(gradient)
    new_mean, new_mean_scale = encoded(mean, chance, MEAN_CODES)
    # The same number from its other end: mean and square are not rounded alike.
    new_square, new_square_scale = encoded(square, 1 - chance, SQUARE_CODES)
    new = (*split(wide), new_mean.to(torch.int8), new_square.to(torch.uint8), new_mean_scale, new_square_scale)
    for old, value in zip((narrow, remainder, mean_code, square_code, mean_scale, square_scale), new, strict=True):
        old.copy_(torch.where(skipped > 0, old, value))


def encoded(values: Tensor, chance: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """Give the codes of (B, BLOCK) values, signed, as float32, and the scales of their blocks, (B,).

    Args:
        values: (B, BLOCK) float32.
        chance: the same shape, in [0, 1): a code is the upper one of two where it is less than the value's share
            between them.
        codes: the largest code.
    """
    sizes = values.abs()
    scales = sizes.amax(dim=1)  # (B,)
    shares = sizes / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    at = (shares.log2() / STEP + codes).clamp(min=-1e4)  # log2(0) = -inf
    lower = at.floor()
    between = (torch.exp2(STEP * (at - lower)) - 1) / (2**STEP - 1)
    # Below the smallest code: that or 0.
    code = torch.where(at < 1, (chance < torch.exp2(STEP * (at - 1))).float(), lower + (chance < between))
    return code.clamp(max=codes) * values.sign(), scales


def decoded(code: Tensor, scales: Tensor, codes: int) -> Tensor:
    """Give the float32 values of (B, BLOCK) codes and the scales of their blocks, (B,)."""
    code = code.float()
    return torch.exp2(STEP * (code.abs() - codes)) * code.sign() * scales[:, None]


def _chance(count: int, place: Tensor, step: Tensor) -> Tensor:
    """(N,) numbers in [0, 1) that look random: a hash of places and step (Wellons 2018, lowbias32, in 63 bits)."""
    number = torch.arange(count, device=step.device) + place + step.long() * 0x9E3779B1
    number = number.bitwise_and(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = number.bitwise_xor(number.bitwise_right_shift(shift)).mul(factor).bitwise_and(0xFFFFFFFF)
    number = number.bitwise_xor(number.bitwise_right_shift(16))
    return number.bitwise_right_shift(8).float() * 2.0**-24
