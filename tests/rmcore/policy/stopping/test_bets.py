"""Bets: no stake gains on average where the hypothesis holds, evidence is found where it does not, intervals cover."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.policy.stopping.bets import Bet, ConfidenceSequence

LOW, HIGH = -3.0, 3.0


def confidence_sequence(values, low, high, level):
    """The interval after each value: (N, 2)."""
    sequence = ConfidenceSequence(low, high, level)
    return np.array([sequence.see(float(value)) for value in values]).reshape(-1, 2)


def stake_all(bet, values, expected, spread=1.0):
    for value in values:
        bet.settle(value, expected=expected, spread=spread, low=LOW, high=HIGH)
    return bet


@pytest.mark.parametrize("side", ["above", "below"])
@pytest.mark.parametrize("null", [0.0, 0.4, -1.1])
@pytest.mark.parametrize("expected", [-2.0, -0.3, 0.1, 0.9, 2.5])
def test_no_stake_gains_on_average_at_the_edge_of_the_hypothesis(side, null, expected):
    """Exactly, over a distribution of two values whose mean is the null."""
    ends = np.array([LOW, HIGH])
    chances = np.array([(HIGH - null), (null - LOW)]) / (HIGH - LOW)
    wealth = [np.exp(stake_all(Bet(null, side, 0.05), [value], expected, 0.5).log_wealth) for value in ends]
    assert min(wealth) > 0
    assert chances @ wealth == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("side", ["above", "below"])
def test_nothing_is_staked_on_the_side_of_the_hypothesis(side):
    hoped = -0.5 if side == "above" else 0.5
    assert stake_all(Bet(0.0, side, 0.05), [1.0, -1.0, 2.5], hoped).log_wealth == 0


@pytest.mark.slow
def test_an_eager_bettor_who_looks_always_is_wrong_as_often_as_promised():
    """He stakes on what he has just seen, and stops as soon as he has won."""
    rng = np.random.default_rng(0)
    level, runs, won = 0.1, 600, 0
    for _ in range(runs):
        bet, seen = Bet(0.0, "below", level), [0.0]
        for value in rng.choice([-1.0, 1.0], size=150):
            bet.settle(float(value), expected=float(np.mean(seen[-8:])), spread=1.0, low=-1.0, high=1.0)
            seen.append(float(value))
            if bet.won:
                won += 1
                break
    assert won / runs <= level + 2 * (level * (1 - level) / runs) ** 0.5


def test_a_fall_is_found_and_the_evidence_grows_as_kelly_says():
    rng = np.random.default_rng(1)
    values = np.clip(rng.normal(-0.5, 1.0, 2000), LOW, HIGH)
    bet = stake_all(Bet(0.0, "below", 0.05), values, float(values.mean()), float(values.var()))
    assert bet.won
    best = values.mean() ** 2 / 2 / values.var()  # nats a value of the best constant stake, for small ones
    assert bet.log_wealth / len(values) == pytest.approx(best, rel=0.25)


def test_a_value_beyond_what_was_promised_is_refused():
    with pytest.raises(ValueError, match="promised"):
        Bet(0.0, "above", 0.05).settle(3.5, expected=0.1, spread=1.0, low=LOW, high=HIGH)
    with pytest.raises(ValueError, match="promised"):
        confidence_sequence([0.0, 1.5], -1.0, 1.0, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda rng, n: rng.choice([-1.0, 1.0], size=n, p=[0.9, 0.1]), -0.8),
        (lambda rng, n: rng.uniform(-1, 1, n), 0.0),
        (lambda rng, n: np.clip(rng.normal(0.3, 0.1, n), -1, 1), 0.3),
    ],
)
def test_intervals_hold_after_every_value_together(draw, mean):
    rng = np.random.default_rng(2)
    runs, missed = 150, 0
    for _ in range(runs):
        path = confidence_sequence(draw(rng, 120), -1.0, 1.0, 0.05)
        missed += bool(((path[:, 0] > mean) | (path[:, 1] < mean)).any())
        assert path[-1, 1] - path[-1, 0] < 0.7
    assert missed / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


@pytest.mark.slow
@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=150))
def test_each_interval_lies_within_those_before_it_and_holds_the_mean_whatever_comes(values):
    sequence = ConfidenceSequence(-1.0, 1.0, 0.05)
    path = np.array([sequence.see(value) for value in [*values, *[1.0] * 100, *[-1.0] * 150]])
    assert (np.diff(path[:, 0]) >= 0).all()
    assert (np.diff(path[:, 1]) <= 0).all()
    assert path[-1, 0] <= sequence.mean <= path[-1, 1]
