"""Measurements at each evaluation besides the loss: the protocol of a callback, and calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rmcore.data.rendering import TokenizedPair
from rmcore.evaluation.calibration import BinnedCalibration, fit_temperature
from rmcore.models.reward_model import BradleyTerryRM

CALIBRATION_BINS = 10
"""As TrainConfig has them by default."""
PAIRS_PER_BIN = 2
"""With fewer validation pairs a bin a calibration error or a temperature is noise."""


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
    num_bins: int = CALIBRATION_BINS
    """Calibration bins."""


class Callback(Protocol):
    """Called after each evaluation; its numbers are logged at that step next to `eval/…`."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """Return metrics by name, each name with exactly one slash."""


def calibration(evaluation: Evaluation) -> dict[str, float]:
    """Whether sigmoid(beta * margin) can still be believed: accuracy often continues rising while this gets worse.

    Takes milliseconds, because the rewards are there already.

    Returns:
        calib/brier: mean of (1 - sigmoid(beta * margin))^2; 0.25 is guessing.
        calib/ece_debiased: see `rmcore.evaluation.calibration.BinnedCalibration`, with every pair for itself (prompts
            are not known here), so with several pairs a prompt it keeps a little of the bias that it takes away.
        calib/temperature: the number to divide beta * margin by; above 1 the model is too sure of itself.
        calib/loss_after_temperature: mean loss of beta * margin / temperature in nats. What eval/loss has beyond it is
            scale, which a later fit corrects; a rise of this one is lost order. In-sample, too low by about 1 / (2P)
            nats.

        Undefined ones are left out: all but the Brier score with fewer than `PAIRS_PER_BIN` pairs a bin or all margins
        equal; the last two also where no temperature is best (see `fit_temperature`).
    """
    log_odds = evaluation.rm.beta * (evaluation.rewards[:, 0].astype(np.float64) - evaluation.rewards[:, 1])
    found = {"calib/brier": float(np.mean(np.exp(-2 * np.logaddexp(0.0, log_odds))))}
    if len(log_odds) < PAIRS_PER_BIN * evaluation.num_bins or np.ptp(log_odds) == 0:
        return found
    every = np.arange(len(log_odds))
    binned = BinnedCalibration(log_odds, every, len(log_odds), evaluation.num_bins)
    found["calib/ece_debiased"] = max(0.0, float(binned(np.ones((1, len(log_odds))))["ece_debiased"][0]))
    temperature, _ = fit_temperature(log_odds)
    if temperature is not None:
        found["calib/temperature"] = temperature
        found["calib/loss_after_temperature"] = float(np.mean(np.logaddexp(0.0, -log_odds / temperature)))
    return found
