"""Optimizers and learning-rate schedules by name."""

import math

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rmcore.config import TrainConfig

ADAM_BETAS = (0.9, 0.999)
"""Kingma & Ba 2015, arXiv:1412.6980."""


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices decay, vectors (biases, norm gains) do not.

    Source: the usual practice since Devlin et al. 2019, arXiv:1810.04805; decaying a norm's gain changes the function.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Build the optimizer named in `config` over the trainable parameters of `model`."""
    groups = decay_groups(model, config.weight_decay)
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, betas=ADAM_BETAS)
    if config.optimizer == "adam":
        return Adam(groups, lr=config.lr, betas=ADAM_BETAS)
    return SGD(groups, lr=config.lr, momentum=0.9)


def effective_warmup(warmup_steps: int, num_steps: int) -> int:
    """Warm-up steps of a run of `num_steps`: as configured, but at most a tenth of the run."""
    return min(warmup_steps, num_steps // 10)


def lr_factor(step: int, *, num_steps: int, warmup_steps: int, schedule: str) -> float:
    """Share of the peak learning rate used for optimizer step `step`, counted from 0.

    Linear from 1/warmup to 1 in the warm-up, then cosine or linear to 0 just after the last step, or constant.
    Source of the cosine: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def make_schedule(optimizer: Optimizer, config: TrainConfig, num_steps: int) -> LambdaLR:
    """Build the schedule; call `.step()` once an optimizer step."""
    warmup = effective_warmup(config.warmup_steps, num_steps)
    return LambdaLR(
        optimizer, lambda step: lr_factor(step, num_steps=num_steps, warmup_steps=warmup, schedule=config.schedule)
    )
