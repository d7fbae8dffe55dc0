"""Which parameters are the reward head: one rule for the model, the optimizers and the adapters.

Hugging Face's sequence-classification classes call their head by few names. Whoever treats the head differently from
the backbone (kept trainable beside adapters, float32 under autocast, AdamW beside Muon) asks here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

REWARD_HEAD_PATTERNS: tuple[str, ...] = ("score", "classifier", "lm_head")
"""Module names of the reward head: `score` (causal models), `classifier` (encoders), `lm_head`."""


def is_reward_head(name: str) -> bool:
    """Tell whether a module or parameter name belongs to the reward head.

    True if a whole dotted part of the name is one of `REWARD_HEAD_PATTERNS`, wherever it stands: heads have layers of
    their own (`classifier.out_proj.weight`), and PEFT wraps names on both sides
    (`base_model.model.score.modules_to_save.default.weight`).
    """
    return not set(REWARD_HEAD_PATTERNS).isdisjoint(name.split("."))


def reward_heads(model: nn.Module) -> dict[str, nn.Module]:
    """The reward head's outermost modules by name (one in all known classes, also inside PEFT's wrappers)."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in REWARD_HEAD_PATTERNS and not is_reward_head(name.rpartition(".")[0])
    }


@contextmanager
def float32_head(model: nn.Module) -> Iterator[None]:
    """Run the reward head in float32 inside the block, whatever autocast says: bf16 rewards have 8 bits, margins fewer.

    Restored afterwards; do not copy the model meanwhile.
    """
    heads = list(reward_heads(model).values())
    before = [head.forward for head in heads]

    def wide(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(features: Tensor, *rest: Any, **named: Any) -> Tensor:
            with torch.autocast(features.device.type, enabled=False):
                return forward(features.float(), *rest, **named)

        return run

    for head in heads:
        head.forward = wide(head.forward)
    try:
        yield
    finally:
        for head, forward in zip(heads, before, strict=True):
            head.forward = forward
