"""Which parameters a curvature is taken over, and the state in which a model can be differentiated twice.

Three things would silently give numbers that mean nothing, so they are taken care of here: dropout (the model is in
evaluation mode while it is measured), narrow floats (refused) and attention kernels without a second derivative (the
MATH kernel is used).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmcore.core.errors import ConfigError, CurvatureError, ModelError
from rmcore.models.layers import REWARD_HEAD_PATTERNS, is_reward_head
from rmcore.models.precision import narrow_floats

ParameterSubset = str | tuple[str, ...]
"""`all`: every parameter that is trained. `head`: those of the reward head. `embeddings`: those of the embeddings.
`lora`: those of adapters. Otherwise the dotted name of a module or of one parameter, as `model.layers.3` or
`model.layers.3.self_attn.q_proj.weight`. Several of these in a tuple: all of theirs."""

NAMED_SUBSETS = ("all", "head", "embeddings", "lora")
_LAYER = re.compile(r"^(.+?\.\d+)\.")  # the first numbered module: `model.layers.3`, `bert.encoder.layer.3`


def reward_module(model: Any) -> nn.Module:
    """The torch module to differentiate: `model` itself, or the `.model` of a wrapper such as BradleyTerryRM.

    Raises:
        ModelError: there is no torch module in it.
        CurvatureError: it is compiled, or a parameter is narrower than float32 (bf16 puts about 0.7 % of error on H v).
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"got a {type(model).__name__} without a torch module in `.model`: there is nothing to differentiate. "
            "Pass a Hugging Face sequence-classification model or a BradleyTerryRM."
        )
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules()):
        raise CurvatureError(
            "the model is compiled, and torch.compile cannot be differentiated twice. Pass the module as it was before "
            "(`compiled._orig_mod`), or load the checkpoint again."
        )
    if narrow := narrow_floats(module):
        raise CurvatureError(
            f"the model has {', '.join(narrow)} parameters: second derivatives drown in their rounding. Load it in "
            "float32."
        )
    return module


def loss_temperature(model: Any) -> float:
    """T of the loss softplus(-margin / T) that a model was trained with: 1 / beta; 1 of a module, which has none."""
    return 1.0 if isinstance(model, nn.Module) else 1 / float(getattr(model, "beta", 1.0))


def select_parameters(module: nn.Module, subset: ParameterSubset) -> dict[str, nn.Parameter]:
    """The trained parameters of `subset` by name, in the module's own order (the order inside every flat vector).

    Raises:
        ConfigError: nothing has that name.
        ModelError: what has that name is frozen or made of integers.
    """
    named = dict(module.named_parameters())
    parts = (subset,) if isinstance(subset, str) else subset
    for part in parts:
        _check_known(part, named)
    chosen = {name: parameter for name, parameter in named.items() if any(_belongs(name, part) for part in parts)}
    trained = {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}
    if not trained:
        raise ModelError(
            f"no trained parameter belongs to parameters={subset!r}: {_why_none(subset, list(chosen.values()))}. "
            "Unfreeze with requires_grad_(True), or choose other parameters."
        )
    return trained


def _check_known(part: str, named: Iterable[str]) -> None:
    names = list(named)
    if part in NAMED_SUBSETS or any(_belongs(name, part) for name in names):
        return
    inside = [name.split(".") for name in names]
    modules = list(dict.fromkeys(".".join(one[:depth]) for one in inside for depth in range(1, len(one))))
    near = get_close_matches(part, [*NAMED_SUBSETS, *modules, *names], n=3, cutoff=0.4) or modules[:3]
    raise ConfigError(
        f"parameters={part!r} names nothing in this model. Choose {', '.join(NAMED_SUBSETS)}, or the dotted name "
        f"of a module or parameter, such as {', '.join(near)}."
    )


def _belongs(name: str, part: str) -> bool:
    if part == "all":
        return True
    if part == "head":
        return is_reward_head(name)
    if part == "embeddings":
        return "embed" in name.lower() and not is_reward_head(name) and _LAYER.match(name) is None
    if part == "lora":
        return ".lora_" in name
    return name == part or name.startswith(f"{part}.")


def _why_none(subset: ParameterSubset, chosen: Sequence[nn.Parameter]) -> str:
    if any(not parameter.is_floating_point() for parameter in chosen):
        return "they are integers, as in a quantised model, and have no derivative"
    if chosen:
        return f"all {len(chosen)} are frozen"
    wanted = {"head": ", ".join(REWARD_HEAD_PATTERNS), "embeddings": "embed...", "lora": "lora_A or lora_B"}
    parts = (subset,) if isinstance(subset, str) else subset
    return f"no module is named {' or '.join(wanted.get(part, part) for part in parts)}"


@contextmanager
def measuring(module: nn.Module, selected: Sequence[nn.Parameter]) -> Iterator[None]:
    """Evaluation mode, twice differentiable attention, gradients to `selected` only; then as before.

    Full precision whatever autocast the caller is in.

    Freezing the rest spares its graph: for the head alone the backbone then runs without any. The modes are kept
    module by module, because a caller may hold part of a model in evaluation mode.
    """
    modes = [(part, part.training) for part in module.modules()]
    keep = {id(parameter) for parameter in selected}
    frozen = [p for p in module.parameters() if p.requires_grad and id(p) not in keep]
    device_type = selected[0].device.type
    module.eval()
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device_type, enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for part, training in modes:
            part.training = training
