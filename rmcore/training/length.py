"""How many steps a training has: told without torch, so that a plan can be made of it."""

import math

from rmcore.config.train import TrainConfig


def planned_steps(config: TrainConfig, num_pairs: int) -> int:
    """Optimizer steps of a run over `num_pairs` training pairs: `steps`, else `epochs` rounded to whole steps."""
    if config.steps is not None:
        return config.steps
    per_epoch = math.ceil(num_pairs / config.pairs_per_step)
    return max(1, round(config.epochs * per_epoch))
