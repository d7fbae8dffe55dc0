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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rmcore.core.errors import ModelError
from rmcore.training.compiling import COMPILE_ERRORS

BLOCK = 256
"""Weights that share a scale."""
STEP = 0.1875
"""Spacing of the codes in powers of 2."""
MEAN_CODES, SQUARE_CODES = 127, 255
"""Largest codes. They reach down to 2 ** -24 and 2 ** -48 of the largest moment of a block; smaller ones are 0."""
CHUNK = 2**24
"""Weights that are updated at a time, a multiple of BLOCK: the arithmetic takes about 40 bytes for each."""
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
        compiled: whether the arithmetic is compiled into one kernel; where that fails, it continues without and says
        so.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], *, compiled: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._update: Callable[..., tuple[Tensor, ...]] = torch.compile(updated, dynamic=True) if compiled else updated
        self.found_inf: Tensor | None = None
        """0-d float32: 1 where this update is to be skipped. Set before each step, as it is for fused kernels."""
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
        state, device = self.state[parameter], parameter.device
        gradient: Any = parameter.grad
        applied = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        state["step"] += applied
        numbers = [torch.full((), number, device=device) for number in (group["lr"], group["weight_decay"])]
        flat = [one.view(-1) for one in (parameter.detach(), state["remainder"], state["mean"], state["square"])]
        for start in range(0, parameter.numel(), CHUNK):
            weights = [one[start : start + CHUNK] for one in (*flat, gradient.view(-1))]
            blocks = [state[name][start // BLOCK : (start + CHUNK) // BLOCK] for name in ("mean_scale", "square_scale")]
            new = self._updated(*weights, *blocks, state["step"].to(device), *numbers, group["betas"], start)
            for old, value in zip((*weights[:4], *blocks), new, strict=True):
                old.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, old, value))

    def _updated(self, *given: Any) -> tuple[Tensor, ...]:
        try:
            return self._update(*given)
        except COMPILE_ERRORS as error:
            if self._update is updated:
                raise
            print(f"warning: the update cannot be compiled ({type(error).__name__}); it is slower.", file=sys.stderr)
            self._update = updated
            return updated(*given)

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


def updated(
    narrow: Tensor,
    remainder: Tensor,
    mean_code: Tensor,
    square_code: Tensor,
    gradient: Tensor,
    mean_scale: Tensor,
    square_scale: Tensor,
    step: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    betas: tuple[float, float],
    place: int,
) -> tuple[Tensor, ...]:
    """Give what the first four and the two scales become in update number `step`, counted from 1; all flat.

    `place` of the first weight within its parameter, and `step`, are what chance depends on.
    """
    beta1, beta2 = betas
    gradient = gradient.float()
    mean = torch.lerp(decoded(mean_code, mean_scale, MEAN_CODES), gradient, 1 - beta1)
    square = torch.lerp(decoded(square_code, square_scale, SQUARE_CODES), gradient.square(), 1 - beta2)
    root = (square / (1 - beta2**step)).sqrt() + EPSILON
    wide = join(narrow, remainder) * (1 - lr * weight_decay) - lr * (mean / (1 - beta1**step)) / root
    chance = _chance(len(gradient), place, step)
    new_mean, new_mean_scale = encoded(mean, chance, MEAN_CODES)
    # The same number from its other end: mean and square are not rounded alike.
    new_square, new_square_scale = encoded(square, 1 - chance, SQUARE_CODES)
    return *split(wide), new_mean.to(torch.int8), new_square.to(torch.uint8), new_mean_scale, new_square_scale


def encoded(values: Tensor, chance: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """Give the codes of (N,) values, signed, as float32, and the scales of their blocks.

    Args:
        values: (N,) float32.
        chance: (N,) in [0, 1): a code is the upper one of two where it is less than the value's share between them.
        codes: the largest code.
    """
    sizes = nn.functional.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = sizes.amax(dim=1)  # (blocks,)
    shares = (sizes / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(values)]
    at = (shares.log2() / STEP + codes).clamp(min=-1e4)  # log2(0) = -inf
    lower = at.floor()
    between = (torch.exp2(STEP * (at - lower)) - 1) / (2**STEP - 1)
    # Below the smallest code: that or 0.
    code = torch.where(at < 1, (chance < torch.exp2(STEP * (at - 1))).float(), lower + (chance < between))
    return code.clamp(max=codes) * values.sign(), scales


def decoded(code: Tensor, scales: Tensor, codes: int) -> Tensor:
    """Give the (N,) float32 values of codes and the scales of their blocks."""
    code = code.float()
    sizes = torch.exp2(STEP * (code.abs() - codes)) * code.sign()
    return sizes * scales.repeat_interleave(BLOCK, output_size=len(scales) * BLOCK)[: len(code)]


def _chance(count: int, place: int, step: Tensor) -> Tensor:
    """(N,) numbers in [0, 1) that look random: a hash of places and step (Wellons 2018, lowbias32, in 63 bits)."""
    number = torch.arange(place, place + count, device=step.device) + step.long() * 0x9E3779B1
    number = number.bitwise_and(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = number.bitwise_xor(number.bitwise_right_shift(shift)).mul(factor).bitwise_and(0xFFFFFFFF)
    number = number.bitwise_xor(number.bitwise_right_shift(16))
    return number.bitwise_right_shift(8).float() * 2.0**-24
