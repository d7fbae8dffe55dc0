"""The saving against curves whose saving is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.active.efficiency import (
    Curve,
    judge_savings,
    registered_claims,
    saving,
    targets_between,
)
from rmcore.core.errors import ConfigError, DataError

COUNTS = np.round(50 * 1.3 ** np.arange(16))
SHARES = (0.5, 0.7, 0.8)


def accuracy(num_labels, cost=1.0):
    """A learner that needs `cost` times the labels of one of cost 1."""
    return 0.85 - 0.3 * (num_labels / cost / 50) ** -0.5


def noisy_curve(rng, cost=1.0, noise=0.01):
    return Curve(COUNTS, accuracy(COUNTS, cost) + rng.normal(size=len(COUNTS)) * noise)


def study(num_seeds, cost, share, seed=0, noise=0.01):
    rng = np.random.default_rng(seed)
    start, end = accuracy(50), accuracy(COUNTS[-1])
    [target] = targets_between(start, end, [share])
    active = [noisy_curve(rng, cost, noise).labels_to(target) for _ in range(num_seeds)]
    return saving(active, [noisy_curve(rng, 1.0, noise).labels_to(target) for _ in range(num_seeds)])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_the_fit_is_the_nearest_curve_that_never_falls(values):
    curve = Curve(COUNTS[: len(values)], np.array(values))
    fitted = curve.fitted()
    assert (np.diff(fitted) >= 0).all()
    assert fitted.mean() == pytest.approx(np.mean(values))
    assert fitted[0] <= values[0] + 1e-12
    assert fitted[-1] >= values[-1] - 1e-12
    # Characterisation of the projection onto a convex cone: the residual is orthogonal to the fit, and to no gain.
    residual = np.array(values) - fitted
    assert residual @ fitted == pytest.approx(0, abs=1e-9)
    assert all(residual[start:].sum() <= 1e-9 for start in range(len(values)))


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 0.95), st.floats(0.3, 3))
def test_labels_to_a_target_are_read_between_the_points(share, cost):
    curve = Curve(COUNTS, accuracy(COUNTS, cost))
    target = curve.accuracy[0] + share * (curve.accuracy[-1] - curve.accuracy[0])
    found = curve.labels_to(target)
    assert np.interp(found, COUNTS, curve.accuracy) == pytest.approx(target)
    assert curve.labels_to(curve.accuracy[-1] + 1e-6) is None
    assert curve.labels_to(curve.accuracy[0]) is None  # the seed set may have been larger than needed


@pytest.mark.parametrize("cost", [0.6, 0.9, 1.25])
@pytest.mark.parametrize("share", SHARES)
def test_a_known_saving_is_found(cost, share):
    found = study(40, cost, share)
    assert found.value == pytest.approx(1 - cost, abs=0.06)
    assert found.ci_low < 1 - cost < found.ci_high
    assert (found.num_censored_active, found.num_censored_random, found.reason) == (0, 0, None)


def test_two_equal_choices_save_nothing_and_the_interval_says_so():
    found = [study(10, 1.0, 0.7, seed=seed) for seed in range(60)]
    covered = np.mean([one.ci_low <= 0 <= one.ci_high for one in found])
    assert covered > 0.87  # 95 % within what 60 studies can show
    assert np.mean([one.value for one in found]) == pytest.approx(0, abs=0.015)


def test_exchanging_the_two_exchanges_the_sign():
    rng = np.random.default_rng(0)
    active, random = rng.uniform(100, 300, size=12).tolist(), rng.uniform(100, 400, size=12).tolist()
    one, other = saving(active, random), saving(random, active)
    assert math.log1p(-one.value) == pytest.approx(-math.log1p(-other.value))
    assert math.log1p(-one.ci_low) == pytest.approx(-math.log1p(-other.ci_high), abs=0.03)


def test_validation_labels_count_on_both_sides():
    plain, counted = ([Curve(COUNTS + v, accuracy(COUNTS, cost)) for cost in (0.6, 1.0)] for v in (0, 200))
    values = [saving([active.labels_to(0.7)] * 2, [random.labels_to(0.7)] * 2) for active, random in (plain, counted)]
    assert 0 < values[1].value < values[0].value


def test_a_target_that_is_not_reached_is_censored_and_not_imputed():
    found = saving([100.0, None, 120.0], [150.0, 160.0, None])
    assert (found.value, found.ci_low, found.ci_high) == (None, None, None)
    assert (found.num_censored_active, found.num_censored_random) == (1, 1)
    assert "1 of 3 seeds" in found.reason
    assert found.to_dict()["reason"] == found.reason


def test_targets_lie_between_what_all_choices_share():
    assert targets_between(0.5, 0.7, [0.5, 1.0]) == pytest.approx([0.6, 0.7])
    assert targets_between(0.7, 0.7, [0.5]) == [None]


def verdicts(cost, num_seeds=20):
    claims = registered_claims(["random", "bald"], noise=0.0, share=0.7, claimed=0.4)
    assert [claim.name for claim in claims] == ["bald > 40%", "bald > 0%"]
    found = study(num_seeds, cost, 0.7)
    judged = judge_savings(claims, {claim.name: found for claim in claims})
    return [judged[claim.name].verdict for claim in claims]


def test_verdicts_follow_the_interval():
    assert verdicts(0.3) == ["supported", "supported"]
    assert verdicts(0.8) == ["refuted", "supported"]
    assert verdicts(1.3) == ["refuted", "refuted"]
    assert verdicts(0.6)[0] == "inconclusive"
    assert verdicts(0.3, num_seeds=9) == ["inconclusive"] * 2


def test_a_claim_about_a_censored_target_stays_inconclusive():
    [claim] = registered_claims(["bald"], noise=0.0, share=0.7, claimed=0.0)
    judged = judge_savings([claim], {claim.name: saving([None] * 12, [1.0] * 12)})[claim.name]
    assert judged.verdict == "inconclusive"
    assert "12 of 12 seeds" in judged.reason
    assert "fewer labels than random" in claim.text


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="within a seed"):
        saving([1.0], [1.0, 2.0])
    with pytest.raises(DataError, match="two points or more"):
        Curve(np.array([1.0]), np.array([0.5]))
    with pytest.raises(DataError, match="increasing"):
        Curve(np.array([2.0, 1.0]), np.array([0.5, 0.6]))
    with pytest.raises(ConfigError, match="share of the labels"):
        registered_claims(["bald"], noise=0.0, share=0.7, claimed=1.0)
