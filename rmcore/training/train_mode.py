"""The form in which a model trains: without dropout, its reward head in float32, and its weights as bfloat16 copies.

Autocast over float32 weights keeps the stream between the layers in float32, and rounds each weight again in each
micro-batch. Where the weights themselves are bfloat16, so is the stream, and its element-wise work takes half the
memory traffic. What must not be rounded is not: an update far smaller than a weight goes to the float32 weight
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.1), gradients of micro-batches add up in float32, and embeddings,
the reward head and the loss stay in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ModelError
from rmcore.models.packing.forward import evaluation_mode, rewards_of
from rmcore.models.packing.layout import PaddedRows
from rmcore.models.precision import float32_head, reward_heads
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.optimizers import LIKELIHOOD_PREFIX

HALF_BY_DEFAULT = {"cuda": True, "cpu": False}
"""Whether bf16 computes with bfloat16 weights on a device; on a CPU, where it was not measured, by autocast."""


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


class HalfWeights:
    """The weights of one model that have a bfloat16 copy. Parameters, their names and their gradients are the model's.

    Copied are float32 parameters but for those of embeddings (bfloat16 sums over a frequent token's places would lose
    most of them), of the reward head, and of what a likelihood learns. In a float64 model that is none.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the weights; no copy is made before it is used."""
        heads = {one for head in reward_heads(model).values() for one in head.modules()}
        self._embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
        exact = heads | {*self._embeddings}
        self._places = [
            (module, name, parameter)
            for prefix, module in model.named_modules()
            if module not in exact and not f"{prefix}.".startswith(LIKELIHOOD_PREFIX)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dtype == torch.float32
        ]
        self._copies: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies that there are."""
        return sum(copy.nbytes for copy in self._copies.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute with copies of the present weights inside the block; their gradients arrive at the weights."""
        self._refresh()
        hooks = [one.register_forward_hook(_narrowed) for one in self._embeddings if self._places]
        for module, name, parameter in self._places:
            module._parameters[name] = self._copies[parameter]
        try:
            yield
        finally:
            for module, name, parameter in self._places:
                module._parameters[name] = parameter
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights; frozen ones once. Gradients that a failed step left at copies are dropped."""
        for copy in self._copies.values():
            copy.grad = None
        for _, _, parameter in self._places:
            if parameter not in self._copies:
                copy = nn.Parameter(parameter.to(torch.bfloat16), requires_grad=parameter.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(_hand_over(parameter))
                self._copies[parameter] = copy
        trained = [(copy, weight) for weight, copy in self._copies.items() if weight.requires_grad]
        if trained:
            torch._foreach_copy_([copy for copy, _ in trained], [weight for _, weight in trained])


def _hand_over(parameter: nn.Parameter) -> Callable[[Tensor], None]:
    """Make the hook of a copy: its gradient is added to the parameter's in float32, and freed."""

    def hook(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None  # first: the next lines may run out of memory, and the step is redone
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad.add_(gradient)

    return hook


def _narrowed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def uses_half_weights(config: TrainConfig, device: torch.device) -> bool:
    """Whether a training in one process tries to compute with bfloat16 weights."""
    return config.chosen_precision == "bf16" and HALF_BY_DEFAULT[device.type]


def find_half_weights(model: nn.Module, device: torch.device) -> HalfWeights:
    """The half weights of a model, tried on two short rows.

    Raises:
        ModelError: it does not compute with them; the message is the reason. Layers that reach into another module's
            weights, as DeBERTa's do, meet two formats there, which autocast serves.
    """
    half = HalfWeights(model)
    ids = torch.ones((2, 4), dtype=torch.long, device=device)
    try:
        with torch.no_grad(), evaluation_mode(model), half.active():
            rewards_of(model, PaddedRows(ids, torch.ones_like(ids), ids.numel()))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{type(model).__name__} does not compute with bfloat16 weights ({reason})") from error
    return half
