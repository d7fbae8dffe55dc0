"""The form in which a model trains on pairs, for as long as it trains: dropout, the head's precision, TF32."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from rmcore.config.train import TrainConfig
from rmcore.models.precision import float32_head
from rmcore.models.reward_model import BradleyTerryRM


@contextmanager
def training_form(rm: BradleyTerryRM, config: TrainConfig) -> Iterator[None]:
    """Give the model and the process what `config` asks for inside the block; afterwards both are as before."""
    with ExitStack() as stack:
        stack.callback(setattr, rm, "compiled", None)  # which are those of this training
        if not config.dropout:
            stack.enter_context(without_dropout(rm.model))
        if config.chosen_precision == "bf16":
            stack.enter_context(float32_head(rm.model))
            if rm.device.type == "cuda":  # TF32 for what stays float32: its three digits are more than bfloat16's two
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("high")
        yield


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout probability to zero inside the block but those of LoRA, which were set by name.

    The two sides of a pair would be masked differently, so dropout is noise in their margin; TRL's RewardTrainer
    switches it off as well (`disable_dropout`).
    """
    before = switch_off_dropout(model)
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)


def switch_off_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Set every dropout probability to zero but those of LoRA; returns where they were and what they were.

    Only modules are changed: `model.config`, and what is saved of it, keeps its own.
    """
    before: list[tuple[nn.Module, str, float]] = []
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            continue
        # Many layers hand a probability to a fused kernel or a function instead of having a Dropout module.
        for attribute, value in list(vars(module).items()):
            is_probability = attribute == "p" if isinstance(module, nn.Dropout) else "drop" in attribute
            if is_probability and isinstance(value, float):
                before.append((module, attribute, value))
                setattr(module, attribute, 0.0)
    return before
