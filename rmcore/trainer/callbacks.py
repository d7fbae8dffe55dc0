"""What is measured at each evaluation beside the loss: the protocol, and calibration.

Curvature along the trajectory is a callback too; it lives in rmcore/landscape, which knows more than the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rmcore.data.rendering import TokenizedPair
from rmcore.model import BradleyTerryRM


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation inside the training loop."""

    step: int
    rm: BradleyTerryRM
    """The model under training; a callback leaves weights, gradients, modes and random state as they are."""
    pairs: Sequence[TokenizedPair]
    """The validation pairs."""
    rewards: np.ndarray
    """(P, 2) float32 rewards of those pairs, chosen first."""


class Callback(Protocol):
    """Called after each evaluation; its numbers are logged at that step beside `eval/…`."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """Return metrics by name, each name with exactly one slash."""
