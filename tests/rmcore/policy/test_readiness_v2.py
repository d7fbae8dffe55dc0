"""Readiness v2: conditions that nothing buys back, each on the far end of its interval; a chance is shown."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.readiness import ReadinessConfig
from rmcore.policy.readiness.readiness_v2 import conditions, judge_v2, probability, shipped_fit

CONFIG = ReadinessConfig()
GATES = {gate.part: gate for gate in conditions(CONFIG)}


def part(value, low=None, high=None):
    return {
        "value": value,
        "ci_low": value if low is None else low,
        "ci_high": value if high is None else high,
        "num": 99,
        "reason": None,
    }


def perfect():
    """Every part as good as it can be, and whatever the shipped fit reads beside them."""
    best = {name: part(1.0 if gate.side == "at_least" else 0.0) for name, gate in GATES.items()}
    best |= {"planned_gain": part(CONFIG.min_gain + 3), "headroom": part(2.0), "skill_16": part(1.0)}
    return best | {"length_correlation": part(0.0)}


def judged(parts, config=CONFIG):
    return judge_v2(parts, config, "the gold world")


def status(*arguments, **changes):
    return judged(*arguments, **changes)["verdict"]["status"]


def set_fit(monkeypatch, **changes):
    """The shipped fit with another regression; what it says of its population stays."""
    fit = shipped_fit() | {"features": ["on_policy_accuracy"], "means": [0.7], "coefficients": [0.0]}
    fit |= {"intercept": 0.0} | changes
    monkeypatch.setattr("rmcore.policy.readiness.readiness_v2.shipped_fit", lambda: fit)


def test_a_perfect_model_is_ready_and_says_for_what():
    found = judged(perfect())
    assert (found["verdict"]["status"], found["verdict"]["reasons"]) == ("ready", [])
    assert found["verdict"]["headline"].startswith("Ready for")
    assert f"{CONFIG.planned_kl:g} nats by best-of-n" in found["verdict"]["headline"]
    assert f"all {len(GATES)} checks on samples of the policy" in found["verdict"]["headline"]
    assert [check["name"] for check in found["gate"]] == [*GATES]


@pytest.mark.parametrize("name", GATES)
def test_no_gate_is_bought_back_by_all_others_being_perfect(monkeypatch, name):
    set_fit(monkeypatch, features=[], means=[], coefficients=[], intercept=1e9)
    gate = GATES[name]
    wrong = -1e-6 if gate.side == "at_least" else 1e-6
    good = gate.threshold - wrong
    ends = {gate.end: gate.threshold + wrong}
    found = judged(perfect() | {name: part(good, **ends)})
    assert found["readiness"]["probability"] == 1.0
    assert found["verdict"]["status"] == "not_ready"
    assert [check["name"] for check in found["gate"] if not check["passed"]] == [name]
    [reason] = found["verdict"]["reasons"]
    assert gate.meaning in reason
    assert ("lower end" if gate.end == "low" else "upper end") in reason


@pytest.mark.parametrize("name", GATES)
@given(value=st.floats(-1, 2), width=st.floats(0, 1))
def test_an_end_of_the_interval_decides_and_not_the_value(name, value, width):
    gate = GATES[name]
    low, high = value - width, value + width
    end = low if gate.end == "low" else high
    expected = end >= gate.threshold if gate.side == "at_least" else end <= gate.threshold
    [check] = [one for one in judged(perfect() | {name: part(value, low, high)})["gate"] if one["name"] == name]
    assert check["passed"] == expected
    assert check["value"] == end


def test_a_gain_has_to_be_shown_and_a_peak_before_the_plan_too():
    assert status(perfect() | {"planned_gain": part(1.0, CONFIG.min_gain - 0.01, 2.0)}) == "not_ready"
    assert status(perfect() | {"headroom": part(0.9, 0.5, 1.1)}) == "ready"
    assert status(perfect() | {"headroom": part(0.7, 0.5, 0.99)}) == "not_ready"


@pytest.mark.parametrize("name", GATES)
def test_a_part_that_is_missing_or_has_no_interval_fails_with_its_reason(name):
    gone = perfect()
    del gone[name]
    reason = "only one prompt: no spread"
    for parts, words in (
        (gone, "it was not measured"),
        (perfect() | {name: {"value": 1.0, "ci_low": None, "ci_high": None, "num": 9, "reason": reason}}, reason),
        (perfect() | {name: {"value": 1.0, "ci_low": None, "ci_high": None, "num": 9, "reason": None}}, "no interval"),
    ):
        found = judged(parts)
        [check] = [one for one in found["gate"] if one["name"] == name]
        assert not check["passed"]
        assert words in check["text"]
        assert check["text"] in found["verdict"]["reasons"]
        assert found["verdict"]["status"] == "not_ready"
        json.dumps(found, allow_nan=False)


def test_nothing_measured_is_not_ready_and_still_a_record():
    found = judged({})
    assert found["verdict"]["status"] == "not_ready"
    assert found["readiness"]["probability"] is None
    assert len(found["verdict"]["reasons"]) == len(GATES)
    json.dumps(found, allow_nan=False)


@given(intercept=st.floats(-8, 8))
def test_the_chance_is_shown_and_decides_nothing(intercept):
    """Fitted at another plan and on other models, it once refused an excellent one that no condition spoke against."""
    with pytest.MonkeyPatch.context() as patch:
        set_fit(patch, intercept=intercept)
        chance = 1 / (1 + math.exp(-intercept))
        assert judged(perfect())["readiness"]["probability"] == pytest.approx(chance)
        assert status(perfect()) == "ready"
        assert status(perfect() | {"headroom": part(0.5)}) == "not_ready"


@given(gain=st.floats(0.01, 5), kl=st.floats(0.1, 20), optimizer=st.sampled_from(["best_of_n", "kl_optimum"]))
def test_the_plan_is_the_configs(gain, kl, optimizer):
    config = ReadinessConfig(min_gain=gain, planned_kl=kl, planned_optimizer=optimizer)
    assert status(perfect() | {"planned_gain": part(gain)}, config=config) == "ready"
    short = judged(perfect() | {"planned_gain": part(gain, low=0.99 * gain)}, config=config)
    assert short["verdict"]["status"] == "not_ready"
    assert short["readiness"]["plan"] == {"optimizer": optimizer, "kl": kl, "min_gain": gain}
    named = "best-of-n" if optimizer == "best_of_n" else "RL with a KL penalty"
    assert f"{kl:g} nats by {named}" in short["verdict"]["headline"]


def test_the_probability_is_that_of_the_logistic_fit():
    fit = {"features": ["a", "b"], "means": [0.5, -1.0], "coefficients": [2.0, -3.0], "intercept": 0.25}
    parts = {"a": part(0.7), "b": part(-1.2), "c": part(9.0)}
    assert probability(parts, fit) == pytest.approx(1 / (1 + math.exp(-(0.25 + 2 * 0.2 + 3 * 0.2))))
    assert probability({"a": part(0.7)}, fit) is None
    assert probability(parts | {"b": {"value": None}}, fit) is None
    for intercept, expected in ((1e12, 1.0), (-1e12, 0.0)):
        assert probability(parts, fit | {"intercept": intercept}) == pytest.approx(expected)


def test_the_shipped_fit_is_whole_and_a_better_accuracy_never_lowers_the_chance():
    fit = shipped_fit()
    assert len(fit["features"]) == len(fit["means"]) == len(fit["coefficients"]) > 0
    assert all(math.isfinite(number) for number in (*fit["means"], *fit["coefficients"], fit["intercept"]))
    chances = [probability(perfect() | {"on_policy_accuracy": part(one / 20)}, fit) for one in range(21)]
    assert None not in chances
    assert chances == sorted(chances)
    assert chances[10] < 0.5 < chances[20]  # a coin is not worth optimising, the truth is
