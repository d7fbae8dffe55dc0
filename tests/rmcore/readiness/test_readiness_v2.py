"""Readiness v2: conditions that nothing buys back, each on the far end of its interval."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.evaluate import ReadinessConfig
from rmcore.evaluation.uncertainty import GainValue
from rmcore.policy.sampling.best_of_n import ENOUGH_PROMPTS
from rmcore.readiness.logged_answers import MIN_PROMPTS
from rmcore.readiness.readiness_v2 import Unseen, conditions, judge_v2

CONFIG = ReadinessConfig(planned_optimizer="kl_optimum")  # which has all conditions
GATES = {gate.name: gate for gate in conditions(CONFIG)}


def part(value, low=None, high=None):
    return {
        "value": value,
        "ci_low": value if low is None else low,
        "ci_high": value if high is None else high,
        "num": 99,
        "reason": None,
    }


def perfect():
    """Every part as good as it can be."""
    best = {gate.part: part(1.0) for gate in GATES.values()}
    best |= {"planned_gain": part(CONFIG.min_gain + 3), "planned_fall": part(0.0)}
    return best


def judged(parts, config=CONFIG, num_telling=ENOUGH_PROMPTS):
    return judge_v2(parts, config, "the synthetic benchmark", num_telling=num_telling)


def status(*arguments, **changes):
    return judged(*arguments, **changes)["verdict"]["status"]


def test_a_perfect_model_is_ready_and_says_for_what():
    found = judged(perfect())
    assert found["verdict"]["status"] == "ready"
    assert f"{CONFIG.planned_kl:g} nats by RL with a KL penalty" in found["verdict"]["headline"]
    assert f"the true reward gains {CONFIG.min_gain + 3:+.2f} sd (" in found["verdict"]["headline"]
    assert [check["name"] for check in found["gate"]] == ["telling_prompts", *GATES]
    tied = judge_v2(perfect(), CONFIG, "the synthetic benchmark", num_telling=ENOUGH_PROMPTS, reached=2.4)
    assert "as far as it goes, which is 2.4 nats, because rewards tie" in tied["verdict"]["headline"]


GOOD, HARM = part(CONFIG.min_gain + 3), part(-2.0, -3.0, -1.0)


@pytest.mark.parametrize(
    ("num_telling", "gain", "expected"),
    [
        (0, GOOD, "unclear"),
        (49, GOOD, "unclear"),
        (50, GOOD, "ready"),
        (MIN_PROMPTS - 1, HARM, "unclear"),
        (MIN_PROMPTS, HARM, "not_ready"),
    ],
)
def test_a_few_prompts_that_the_judge_tells_apart_leave_room_for_disasters_and_show_harm(num_telling, gain, expected):
    found = judged(perfect() | {"planned_gain": gain}, num_telling=num_telling)
    assert found["verdict"]["status"] == expected
    few = f"independent prompts whose samples the judge tells apart: {num_telling}, wanted at least 50"
    assert (few in found["verdict"]["reasons"]) == (num_telling < 50)


@pytest.mark.parametrize("name", GATES)
def test_no_gate_is_bought_back_by_all_others_being_perfect(name):
    gate = GATES[name]
    good = gate.threshold + 1e-6
    ends = {gate.end: gate.threshold - 1e-6}
    whole = {"low": good, "high": good + 9} | ends  # the other end stays good for what else asks for this part
    found = judged(perfect() | {gate.part: part(good, **whole)})
    assert found["verdict"]["status"] == ("unclear" if gate.end == "low" else "not_ready")
    assert [check["name"] for check in found["gate"] if not check["passed"]] == [name]
    reason, _ = found["verdict"]["reasons"]
    assert gate.meaning in reason
    assert ("lower end" if gate.end == "low" else "upper end") in reason


@pytest.mark.parametrize("name", GATES)
@given(value=st.floats(-1, 2), width=st.floats(0, 1))
def test_an_end_of_the_interval_decides_and_not_the_value(name, value, width):
    gate = GATES[name]
    low, high = value - width, value + width
    end = low if gate.end == "low" else high
    expected = end > gate.threshold if gate.end == "low" else end >= gate.threshold
    [check] = [one for one in judged(perfect() | {gate.part: part(value, low, high)})["gate"] if one["name"] == name]
    assert check["passed"] == expected
    assert check["value"] == end


def test_a_gain_has_to_be_shown_and_that_it_is_too_small_or_turns_too():
    assert status(perfect() | {"planned_gain": part(1.0, 0.0, 2.0)}) == "unclear"
    assert status(perfect() | {"win_rate_16": part(0.6, 0.5, 0.7)}) == "unclear"
    assert status(perfect() | {"planned_gain": part(1.0, -0.01, 2.0)}) == "unclear"
    assert status(perfect() | {"planned_gain": part(-1.0, -2.0, 0.0)}) == "not_ready"
    assert status(perfect() | {"win_rate_16": part(0.4, 0.3, 0.5)}) == "not_ready"
    assert status(perfect() | {"planned_gain": part(0.2, 0.01, CONFIG.min_gain + 0.01)}) == "ready"
    assert status(perfect() | {"planned_gain": part(0.2, 0.01, CONFIG.min_gain - 0.01)}) == "not_ready"
    asked = CONFIG.min_gain
    assert status(perfect() | {"planned_fall": part(-asked, -2 * asked, 0.01 - asked)}) == "ready"
    assert status(perfect() | {"planned_fall": part(-2 * asked, -3 * asked, -0.01 - asked)}) == "not_ready"


@pytest.mark.parametrize("name", GATES)
def test_a_part_that_is_missing_or_has_no_interval_fails_with_its_reason(name):
    gone, of = perfect(), GATES[name].part
    del gone[of]
    reason = "only one prompt: no spread"
    for parts, words in (
        (gone, "it was not measured"),
        (perfect() | {of: {"value": 1.0, "ci_low": None, "ci_high": None, "num": 9, "reason": reason}}, reason),
        (perfect() | {of: {"value": 1.0, "ci_low": None, "ci_high": None, "num": 9, "reason": None}}, "no interval"),
    ):
        found = judged(parts)
        [check] = [one for one in found["gate"] if one["name"] == name]
        assert not check["passed"]
        assert words in check["text"]
        assert check["text"] in found["verdict"]["reasons"]
        assert found["verdict"]["status"] == "unclear"
        json.dumps(found, allow_nan=False)
    nothing = judged({}, num_telling=0)
    assert nothing["verdict"]["status"] == "unclear"
    assert len(nothing["verdict"]["reasons"]) == len(GATES) + 1


def test_best_of_n_is_not_asked_for_what_rl_would_find_and_is_told_of_it():
    parts = perfect() | {"hard_accuracy": part(0.3)}
    assert status(parts) == "not_ready"
    found = judged(parts, config=ReadinessConfig(planned_optimizer="best_of_n"))
    assert found["verdict"]["status"] == "ready"
    assert "says nothing of RL" in found["verdict"]["reasons"][0]


def test_of_few_samples_the_best_of_as_many_as_there_are_opponents_for_decides():
    parts = perfect() | {"win_rate_15": part(0.9), "win_rate_4": part(0.4)}
    parts["win_rate_16"] = {"value": None, "ci_low": None, "ci_high": None, "num": 0, "reason": "17 samples"}
    assert status(parts) == "ready"
    assert status(parts | {"win_rate_15": part(0.4)}) == "not_ready"


def test_ends_that_hold_if_no_prompt_is_a_disaster_decide_and_are_called_so_everywhere():
    few = GainValue.of(1.64, 1.4, 1.9, num=50 * 64, num_prompts=ENOUGH_PROMPTS).to_dict()
    found = judged(perfect() | {"planned_gain": few})
    assert found["verdict"]["status"] == "ready"
    assert "+1.64 sd (+1.40 to +1.90 if no prompt is a disaster)" in found["verdict"]["headline"]
    [text] = [check["text"] for check in found["gate"] if check["name"] == "planned_gain"]
    assert "lower end if no prompt is a disaster 1.4" in text
    low = GainValue.of(0.4, -0.1, 0.9, num=50 * 64, num_prompts=ENOUGH_PROMPTS).to_dict()
    assert status(perfect() | {"planned_gain": low}) == "unclear"


@given(num=st.integers(1, 300), low=st.floats(0.01, 2), worst=st.floats(0.5, 6))
def test_it_is_ready_only_where_the_prompts_that_were_left_out_cannot_turn_the_gain(num, low, worst):
    parts = perfect() | {"planned_gain": part(low + 0.3, low, low + 0.6)}
    found = judge_v2(parts, CONFIG, "it", num_telling=99, unseen=Unseen(num, 100, worst))
    whole = (100 * low - num * worst) / (100 + num)
    assert (found["verdict"]["status"] == "ready") == (found["gate"][-1]["value"] > 0)
    assert found["gate"][-1]["value"] == pytest.approx(whole, abs=1e-9)
    none = judge_v2(parts, CONFIG, "it", num_telling=99, unseen=Unseen(0, 100, worst))
    assert (none["verdict"]["status"], len(none["gate"])) == ("ready", len(found["gate"]) - 1)
    harmful = perfect() | {"planned_gain": part(-2.0, -3.0, -1.0)}
    shown = judge_v2(harmful, CONFIG, "it", num_telling=99, unseen=Unseen(num, 100, worst))
    assert shown["verdict"]["status"] == "not_ready"
