"""How many steps a training has: told without torch, so that a plan can be made of it."""

import math

from rmcore.config.train import TrainConfig

ENOUGH_STEPS = 60
"""Steps that a training is given where nothing was said: one pass over 300 pairs is 20, in which a pretrained encoder
learns next to nothing (benchmarks/results/few-pairs.md)."""
MOST_PASSES = 10
"""More passes over very few pairs learn them by heart."""


def passes(config: TrainConfig, num_pairs: int) -> float:
    """Passes over `num_pairs` training pairs, at least one: `epochs`, else as many as `ENOUGH_STEPS` take.

    >>> passes(TrainConfig(epochs=None), 300), passes(TrainConfig(epochs=None), 5000)
    (4, 1)
    """
    if config.epochs is not None:
        return config.epochs
    return min(MOST_PASSES, max(1, math.ceil(ENOUGH_STEPS * config.pairs_per_step / max(1, num_pairs))))


def planned_steps(config: TrainConfig, num_pairs: int) -> int:
    """Optimizer steps of a run over `num_pairs` training pairs: `steps`, else `passes` rounded to whole steps."""
    if config.steps is not None:
        return config.steps
    per_epoch = math.ceil(num_pairs / config.pairs_per_step)
    return max(1, round(passes(config, num_pairs) * per_epoch))
