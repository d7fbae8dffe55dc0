"""Which layers LoRA adapts: found by inspecting the module tree, because every architecture has names of its own."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from rmcore.config.model import LoraSettings
from rmcore.core.errors import ConfigError
from rmcore.models.head import is_reward_head

if TYPE_CHECKING:
    from peft import LoraConfig

LINEAR = (nn.Linear, Conv1D)
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Llama's names, which most causal models share: attention and MLP, and not the router of a mixture of experts."""


def make_lora_config(settings: LoraSettings) -> "LoraConfig":
    """The PEFT configuration of our settings; no targets mean `default_targets`, which `lora.attach` fills in."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT divides it by the rank
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or None,
    )


def check_names(model: nn.Module, targets: Iterable[str], saved: Iterable[str]) -> None:
    """Refuse names that match nothing; PEFT itself is content if one of them does.

    Args:
        model: without adapters.
        targets: names of layers to adapt, which the reward head is not among: it is trained whole.
        saved: names of modules to train whole.

    Raises:
        ConfigError: names those that match nothing, and what exists.
    """
    names = [name for name, _ in model.named_modules()]
    backbone = [name for name in names if not is_reward_head(name)]
    absent = sorted(target for target in targets if not any(matches(name, target) for name in backbone))
    if absent:
        raise ConfigError(
            f"LoRA targets {', '.join(absent)} match no layer of this model's backbone. {describe_layers(model)}"
        )
    unknown = sorted(part for part in saved if not any(matches(name, part) for name in names))
    if unknown:
        raise ConfigError(f"modules_to_save {', '.join(unknown)} are no modules of this model; name existing ones.")


def linear_layers(model: nn.Module) -> list[str]:
    """Full names of the layers that can carry an adapter: linear ones outside of the reward head."""
    return [name for name, part in model.named_modules() if isinstance(part, LINEAR) and not is_reward_head(name)]


def default_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers inside the repeated transformer blocks, as short as they stay unambiguous.

    Where all of Llama's seven projections exist, those; else every linear layer of a block. A pooler between the
    blocks and the head is never among them.

    Raises:
        ConfigError: there are no repeated blocks with linear layers.
    """
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    lists = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    linear = linear_layers(model)
    inside = {name: name.removeprefix(f"{one}.") for one in lists for name in linear if name.startswith(f"{one}.")}
    outside = [name for name, part in model.named_modules() if isinstance(part, LINEAR) and name not in inside]
    if {name.rpartition(".")[2] for name in inside} >= PROJECTIONS:
        outside += [name for name in inside if name.rpartition(".")[2] not in PROJECTIONS]
        inside = {name: path for name, path in inside.items() if name.rpartition(".")[2] in PROJECTIONS}
    if not inside:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks with linear layers, so LoRA targets cannot be found by "
            f"inspection; name them (lora.targets). {describe_layers(model)}"
        )
    targets = set()
    for name, path in inside.items():
        parts = path.split(".")[1:]  # without the number of the block
        suffixes = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        clear = [suffix for suffix in suffixes if not any(matches(other, suffix) for other in outside)]
        targets.add(clear[0] if clear else name)
    return sorted(targets)


def matches(name: str, target: str) -> bool:
    """PEFT's rule for a list of targets: the whole name or its last parts."""
    return name == target or name.endswith(f".{target}")


def describe_layers(model: nn.Module) -> str:
    """The short names of `linear_layers`, with counts, for messages."""
    counts = Counter(name.rpartition(".")[2] for name in linear_layers(model))
    return "Linear layers that exist: " + ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) + "."
