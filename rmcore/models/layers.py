"""The transformer layers of a model, which are compiled, and sharded, one by one."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


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
