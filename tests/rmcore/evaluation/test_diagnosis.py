"""Each symptom of the table is recognised, alone, and a healthy run shows none."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rmcore.evaluation.diagnosis import UNDER_TRAINED, baseline_check, diagnose, diagnose_outcome, validation_gate

STEPS = range(10, 310, 10)


def run(train_loss=None, train_accuracy=None, eval_accuracy=None, eval_margin=None):
    """A history of 30 rows; each argument is a function of progress in [0, 1) with a little fixed noise."""
    noise = np.random.default_rng(0)
    rows = []
    for index, step in enumerate(STEPS):
        progress = index / len(STEPS)
        metrics = {}
        if train_loss:
            metrics["train/loss"] = train_loss(progress) + noise.normal(0, 0.01)
        if train_accuracy:
            metrics["train/pairwise_accuracy"] = train_accuracy(progress) + noise.normal(0, 0.02)
        if eval_accuracy and index % 3 == 2:
            metrics["eval/pairwise_accuracy"] = eval_accuracy(progress) + noise.normal(0, 0.003)
        if eval_margin and index % 3 == 2:
            metrics["eval/mean_margin"] = eval_margin(progress)
        rows.append({"step": step, "metrics": metrics})
    return rows


HEALTHY = {
    "train_loss": lambda t: 0.7 - 0.25 * t,
    "train_accuracy": lambda t: 0.5 + 0.25 * t,
    "eval_accuracy": lambda t: 0.5 + 0.2 * t,
    "eval_margin": lambda t: 0.8 * t + 0.01,
}
SYMPTOMS = {
    "overfitting": {"eval_accuracy": lambda t: 0.65 - 0.15 * t},
    "reversed model": {"eval_margin": lambda t: -0.5 * t},
    "learning rate too low": {"train_loss": lambda t: 0.693},
    "learning rate too high": {"train_loss": lambda t: 0.6 + 4 * t**3},
    "learning rate too high late in the run": {
        "eval_accuracy": lambda t: 0.6 + (0.05 if round(t * 10) % 2 else -0.05) * (t > 0.4)
    },
}


def test_a_healthy_run_shows_no_symptom():
    assert diagnose(run(**HEALTHY)) == []


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_symptom_alone_is_recognised_alone(name):
    history = run(**HEALTHY | SYMPTOMS[name])
    found = diagnose(history)
    assert [diagnosis.diagnosis for diagnosis in found] == [name]
    assert found[0].advice
    assert diagnose(history[::-1]) == found


def margins(*values):
    return [{"step": index, "metrics": {"eval/mean_margin": float(value)}} for index, value in enumerate(values)]


@pytest.mark.parametrize("num_evaluations", [3, 30])
def test_margins_that_wander_about_zero_are_no_reversed_model(num_evaluations):
    """The lower side of two standard errors, of few values: at most what Student's t says, 15 % of two."""
    rng = np.random.default_rng(num_evaluations)
    called = [bool(diagnose(margins(*rng.normal(0, 0.01, num_evaluations)))) for _ in range(1000)]
    late = max(2, num_evaluations // 3)
    expected = stats.t.cdf(-2, late - 1)
    assert abs(np.mean(called) - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)


@pytest.mark.parametrize("values", [(-0.2, -0.25), (-0.1, -0.3, -0.4, -0.45), (0.1, -0.2, -0.3, -0.31, -0.3, -0.32)])
def test_margins_that_stay_negative_are_a_reversed_model(values):
    [found] = diagnose(margins(*values))
    assert found.diagnosis == "reversed model"
    assert diagnose(margins(values[-1])) == []  # one evaluation cannot tell


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_explosion_at_its_step(broken):
    history = run(**HEALTHY)
    history[12]["metrics"]["train/loss"] = broken
    (found,) = diagnose(history)
    assert found.diagnosis == "learning rate too high"
    assert f"step {history[12]['step']}" in found.symptom


def test_a_finished_low_loss_is_not_stuck_and_short_histories_say_nothing():
    assert diagnose(run(train_loss=lambda t: 0.3)) == []
    assert diagnose([]) == []
    assert diagnose(run(train_loss=lambda t: 0.693)[:2]) == []


def metric(value, low=None, high=None):
    return {"value": value, "ci_low": low, "ci_high": high, "num": 52, "reason": None}


PASSING = {
    "pairwise_accuracy": metric(0.7),
    "margin_p50": metric(0.4),
    "negative_margin_rate": metric(0.3),
    "ece_debiased": metric(-0.01, 0.0, 0.05),
}
TRAINED = 0.72


def test_the_calibration_error_is_judged_by_the_upper_end_of_its_interval():
    """A point value below the threshold, of too few pairs, shows nothing; what is shown is never below zero."""
    for value, high, said in ((0.05, 0.2, "0.050 (95 %: 0.000 to 0.200), upper end not below 0.15"),
                              (-0.01, 0.1, "0.000 (95 %: 0.000 to 0.100), upper end below 0.15")):  # fmt: skip
        changed = PASSING | {"ece_debiased": metric(value, 0.0, high)}
        check = next(check for check in validation_gate(changed, TRAINED) if check.name == "ece_debiased")
        assert (check.passed, check.value, check.text.split(": ", 1)[1]) == (high < 0.15, high, said)
        assert check.unclear is (high > 0.15)
    shown = PASSING | {"ece_debiased": metric(0.3, 0.2, 0.4)}
    check = next(check for check in validation_gate(shown, TRAINED) if check.name == "ece_debiased")
    assert (check.passed, check.unclear) == (False, False)


@pytest.mark.parametrize(
    ("name", "edge", "inside"),
    [
        ("pairwise_accuracy", 0.60, 0.601),
        ("margin_p50", 0.0, 0.001),
        ("negative_margin_rate", 0.40, 0.399),
        ("ece_debiased", 0.15, 0.149),
        ("train_test_gap", 0.15, 0.149),
    ],
)
def test_each_threshold_is_strict_and_what_is_not_measured_fails(name, edge, inside):
    for value, passed in ((edge, False), (inside, True), (None, False), (math.nan, False)):
        changed, trained = PASSING, TRAINED
        if name == "train_test_gap":
            changed, trained = PASSING | {"pairwise_accuracy": metric(0.75)}, None if value is None else 0.75 + value
        else:
            ends = (0.01, 0.0, value) if name == "ece_debiased" else (value, 0.0, 1.0)
            changed = PASSING | {name: metric(*ends)}
        checks = {check.name: check for check in validation_gate(changed, trained)}
        assert checks[name].passed is passed
        unaffected = checks.keys() - {name, *(("train_test_gap",) if name == "pairwise_accuracy" else ())}
        assert all(checks[other].passed for other in unaffected)
    missing = {check.name: check for check in validation_gate({}, None)}[name]
    assert not missing.passed
    assert "not measured" in missing.text


CLEARLY = metric(0.1, 0.05, 0.15)


def outcome_of(over, accuracy=0.68):
    return {"accuracy_over_baseline": over, "pairwise_accuracy": {"value": accuracy}}


WHOLE = {"train": {"num_cut_sides": 3, "num_pairs": 100}, "test": {"num_cut_sides": 0, "num_pairs": 50}}
CUT = WHOLE | {"train": {"num_cut_sides": 35, "num_pairs": 100}}


def losses(*values):
    return [{"step": 2 * index, "metrics": {"train/loss": value}} for index, value in enumerate(values)]


@pytest.mark.parametrize(
    ("history", "over", "cut", "diagnosis", "seen"),
    [
        # 18 steps, loss 0.665: what a first run of a few hundred pairs gives.
        (losses(0.70, 0.69, 0.69, 0.68, 0.67, 0.665), CLEARLY, WHOLE, "under-trained", "ends at 0.66"),
        (losses(0.5, 0.4, 0.3), metric(-0.02, -0.12, 0.08), WHOLE, "too few held-out pairs", "52 held-out pairs"),
        (losses(0.5, 0.4, 0.3), metric(0.0, -0.07, 0.07), WHOLE, "it is equal to the best baseline", "+0.0 points"),
        (losses(0.5, 0.4, 0.3), CLEARLY, CUT, "whose end it has not read", "18% of the train sides"),
    ],
)
def test_what_speaks_against_an_outcome_is_named(history, over, cut, diagnosis, seen):
    [found] = diagnose_outcome(history, outcome_of(over), cut)
    assert diagnosis in found.diagnosis
    assert seen in found.symptom


def test_a_reversed_column_is_looked_for_where_accuracy_is_no_better_than_a_coin_and_nowhere_else():
    worse = metric(-0.1, -0.15, -0.05)
    for accuracy in (0.32, 0.5, 0.501, 0.68):
        [found] = diagnose_outcome(losses(0.5, 0.4, 0.3), outcome_of(worse, accuracy), WHOLE)
        assert ("reversed" in found.advice, "longer answer" in found.diagnosis) == (accuracy <= 0.5, accuracy > 0.5)


@pytest.mark.parametrize("values", [(0.692, 0.690), (0.693,), (0.6935, 0.693, 0.6932, 0.693, 0.6931, 0.693)])
def test_a_loss_that_ends_where_guessing_is_has_learned_nothing_however_few_points_say_so(values):
    [found] = diagnose_outcome(losses(*values), outcome_of(CLEARLY), WHOLE)
    assert found.diagnosis == UNDER_TRAINED
    assert "guessing is 0.693" in found.symptom


@given(st.floats(0.01, 0.6) | st.floats(0.75, 3))
def test_no_other_end_of_a_loss_that_rests_is_called_so(end):
    assert diagnose_outcome(losses(end, end, end), outcome_of(CLEARLY), WHOLE) == []


@given(st.floats(0.4, 0.6), st.floats(0.01, 0.3))
def test_a_check_is_undecided_exactly_where_its_interval_reaches_beyond_the_threshold(value, half):
    test = {"pairwise_accuracy": metric(value, value - half, value + half)}
    check = validation_gate(test, None)[0]
    assert check.unclear == (not check.passed and value + half > check.threshold)


def test_without_an_interval_nothing_is_shown_to_beat_the_baseline():
    assert baseline_check(CLEARLY).passed
    found = baseline_check({"value": 0.2, "ci_low": None, "ci_high": None, "num": 3, "reason": "only one prompt"})
    assert not found.passed
    assert "only one prompt" in found.text
