"""Switching a model's own dropout off while it trains on pairs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout probability to zero inside the block but those of LoRA, which were asked for by name.

    The two sides of a pair would be masked differently, so dropout is noise in their margin; TRL's RewardTrainer
    switches it off as well (`disable_dropout`).
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
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)
