"""A verdict says no more than its evidence, names its rung, and says what would raise it."""

import json
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.evaluate import ReadinessConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.evaluation.diagnosis import ECE, GateCheck, baseline_check, diagnose_outcome
from rmcore.policy.confirmation import MOST_SAMPLES
from rmcore.policy.sampling.best_of_n import nominal_kl, samples_needed
from rmcore.readiness.components import DECIDING
from rmcore.readiness.power import GAIN_TO_SHOW, next_rung, plan_power
from rmcore.readiness.verdict import (
    LOWEST_READY_RUNG,
    PASSED,
    verdict_on_labels,
    verdict_on_policy,
    verdict_on_samples,
    with_outcome,
)
from rmcore.reporting.verdict_style import VERDICT_STYLES, check_result

PASS = GateCheck("a", 0.7, 0.6, True, "a: 0.7, above 0.6")
FAIL = GateCheck("b", 0.1, 0.6, False, "b: 0.1, not above 0.6")
OPEN = GateCheck(ECE, 0.2, 0.15, False, "ECE: 0.1 (0.05 to 0.2), upper end not below 0.15", unclear=True)
PLAN = {"plan": "a KL of 3 nats by best-of-n", "judge": "the synthetic benchmark", "parts": {}, "num_telling": 60}
checks = st.lists(st.sampled_from([PASS, FAIL]), min_size=1, max_size=6)


def part(value, low, high):
    return {"value": value, "ci_low": low, "ci_high": high, "num": 9, "reason": None}


OVER = part(0.1, 0.05, 0.15)


def logged(best_k, over_longest=0.02, outcome=None):
    won, gained, over = part(0.6, 0.55, 0.65), part(0.4, 0.2, 0.6), part(0.1, over_longest, 0.2)
    choices = [{"k": k, "win_rate": won, "gain": gained, "over_longest": over} for k in (2, 4)]
    return {"num_prompts": 30, "choices": choices, "best_k": best_k, "stopped": "the win rate may be as low as 0.4"} | {
        "outcome": outcome or ("open" if best_k is None else "claimed")
    }


def trained(status):
    return {"judge": "the synthetic benchmark", "verdict": {"status": status, "headline": "so it was", "reasons": []}}


@given(checks, st.sampled_from([None, logged(None), logged(4)]))
def test_nothing_below_the_third_rung_is_ready_whatever_passed(found, answers):
    verdict = verdict_on_labels(found, answers, OVER)
    assert verdict["rung"] == (1 if answers is None else 2) < LOWEST_READY_RUNG
    assert verdict["status"] not in PASSED
    assert "ready" not in verdict["headline"].lower()
    assert VERDICT_STYLES[verdict["status"]].tone != "good"
    assert verdict["reasons"][-found.count(FAIL) :] == [FAIL.text] * found.count(FAIL) or not found.count(FAIL)
    json.dumps(verdict, allow_nan=False)


@given(st.lists(st.sampled_from([PASS, FAIL, OPEN]), min_size=1, max_size=6))
def test_on_samples_every_check_decides(found):
    verdict = verdict_on_samples(found, **PLAN)
    status = "not_ready" if FAIL in found else "unclear" if OPEN in found else "ready"
    assert (verdict["rung"], verdict["status"]) == (3, status)
    assert PLAN["plan"] in verdict["headline"]
    assert VERDICT_STYLES[verdict["status"]].tone == {"not_ready": "bad", "unclear": "open", "ready": "good"}[status]
    assert verdict["reasons"][:-1] == [FAIL.text] * found.count(FAIL) + [OPEN.text] * found.count(OPEN)


@given(st.lists(st.sampled_from([PASS, FAIL, OPEN]), min_size=1), st.integers(1, 10_000), st.floats(0.01, 5))
def test_every_verdict_on_samples_says_what_share_of_prompts_it_cannot_speak_for(found, num_telling, gain):
    """The rule of three, and the loss at which that share would undo the gain."""
    parts = {"planned_gain": part(gain, gain / 2, 2 * gain)}
    verdict = verdict_on_samples(found, **PLAN | {"num_telling": num_telling, "parts": parts})
    share = 1 - 0.05 ** (1 / num_telling)
    assert f"up to {100 * share:.2g} % of all prompts may be disasters" in verdict["reasons"][-1]
    said = float(verdict["reasons"][-1].rsplit("loss of ", 1)[1].split(" sd", 1)[0])
    assert (1 - share) * gain == pytest.approx(share * said, rel=0.06)


def test_a_fall_that_is_shown_is_told_also_of_a_model_that_is_ready():
    parts = {"planned_gain": part(0.5, 0.4, 0.6), "planned_fall": part(-0.1, -0.15, -0.05)}
    verdict = verdict_on_samples([PASS], **PLAN | {"parts": parts})
    assert verdict["status"] == "ready"
    assert "the true reward gains +0.50 sd (+0.40 to +0.60) there" in verdict["headline"]
    assert "the true reward was higher on the way: -0.10 sd (-0.15 to -0.05) since then" in verdict["reasons"][0]
    assert verdict["headline"].endswith("passed; the true reward gains more at a smaller KL")
    assert verdict_on_samples([FAIL], **PLAN | {"parts": parts})["reasons"][:-1] == [FAIL.text]
    flat = verdict_on_samples([PASS], **PLAN | {"parts": parts | {"planned_fall": part(-0.1, -0.2, 0.0)}})
    assert flat["reasons"][:-1] == []


def test_choosing_among_logged_answers_is_said_up_to_the_largest_k_that_was_shown():
    verdict = verdict_on_labels([PASS], logged(4), OVER)
    assert verdict["status"] == "passes"
    assert "up to k = 4, winning 0.60 (0.55 to 0.65) there; all" in verdict["headline"]
    assert "Not tested on a policy" in verdict["headline"]
    assert verdict["reasons"] == []
    assert "k =" not in verdict_on_labels([PASS], logged(None), OVER)["headline"]
    [reason] = verdict_on_labels([PASS], logged(4, over_longest=-0.01), OVER)["reasons"]
    assert "minus that of the longest answer: 0.10 (-0.01 to 0.20)" in reason
    calibrated = verdict_on_labels([PASS, OPEN], None, OVER)  # too few pairs to say are no failure
    assert (calibrated["status"], calibrated["reasons"]) == ("unclear", [OPEN.text])
    assert calibrated["headline"].startswith("Inconclusive: 9 test pairs leave open whether it is calibrated.")


@pytest.mark.parametrize(
    ("outcome", "check", "rung", "status"),
    [
        ("open", PASS, 2, "unclear"),
        ("open", FAIL, 2, "fails"),
        ("refuted", PASS, 2, "fails"),
        ("too_few", PASS, 1, "passes"),
        ("too_few", FAIL, 1, "fails"),
    ],
)
def test_what_logged_answers_leave_open_fails_nothing_and_too_few_of_them_are_no_rung(outcome, check, rung, status):
    verdict = verdict_on_labels([check], logged(None, outcome=outcome), OVER)
    assert (verdict["rung"], verdict["status"]) == (rung, status)
    assert any("win rate" in reason for reason in verdict["reasons"]) == (rung == 2)
    if outcome == "too_few":
        assert verdict == verdict_on_labels([check], None, OVER)


@pytest.mark.parametrize("answers", [None, logged(4)])
@pytest.mark.parametrize(
    ("high", "others", "status"),
    [
        (0.05, [PASS], "unclear"),
        (0.0, [PASS], "unclear"),
        (-0.01, [PASS], "fails"),
        (0.05, [PASS, FAIL], "unclear"),
        (0.05, [PASS, OPEN], "unclear"),
        (-0.01, [OPEN], "fails"),
        (-0.01, [FAIL], "fails"),
        (0.05, [OPEN, FAIL], "unclear"),
    ],
)
def test_too_few_pairs_to_say_is_a_verdict_and_no_failure(answers, high, others, status):
    over = part(0.01, -0.04, high)
    verdict = verdict_on_labels([baseline_check(over), *others], answers, over)
    assert verdict["status"] == status
    assert ("9 test pairs leave open whether" in verdict["headline"]) is (status == "unclear")
    decided = len(others) - (OPEN in others)
    told = f"of the {decided} other checks 1 failed" in verdict["headline"]
    assert told is (status == "unclear" and FAIL in others)
    assert verdict["reasons"][0].startswith("accuracy minus the best baseline (chance or length): +1.0 points (-4.0 to")


def test_what_speaks_against_the_outcome_is_named_first_and_the_same_thing_once():
    over = part(0.053, -0.067, 0.173)
    labels = verdict_on_labels([baseline_check(over), FAIL], None, over)
    test = {"accuracy_over_baseline": over, "pairwise_accuracy": part(0.6, 0.5, 0.7)}
    found = with_outcome(labels, diagnose_outcome([], test, {"train": {"num_cut_sides": 35, "num_pairs": 104}}))
    starts = ["too few held-out pairs to say", "the model judges texts whose end", FAIL.text]
    assert [reason.startswith(start) for reason, start in zip(found["reasons"], starts, strict=True)] == [True] * 3
    assert with_outcome(labels, []) == labels


@pytest.mark.parametrize(
    ("status", "verdict", "tone"),
    [
        ("rose", "gained", "good"),
        ("fell", "lost", "bad"),
        ("unclear", "unclear", "open"),
        ("refused", "not_ready", "bad"),
    ],
)
def test_a_policy_that_was_optimised_is_the_highest_rung(status, verdict, tone):
    found = verdict_on_policy(trained(status))
    assert (found["rung"], found["status"], VERDICT_STYLES[found["status"]].tone) == (4, verdict, tone)
    assert next_rung(found, PipelineConfig(), ["mine"]) is None
    assert verdict_on_policy(trained("unknown")) is None  # nobody judged it


@given(st.floats(0.01, 300), st.floats(0.001, 8), st.sampled_from([None, "judged.csv"]))
def test_a_plan_that_stops_earlier_is_within_what_the_judged_samples_reach(kl, reach, samples):
    """A file may hold fewer samples of a prompt than are drawn, and rewards that tie reach less."""
    config = PipelineConfig(policy=PolicyConfig(samples=samples), readiness=ReadinessConfig(planned_kl=kl))
    more = next_rung(verdict_on_samples([PASS, FAIL], **PLAN), config, ["mine"], reach=reach)
    planned = float(more["command"].split("--kl ")[1])
    assert planned <= max(0.01, min(reach, 0.51 * kl))
    assert ReadinessConfig(planned_kl=planned)


MISSING = GateCheck("train_test_gap", None, 0.15, False, "the gap: not measured; it has to be below 0.15")


@given(st.lists(st.sampled_from([PASS, FAIL, OPEN, MISSING]), min_size=1, max_size=6))
def test_a_check_that_was_not_measured_is_no_failure_and_passes_nothing(found):
    """A verdict is that of the other checks, but for passing: whatever else there is, it fails as often without."""
    verdict, others = verdict_on_labels(found, None, OVER), [one for one in found if one is not MISSING]
    status = "passes" if not others else verdict_on_labels(others, None, OVER)["status"]
    assert verdict["status"] == ("unclear" if status == "passes" and MISSING in found else status)
    if FAIL in found:
        assert verdict["headline"].startswith(f"{found.count(FAIL)} of {len(found)} checks on labelled pairs failed")
    assert verdict["reasons"].count(MISSING.text) == found.count(MISSING)
    signs = [check_result(asdict(one))[0] for one in found]
    assert signs == ["✓" if one is PASS else "✗" if one is FAIL else "?" for one in found]


@given(st.floats(0.1, 4), st.integers(4, 200), st.integers(4, 400))
def test_the_next_step_asks_for_as_many_judgements_of_a_prompt_as_the_plan_needs(kl, drawn, num_prompts):
    policy = PolicyConfig(num_prompts=num_prompts, samples_per_prompt=drawn)
    config = PipelineConfig(data={"source": "pairs.csv"}, policy=policy, readiness=ReadinessConfig(planned_kl=kl))
    each = max(samples_needed(kl), DECIDING + 1)
    for verdict in (verdict_on_labels([PASS], None, OVER), verdict_on_samples([PASS, OPEN], **PLAN)):
        more = next_rung(verdict, config, ["mine"])
        assert f" prompts × {each} samples" in more["cost"]
    wanted = int(more["cost"].split()[0])
    assert wanted > num_prompts
    planned = policy.model_copy(update={"num_prompts": wanted, "samples_per_prompt": each})
    said = plan_power(config.model_copy(update={"policy": planned}))
    shown = re.search(r"show a gain of [\d.]+ sd or more in 4 of 5 evaluations", more["evidence"])[0]
    assert said.startswith(f"{wanted} held-out prompts × {each} samples {shown}; 0.2 sd takes ")
    assert float(shown.split()[4]) <= GAIN_TO_SHOW + 0.005
    few = plan_power(config.model_copy(update={"policy": PolicyConfig(num_prompts=4, samples_per_prompt=each)}))
    assert few.startswith(f"4 held-out prompts × {each} samples are too few")
    assert plan_power(config.model_copy(update={"policy": PolicyConfig(samples="judged.csv")})) is None


@given(st.floats(0.01, 300), st.integers(4, 5000), st.sampled_from(["gold", "pairs.csv"]))
def test_a_plan_beyond_what_samples_reach_is_called_so_and_the_next_step_asks_for_one_within(kl, drawn, source):
    policy = PolicyConfig(samples_per_prompt=drawn)
    config = PipelineConfig(data={"source": source}, policy=policy, readiness=ReadinessConfig(planned_kl=kl))
    reach = nominal_kl(drawn)
    said = plan_power(config)
    if kl > 1.03 * reach:  # a plan that rounding alone keeps from its end is judged there
        assert f"{drawn:,} samples of each prompt reach {reach:.2f} nats, and {kl:g} are planned" in said
        assert " sd " not in said
    elif kl <= reach:
        assert "samples of each prompt reach" not in said
    samples = [verdict_on_samples([PASS, check], **PLAN) for check in (OPEN, FAIL)]
    for verdict in (verdict_on_labels([PASS], None, OVER), *samples):
        more = next_rung(verdict, config, ["mine"])
        asked = [int(count) for count in re.findall(r"(?<=× )\d+(?= samples)", more["cost"])]
        assert max(asked, default=0) <= max(MOST_SAMPLES, drawn)
        planned = re.search(r"--kl (\S+)", f"{more['command']} {more['cost']}")
        assert (float(planned[1]) if planned else kl) <= nominal_kl(max([drawn, *asked])) + 0.01
