"""The parts of a model that are treated each in its own way: its transformer layers, and its reward head."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

REWARD_HEAD_PATTERNS: tuple[str, ...] = ("score", "classifier", "lm_head")
"""Module names of the reward head: `score` (causal models), `classifier` (encoders), `lm_head`."""


def without_adapters(model: Any) -> Any:
    """The Hugging Face model inside PEFT's wrapper, whose layers carry the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost layers of `model`, in order, found by their class; empty where it has none that is known.

    A layer is what Hugging Face checkpoints as one, or an element of a list whose class the model names as not to be
    split over devices (models with code of their own). The length of a list says nothing: one of experts may be longer.
    """
    whole = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}

    def within(module: nn.Module, listed: bool) -> list[nn.Module]:
        name = type(module).__name__.removeprefix("FSDP")  # which `fully_shard` puts before it
        if isinstance(module, GradientCheckpointingLayer) or (listed and name in whole):
            return [module]
        in_list = isinstance(module, nn.ModuleList)
        return [layer for child in module.children() for layer in within(child, in_list)]

    return within(model, listed=False)


def recompute_layers(model: Any, share: float = 1.0) -> None:
    """Have `share` of the layers of `model` recompute activations in training, the others not.

    The non-reentrant kind, which needs no gradient at its input: with adapters the embeddings are frozen. The last ones
    keep theirs: these are free again before the first layer is recomputed.
    """
    plain = without_adapters(model)
    if share == 0:
        for module in plain.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
        return
    how = {"use_reentrant": False}
    if hasattr(plain, "activation_checkpointing_enable"):
        plain.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:  # transformers before 5.23
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    layers = [module for module in plain.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[math.ceil(share * len(layers) - 1e-6) :]:
        layer.gradient_checkpointing = False


def can_recompute(model: Any) -> bool:
    """Whether layers of the model can recompute activations."""
    return bool(getattr(without_adapters(model), "supports_gradient_checkpointing", False))


def is_reward_head(name: str) -> bool:
    """Tell whether a module or parameter name belongs to the reward head.

    True if a whole dotted part of the name is one of `REWARD_HEAD_PATTERNS`, at any place: heads have layers of
    their own (`classifier.out_proj.weight`), and PEFT wraps names on both sides
    (`base_model.model.score.modules_to_save.default.weight`).
    """
    return not set(REWARD_HEAD_PATTERNS).isdisjoint(name.split("."))


def head_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Count the outputs of the reward head among a checkpoint's weights: the rows of its last layer; None: no head.

    Only names outside the layers of the backbone count, and `lm_head` does not: in a language model's checkpoint it
    gives tokens.

    Args:
        shapes: of the tensors, by name.
    """
    rows = []
    for name, shape in shapes.items():
        parts = name.split(".")
        outside = parts[: next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))]
        if parts[-1] == "weight" and len(shape) == 2 and {"score", "classifier"} & {*outside}:
            rows.append(shape[0])
    return min(rows, default=None)  # layers before the last one have the width of the model
