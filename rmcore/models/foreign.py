"""Reward heads as other trainers save them.

| trainer | tensor | added to the reward |
| --- | --- | --- |
| TRL's value-head models, LLaMA-Factory (in value_head.safetensors) | v_head.summary.weight, .bias | bias |
| trlX | v_head.weight | |
| OpenRLHF | value_head.weight or score.weight | (r - mean) / std, where config.json says normalize_reward |
| UltraRM | regression_head.weight | |
| token classifiers with one label | score.weight, .bias | bias |

All of them read the last token, as Hugging Face's causal classifiers do, which have no bias: a scale is multiplied into
the head, and a constant, which changes no comparison of two answers, is left out and named on stderr.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rmcore.core.errors import ModelError
from rmcore.models.seal import SEAL_FILE
from rmcore.models.weight_files import WEIGHTS_FILE, Held, read_index, read_tensors

HEADS = ("v_head.summary", "v_head", "value_head", "regression_head")
"""Modules that are a reward head next to a whole language model or backbone."""
ROOTS = frozenset(name.split(".")[0] for name in HEADS)
HEAD_FILES = ("value_head.safetensors", "value_head.bin")
"""LLaMA-Factory's, for whole models and for adapters; the second is a pickle, and is refused."""
NORMALISATION = ("normalize_reward", "mean", "std")
"""OpenRLHF's entries of config.json."""


@dataclass(frozen=True, slots=True)
class ForeignHead:
    """A linear head: reward = weight · last hidden state + bias, and then (reward - mean) / std."""

    name: str
    """The tensor's name, with its file."""
    weight: Tensor | None
    """(1, D) in float32; None: it is `score.weight`, which the class reads by itself."""
    bias: float = 0.0
    mean: float = 0.0
    std: float = 1.0

    @property
    def constant(self) -> float:
        """The constant that is left out: every reward of its trainer is greater by it."""
        return (self.bias - self.mean) / self.std


def find_foreign_head(
    folder: Path, config: PretrainedConfig | None = None, known: Mapping[str, Held] | None = None
) -> ForeignHead | None:
    """Find the head of another trainer in a folder of a model or of an adapter; a sealed folder has none.

    Args:
        folder: with the weights.
        config: of the model; None for an adapter, which has none of its own.
        known: the tensors of the folder, where its headers were read; None: they are read.

    Raises:
        ModelError: there are several heads, or one of another shape than a linear layer with one output, or of numbers
            that are not finite.
    """
    if (folder / SEAL_FILE).exists():  # written here, with its head in `score`: what was added later is not its head
        return None
    mean, std = _normalisation(folder, config)
    shapes = {name: held.shape for name, held in (read_tensors(folder) if known is None else known).items()}
    files = [folder / name for name in HEAD_FILES if (folder / name).is_file()]
    within = [name for name in HEADS if f"{name}.weight" in shapes]
    own = ["score"] if shapes.get("score.weight", (0,))[0] == 1 else []
    others = sorted(name for name in shapes if name.split(".")[0] in ROOTS)
    if len(files) + len(within) + (len(own) if files or within else 0) > 1 or (others and not within):
        raise _unlike(folder, [*(file.name for file in files), *others, *(f"{name}.weight" for name in own)])
    if files:
        tensors = _read_head_file(files[0])
        weights = [name for name in tensors if name.endswith("weight")]
        if len(weights) != 1:
            raise _unlike(files[0], sorted(tensors))
        bias = tensors.get(weights[0].removesuffix("weight") + "bias")
        return _checked(f"{weights[0]} of {files[0]}", tensors[weights[0]], bias, mean, std)
    if within:
        bias = _tensor(folder, f"{within[0]}.bias") if f"{within[0]}.bias" in shapes else None
        weight = _tensor(folder, f"{within[0]}.weight")
        return _checked(f"{within[0]}.weight of {folder}", weight, bias, mean, std)
    kinds = (config.architectures if config is not None else None) or []
    is_token_classifier = any("TokenClassification" in kind for kind in kinds)
    if own and (is_token_classifier or (mean, std) != (0.0, 1.0)):
        constant = float(_tensor(folder, "score.bias").sum()) if "score.bias" in shapes else 0.0
        return ForeignHead(f"score.weight of {folder}", None, constant, mean, std)
    return None


def install(head: ForeignHead, model: PreTrainedModel, source: str) -> str:
    """Put a foreign head into a causal sequence-classification model, in place; say on stderr what was done.

    Returns:
        The name of the parameter that it is in now.

    Raises:
        ModelError: the model's class has no linear `score`, or one of another width.
    """
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise ModelError(
            f"{source} has the reward head {head.name}, and {type(model).__name__} has no linear layer `score` that it "
            "could become: only causal models' heads are read."
        )
    with torch.no_grad():
        if head.weight is not None:
            if head.weight.shape != score.weight.shape:
                raise ModelError(
                    f"the reward head {head.name} is {tuple(head.weight.shape)}, and {type(model).__name__} wants "
                    f"{tuple(score.weight.shape)}: it was trained on another model."
                )
            score.weight.copy_(head.weight)
        score.weight.div_(head.std)
    config = cast(Any, model.config)
    for name in NORMALISATION:  # what is multiplied in must not be divided by once more
        if hasattr(config, name):
            delattr(config, name)
    constant = (
        f"; its trainer's rewards are these {head.constant:+.6g}, a constant that changes no comparison and that a "
        "plain Hugging Face folder has no place for"
        if head.constant
        else ""
    )
    scaled = f", divided by config.json's std of {head.std:.6g}" if head.std != 1.0 else ""
    print(f"note: the reward head of {source} is {head.name}{scaled}{constant}.", file=sys.stderr)
    return "score.weight"


def _normalisation(folder: Path, config: PretrainedConfig | None) -> tuple[float, float]:
    if config is None or getattr(config, "normalize_reward", False) is not True:
        return 0.0, 1.0
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    known = [isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in (mean, std)]
    if not all(known) or cast(float, std) <= 0:
        raise ModelError(
            f"config.json of {folder} says normalize_reward with mean={mean!r} and std={std!r}: OpenRLHF's rewards are "
            "(r - mean) / std, with a std above 0. Restore them, or set normalize_reward to false for the raw reward."
        )
    return float(cast(float, mean)), float(cast(float, std))


def _read_head_file(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        raise ModelError(
            f"the reward head {file} is a pickle, which may hold a program; save its tensors as {HEAD_FILES[0]}."
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the reward head {file} cannot be read ({error}); copy or save it again.") from error


def _checked(name: str, weight: Tensor, bias: Tensor | None, mean: float, std: float) -> ForeignHead:
    whole = weight.float()
    constant = 0.0 if bias is None or bias.numel() != 1 else float(bias)
    if whole.ndim != 2 or whole.shape[0] != 1 or (bias is not None and bias.numel() != 1):
        raise ModelError(
            f"the head {name} is {tuple(weight.shape)}, and a reward model's is one linear layer with one output."
        )
    if not bool(torch.isfinite(whole).all()) or not math.isfinite(constant):
        raise ModelError(f"the head {name} holds NaN or infinity, so its rewards would mean nothing.")
    return ForeignHead(name, whole, constant, mean, std)


def _tensor(folder: Path, name: str) -> Tensor:
    file = WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else (read_index(folder) or {})[name]  # as read_tensors
    with safe_open(folder / file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _unlike(place: Path, names: list[str]) -> ModelError:
    return ModelError(
        f"{place} holds {', '.join(names[:4])}, which is not one linear reward head; heads of several layers or of "
        "several outputs cannot become a plain sequence-classification model."
    )
