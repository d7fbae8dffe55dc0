"""Optimizers by name, as one object that steps and saves together, and learning rates as a function of the step.

Muon needs a second optimizer for what it is not made for, and SAM needs two passes a step; `OptimizerSet` hides how
many torch optimizers there are. Its state is stored by parameter name, so it survives another number of processes; the
learning rate is computed from the step, so there is no schedule to save.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.models.layers import is_reward_head
from rmcore.training.split_adamw import SplitAdamW

ADAM_BETA1 = 0.9
"""Decay of the mean of the gradient; that of its square is `adam_beta2`. Kingma & Ba 2015, arXiv:1412.6980."""
SGD_MOMENTUM = 0.9
LIKELIHOOD_PREFIX = "likelihood."
"""Beginning of the names of what a likelihood learns besides the model: widths of ties, thresholds."""
LIKELIHOOD_LR = 0.01
"""Peak learning rate of those: they are a handful of numbers of size 1, which 5e-6 would never move."""
SAM_RADIUS = 0.05
"""Length of the ascent step of `sam`: rho of Foret et al. 2021, arXiv:2010.01412."""
LION_BETAS = (0.9, 0.99)
"""Shares of the momentum in the update and in the next momentum: Chen et al. 2023, arXiv:2302.06675."""
MIN_LR_RATIO = 0.1
"""Share of the peak learning rate that the schedule `cosine_with_min` ends at; OpenRLHF's default."""
MUON_MOMENTUM = 0.95
"""Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""

NamedState = dict[str, dict[str, Tensor]]
"""{parameter name: {key: tensor}}."""
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_STEPS = 5
"""Steps of the quintic Newton-Schulz iteration: as in torch.optim.Muon and in Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/."""
MUON_EPS = 1e-7


class Lion(Optimizer):
    """Lion with decoupled decay: each weight moves by the learning rate, by the sign of its momentum.

    Source:
        Chen et al. 2023, Symbolic discovery of optimization algorithms, arXiv:2302.06675, algorithm 2.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; there is no closure."""
        of_update, of_next = LION_BETAS
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                moved = momentum.mul(of_update).add_(gradient, alpha=1 - of_update).sign_()
                parameter.add_(moved, alpha=-group["lr"])
                momentum.mul_(of_next).add_(gradient, alpha=1 - of_next)


class OptimizerSet:
    """One or several torch optimizers that update one model together.

    Training calls `zero_grad`, accumulates gradients, and `step`. If `sharpness_aware`, a step is two passes (SAM,
    Foret et al. 2021, arXiv:2010.01412): accumulate, `ascend`, `zero_grad`, accumulate again, `descend`, `step`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], parts: Sequence[Optimizer], *, ascent_radius: float | None = None
    ) -> None:
        """Bundle `parts`, which hold each of the named `parameters` once; `ascent_radius` is SAM's rho, or None."""
        self._parameters = dict(parameters)
        self._parts = list(parts)
        self._ascent_radius = ascent_radius
        self._before_ascent: dict[nn.Parameter, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live parameter groups of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    @property
    def sharpness_aware(self) -> bool:
        """Whether a step takes `ascend`, a second gradient and `descend` before it."""
        return self._ascent_radius is not None

    @property
    def can_skip(self) -> bool:
        """Whether `step` takes `skip`: fused kernels look at it. SAM's second pass needs the host's eyes anyway."""
        return not self.sharpness_aware and all(
            isinstance(part, SplitAdamW) or group.get("fused") for part in self._parts for group in part.param_groups
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept from step to step: moments, step counts. On several ranks those of whole tensors."""
        kept = (value for part in self._parts for state in part.state.values() for value in state.values())
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))

    def zero_grad(self) -> None:
        """Drop all gradients (they become None)."""
        for part in self._parts:
            part.zero_grad()

    def step(self, *, skip: Tensor | None = None, divisor: Tensor | None = None) -> None:
        """Update the weights from their gradients.

        Args:
            skip: 0-d float32 on the weights' device, 0 or 1; only where `can_skip`. If it is 1, weights, moments and
                step counts stay as they are (the moments of a very first step are then without meaning). The host
                does not look at it.
            divisor: 0-d float32 on the weights' device, by which gradients are divided first; only where `can_skip`.
        """
        if (skip is not None or divisor is not None) and not self.can_skip:
            raise TrainingError("this optimizer cannot skip an update on the device; read the step before its update.")
        for part in self._parts:
            vars(part).update(found_inf=skip, grad_scale=divisor)  # as torch.amp.GradScaler hands them to fused kernels
            part.step()

    def keep_costliest_gradients(self) -> None:
        """Drop the gradients whose update takes no more memory at a time than that of one that is left."""
        for part in self._parts:
            if isinstance(part, SplitAdamW):
                part.keep_costliest_gradients()

    @torch.no_grad()
    def ascend(self) -> None:
        """Move all weights by rho g / ||g||, the norm being over all gradients; on several ranks all must call it."""
        if self._ascent_radius is None:
            raise TrainingError("ascend was called on an optimizer that is not sharpness-aware; use optimizer=sam.")
        if self._before_ascent:
            raise TrainingError("ascend was called twice; the weights of before would be lost. Call descend between.")
        with_gradient = {p: p.grad for p in self._parameters.values() if p.grad is not None}
        norm = nn.utils.get_total_norm(with_gradient.values())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        scale = self._ascent_radius / (float(norm) + 1e-12)
        for parameter, gradient in with_gradient.items():
            self._before_ascent[parameter] = parameter.detach().clone()
            parameter.add_(gradient, alpha=scale)

    @torch.no_grad()
    def descend(self) -> None:
        """Put back the weights of before `ascend`, bit for bit; nothing without one, so cleaning up may call it."""
        for parameter, before in self._before_ascent.items():
            parameter.copy_(before)
        self._before_ascent.clear()

    def whole_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The float32 weights, on the CPU, of parameters of `model` that are upper halves of them (adamw8bit)."""
        joined = {p: part.joined for part, p in self._placed() if isinstance(part, SplitAdamW)}
        named = model.named_parameters(remove_duplicate=False)
        return {name: joined[p](p).cpu() for name, p in named if p in joined}

    def exact(self, tensor: Tensor) -> Tensor:
        """Give the float32 weights where `tensor` is a parameter that is the upper half of them; else `tensor`."""
        for part in self._parts:
            if isinstance(part, SplitAdamW) and tensor in part.state:
                return part.joined(tensor)
        return tensor

    def widen(self) -> None:
        """Make such parameters float32 again; the optimizer is of no use afterwards."""
        for part in self._parts:
            if isinstance(part, SplitAdamW):
                part.widen()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters, by name."""
        return self._parameters

    def named_state(self) -> NamedState:
        """The live state by parameter name, sharded where the parameters are; {} for a parameter never updated."""
        state_of = {parameter: part.state.get(parameter, {}) for part, parameter in self._placed()}
        return {name: dict(state_of[parameter]) for name, parameter in self._parameters.items()}

    def load_named_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue with the tensors of a `named_state`, themselves and no copies of them, placed like the parameters.

        Raises:
            TrainingError: names or shapes are those of another model. The optimizer is left as it was.
        """
        differing = sorted(self._parameters.keys() ^ state.keys())
        if differing:
            raise TrainingError(
                f"the saved optimizer state and the model differ in {len(differing)} parameter names, first "
                f"{differing[:3]}: the state belongs to another model or other trained parameters. Start again in "
                "another folder."
            )
        for name, parameter in self._parameters.items():
            _check_shapes(state[name], parameter, name)
        for part, parameter in self._placed():
            part.state.pop(parameter, None)
        names = {parameter: name for name, parameter in self._parameters.items()}
        for part, parameter in self._placed():
            if state[names[parameter]]:
                part.state[parameter] = dict(state[names[parameter]])

    def _placed(self) -> list[tuple[Optimizer, nn.Parameter]]:
        return [(part, p) for part in self._parts for group in part.param_groups for p in group["params"]]


def whole(tensor: Tensor, *, keep: bool = True) -> Tensor:
    """A copy of a tensor on the CPU, gathered from all ranks where it is sharded; then all must call this.

    Ranks that do not `keep` it get an empty tensor: one copy in a host's memory is enough.
    """
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True) if keep else torch.empty(0)


def _check_shapes(values: Mapping[str, Tensor], parameter: nn.Parameter, name: str) -> None:
    for key, value in values.items():
        # Adam counts steps in a tensor of its own; a scale is that of many weights.
        if key != "step" and not key.endswith("_scale") and value.shape != parameter.shape:
            raise TrainingError(
                f"the saved optimizer state has {key} of shape {tuple(value.shape)} for {name}, which is "
                f"{tuple(parameter.shape)}: it belongs to another model. Start again in another folder."
            )


def make_optimizer(model: nn.Module, config: TrainConfig) -> OptimizerSet:
    """Build the optimizer named in `config` over the trainable parameters of `model`.

    adamw8bit makes the parameters of the backbone bfloat16, see `rmcore.training.split_adamw`. adamw, adamw8bit, muon,
    lion and sam decay weights directly; adam and sgd add the decay to the gradient. A `muon` step moves a matrix by
    about as much as AdamW does at the same learning rate.
    adam, adamw, adamw8bit and, in one process, sgd `can_skip` an update; the others do not.

    Raises:
        ConfigError: the model is sharded over processes and the optimizer is not exact there.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    name, lr = config.optimizer, config.lr
    if name == "muon":
        return OptimizerSet(trained, _muon_parts(model, config))
    groups, betas = parameter_groups(trained, config), (ADAM_BETA1, config.adam_beta2)
    if name == "adamw8bit":
        return OptimizerSet(trained, _split_parts(trained, config))
    if name == "adam":
        return OptimizerSet(trained, [Adam(groups, lr=lr, betas=betas, fused=True)])
    if name == "sgd":
        sharded = any(isinstance(parameter, DTensor) for parameter in trained.values())
        # torch (2.13) has no fused SGD of sharded tensors.
        return OptimizerSet(trained, [SGD(groups, lr=lr, momentum=SGD_MOMENTUM, fused=not sharded)])
    if name == "lion":
        return OptimizerSet(trained, [Lion(groups, lr)])
    radius = SAM_RADIUS if name == "sam" else None
    return OptimizerSet(trained, [AdamW(groups, lr=lr, betas=betas, fused=True)], ascent_radius=radius)


def _split_parts(trained: Mapping[str, nn.Parameter], config: TrainConfig) -> list[Optimizer]:
    """Split AdamW over the backbone; plain AdamW over the reward head, which computes in float32, and few numbers."""
    if any(isinstance(parameter, DTensor) for parameter in trained.values()):
        raise ConfigError(
            "optimizer=adamw8bit with a model sharded over processes: its blocks of weights would depend on how many "
            "there are. Use adamw, of which each process keeps its share, or train in one process."
        )
    kept = {name: p for name, p in trained.items() if is_reward_head(name) or name.startswith(LIKELIHOOD_PREFIX)}
    backbone = [p for name, p in trained.items() if name not in kept]
    betas = (ADAM_BETA1, config.adam_beta2)
    # Not compiled, an update moves some 1,000 bytes a weight: seconds a step at 8 B.
    compiled = config.compile or any(parameter.is_cuda for parameter in backbone)
    return [
        SplitAdamW(decay_groups(backbone, config.weight_decay), config.lr, betas, compiled=compiled),
        AdamW(parameter_groups(kept, config), lr=config.lr, betas=betas, fused=True),
    ]


def parameter_groups(named: Mapping[str, nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """The `decay_groups` of the model and, where a likelihood learns besides it, a group with an `lr_scale`.

    `set_learning_rate` multiplies by that.
    """
    learned = [parameter for name, parameter in named.items() if name.startswith(LIKELIHOOD_PREFIX)]
    model = [parameter for name, parameter in named.items() if not name.startswith(LIKELIHOOD_PREFIX)]
    groups = decay_groups(model, config.weight_decay)
    if learned:
        scale = max(1.0, LIKELIHOOD_LR / config.lr)
        groups.append({"params": learned, "weight_decay": 0.0, "lr_scale": scale, "lr": config.lr * scale})
    return groups


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices decay, vectors (biases, norm gains) do not.

    Source: the usual practice since Devlin et al. 2019, arXiv:1810.04805; decaying a norm's gain changes the function.
    """
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights Muon is made for: 2-D, not of an `nn.Embedding`, not of the reward head.

    A weight that an embedding shares with another module is an embedding, and occurs once.
    """
    others = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    others |= {p for name, p in model.named_parameters(remove_duplicate=False) if is_reward_head(name)}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and p not in others]


def _muon_parts(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    """Muon over `hidden_matrices`, AdamW over embeddings, reward head, norms, biases and all that is not 2-D.

    `match_rms_adamw` scales Muon's update to the size of AdamW's, so that one learning rate and decay serve both (Liu
    et al. 2025, arXiv:2502.16982, section 2.2).
    """
    hidden = hidden_matrices(model)
    if not hidden:
        raise ConfigError(
            "optimizer=muon moves matrices of the backbone, and none of them is trained (model.head_only); use adamw, "
            "which is what muon itself uses for the reward head."
        )
    if any(isinstance(parameter, DTensor) for parameter in hidden):
        # Measured with two processes: within 20 steps the weights part by 0.7 % of what they moved, in float64 too.
        raise ConfigError(
            "optimizer=muon with a model sharded over processes: Muon orthogonalises whole matrices, which rounds "
            "differently when they are sharded, so the outcome would depend on the number of processes. Use adamw, or "
            "train in one process."
        )
    among = set(hidden)
    kind = Float32Muon if hidden[0].device.type == "cpu" else Muon
    rest = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in among}
    return [
        kind(
            hidden,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=MUON_MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(parameter_groups(rest, config), lr=config.lr, betas=(ADAM_BETA1, config.adam_beta2), fused=True),
    ]


def effective_warmup(warmup_steps: int, num_steps: int) -> int:
    """Warm-up steps of a run of `num_steps`: as configured, but at most a tenth of the run."""
    return min(warmup_steps, num_steps // 10)


def lr_factor(step: int, *, num_steps: int, warmup_steps: int, schedule: str) -> float:
    """Share of the peak learning rate used for optimizer step `step`, counted from 0.

    Linear from 1/warmup to 1 in the warm-up; then constant, or linear or by a cosine to 0 just after the last step, or
    (cosine_with_min) by a cosine to `MIN_LR_RATIO`.
    Source of the cosine: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return 1 - progress
    floor = MIN_LR_RATIO if schedule == "cosine_with_min" else 0.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: OptimizerSet, config: TrainConfig, step: int, num_steps: int) -> float:
    """Set the learning rate of step `step` (from 0) of `num_steps`, in all groups; call it before the step.

    Returns:
        The learning rate, of the groups without an `lr_scale`.
    """
    factor = lr_factor(
        step,
        num_steps=num_steps,
        warmup_steps=effective_warmup(config.warmup_steps, num_steps),
        schedule=config.schedule,
    )
    lr = config.lr * factor
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` and Nesterov momentum, its products in float32.

    torch does them in bfloat16, which is what a GPU is fast at. A CPU without bfloat16 units does them some 30 times
    slower than in float32 (2 against 65 GFLOP/s on one core): 58 % of a small model's training.
    State and groups are torch's, so what one has saved the other resumes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; there is no closure."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                updates = orthogonalised(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                # Liu et al. 2025, arXiv:2502.16982, section 2.2: the size of AdamW's update.
                adjusted = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-adjusted)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        assert parameter.grad is not None  # noqa: S101 - those without were left out
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices of one shape with their singular values brought near 1, by Newton-Schulz: (M, A, B) -> (M, A, B)."""
    a, b, c = MUON_COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices  # the smaller Gram matrix
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=MUON_EPS)
    for _ in range(MUON_STEPS):
        gram = found @ found.mT  # (M, A, A)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found
