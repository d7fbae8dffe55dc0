"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through PEFT: where they go, how they are saved and merged.

The reward head, and a pooler in front of it, are always trained beside the adapters: both are new, or of another task.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rmcore.config import LoraSettings
from rmcore.errors import ConfigError, ModelError
from rmcore.heads import reward_heads

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The specification's default targets; other architectures get all linear layers of their blocks."""
ADAPTER_FOLDER, BASE_FILE = "adapter", "rm_base.json"
ADAPTER_NAME = "default"


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What an adapter sits on: recorded beside it, so that it can be loaded alone."""

    name: str
    """Folder, hub name, alias or `tiny`."""
    seed: int
    """Of what is initialised rather than loaded."""

    def save(self, folder: Path) -> None:
        """Write `rm_base.json` into an adapter folder."""
        (folder / BASE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "AdapterBase":
        """Read the record; an adapter trained elsewhere has only PEFT's own."""
        path = folder / BASE_FILE
        if path.is_file():
            return cls(**json.loads(path.read_text()))
        return cls(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"], 0)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return (folder / "adapter_config.json").is_file()


def settings_to_config(settings: LoraSettings, model: nn.Module) -> "LoraConfig":
    """PEFT's configuration of our settings, with targets found by inspection where none are named."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # annotated int, used as a factor
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or default_targets(model),
    )


def add_adapters(model: nn.Module, config: "LoraConfig", *, seed: int) -> "PeftModel":
    """Put adapters into `model` and freeze the rest but the reward head.

    A user's configuration is kept attribute by attribute; only what must be set and is not gets filled in: the task
    type, the targets, and the reward head among the modules to save.

    Raises:
        ConfigError: the targets match no linear layer.
    """
    from peft import TaskType, get_peft_model

    config = copy.deepcopy(config)
    config.task_type = config.task_type or TaskType.SEQ_CLS
    if config.target_modules is None:
        config.target_modules = default_targets(model)
    check_targets(model, config.target_modules)
    heads = [name.rpartition(".")[2] for name in reward_heads(model)] + _poolers(model)
    config.modules_to_save = sorted({*(config.modules_to_save or []), *heads})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)  # type: ignore[arg-type]


def default_targets(model: nn.Module) -> str:
    """A pattern of the layers to adapt: `PROJECTIONS` in the transformer blocks, else every linear layer in them."""
    prefix, blocks = _blocks(model)
    names = {name.rpartition(".")[2] for name, module in blocks.named_modules() if isinstance(module, nn.Linear)}
    chosen = sorted(names & set(PROJECTIONS)) or sorted(names)
    return rf"{re.escape(prefix)}\.\d+\.(?:.*\.)?(?:{'|'.join(chosen)})"


def check_targets(model: nn.Module, targets: Any) -> None:
    """Refuse targets that match nothing, one by one.

    Raises:
        ConfigError: names what was not found and which linear layers there are.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name in linear) else [targets]
    else:
        missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if missing:
        counts = Counter(name.rpartition(".")[2] for name in linear)
        exist = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        raise ConfigError(
            f"LoRA targets {', '.join(sorted(missing))} match no linear layer of {type(model).__name__}; there are: "
            f"{exist}. Name some of these, or leave the targets out."
        )


def merged_weights(model: "PeftModel", state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the plain model with the adapters added in, W + scale B A, by its own names.

    Computed beside the live weights: merging and unmerging in place would change their last bits.

    Args:
        model: with adapters.
        state: its whole state dict.

    Raises:
        ModelError: an adapter is of a kind that is no plain product (DoRA, embeddings, convolutions).
    """
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    root = "base_model.model."
    deltas: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, LoraLinear) or any(module.use_dora.values()) or any(module.lora_bias.values()):
            raise ModelError(
                f"the adapter of {name} ({type(module).__name__}) is no plain low-rank product, so it cannot be merged "
                "while training; use plain LoRA on linear layers."
            )
        a, b = (state[f"{name}.lora_{part}.{ADAPTER_NAME}.weight"].float() for part in "AB")
        delta = module.scaling[ADAPTER_NAME] * (b @ a)
        deltas[f"{name}.base_layer.weight"] = delta.T if module.fan_in_fan_out else delta
    merged = {}
    for name, tensor in state.items():
        if ".lora_" in name or ".original_module." in name:
            continue
        plain = name.removeprefix(root).replace(".base_layer.", ".").replace(f".modules_to_save.{ADAPTER_NAME}.", ".")
        merged[plain] = (tensor + deltas[name].to(tensor)) if name in deltas else tensor
    return merged


def save_plain(model: "PeftModel", weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write merged weights as a folder of the plain model's class."""
    base: Any = model.get_base_model()
    base.save_pretrained(folder, state_dict=dict(weights))


def load_adapter(model: nn.Module, folder: Path) -> "PeftModel":
    """Put a saved adapter and its reward head on the model it belongs to."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder))  # type: ignore[arg-type]


def _blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the transformer blocks: the longest module list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of transformer blocks to look for LoRA targets in; name the targets."
        )
    return max(lists, key=lambda entry: len(entry[1]))


def _poolers(model: nn.Module) -> list[str]:
    return sorted({"pooler" for name, _ in model.named_modules() if name.rpartition(".")[2] == "pooler"})
