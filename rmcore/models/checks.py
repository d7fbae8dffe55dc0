"""Checks of computed rewards: broken weights show as numbers that are not finite, or that are all the same."""

import sys
from collections.abc import Callable

import numpy as np

from rmcore.core.errors import ModelError

ENOUGH_TO_DIFFER = 4
"""Rewards of which not all are equal, unless the model or the answers are odd: two pairs."""


def refuse_not_finite(rewards: np.ndarray, name: Callable[[int], str]) -> None:
    """Raise where one of N rewards is NaN or infinite.

    Args:
        rewards: (N,)
        name: what the reward at a place is of, for the message.

    Raises:
        ModelError: names the first of them.
    """
    broken = np.flatnonzero(~np.isfinite(rewards))
    if len(broken):
        named = ", ".join(name(int(place)) for place in broken[:5])
        raise ModelError(
            f"{len(broken)} of {len(rewards)} rewards are not finite ({named}{', ...' if len(broken) > 5 else ''}): "
            "the weights are broken, or so large that sums overflow. Go back to an earlier checkpoint."
        )


def warn_of_equal(rewards: np.ndarray) -> None:
    """Say on stderr where all of N rewards of different answers are one number: a model that tells nothing."""
    if len(rewards) >= ENOUGH_TO_DIFFER and np.ptp(rewards) == 0:
        print(
            f"warning: all {len(rewards)} rewards are {float(rewards[0]):g}, so this model tells no answer from "
            "another: its weights, above all the reward head, may be zero or damaged. Compare with an earlier "
            "checkpoint.",
            file=sys.stderr,
        )
