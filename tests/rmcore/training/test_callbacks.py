"""Calibration at evaluation: right on margins whose truth is known, silent where a number would mean nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.training.evaluation import CALIBRATION_BINS, PAIRS_PER_BIN, Evaluation, calibration

CALIBRATION_PAIRS = PAIRS_PER_BIN * CALIBRATION_BINS


def evaluate(margins, beta=1.0):
    """Calibration of rewards with these margins, of a model with this beta."""
    margins = np.asarray(margins)
    offsets = np.arange(len(margins)) % 4 / 4  # what a prompt adds to both sides; exact in float32
    rewards = np.stack([offsets + margins / 2, offsets - margins / 2], axis=1).astype(np.float32)
    return calibration(Evaluation(step=1, rm=SimpleNamespace(beta=beta), pairs=[], rewards=rewards))


def calibrated(num, seed=0, spread=2.0):
    """Margins whose sign is right with probability sigmoid(|margin|): no miscalibration at all."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.normal(0, spread, num))
    return np.where(rng.random(num) < 1 / (1 + np.exp(-size)), size, -size)


@given(seed=st.integers(0, 1000), factor=st.floats(0.2, 8))
def test_temperature_undoes_a_factor_and_only_that(seed, factor):
    margins = calibrated(400, seed)
    plain, scaled = evaluate(margins), evaluate(factor * margins)
    assert scaled["calib/temperature"] == pytest.approx(factor * plain["calib/temperature"], rel=1e-3)
    assert scaled["calib/loss_after_temperature"] == pytest.approx(plain["calib/loss_after_temperature"], rel=1e-4)


@given(seed=st.integers(0, 1000), power=st.integers(-3, 3))
def test_beta_is_part_of_the_probability(seed, power):
    """A factor of the margins that beta takes back changes nothing; for powers of two not even a bit."""
    margins, beta = np.round(64 * calibrated(400, seed)) / 64, 2.0**power  # exact in float32, with their offsets
    assert evaluate(margins / beta, beta) == evaluate(margins)


@pytest.mark.parametrize(
    ("margins", "names"),
    [
        (calibrated(CALIBRATION_PAIRS - 1), {"brier"}),
        (np.zeros(100), {"brier"}),
        (np.full(100, 0.5), {"brier"}),
        (np.linspace(0.1, 2, 100), {"brier", "ece_debiased"}),  # all right: the colder the better
        (np.linspace(-2, -0.1, 100), {"brier", "ece_debiased"}),  # all wrong: the hotter the better
        (calibrated(100), {"brier", "ece_debiased", "temperature", "loss_after_temperature"}),
    ],
    ids=["few pairs", "all tied", "all equal", "all right", "all wrong", "ordinary"],
)
def test_what_is_undefined_is_left_out(margins, names):
    found = evaluate(margins)
    assert set(found) == {f"calib/{name}" for name in names}
    assert not any(name.startswith(("calib/test_", "calib/ood_", "calib/train_")) for name in found)
