"""What earns an average of weights its place, and what does not."""

import pytest

from logged_sample import table
from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.landscape.paths import MemberPath
from rmcore.policy.earned_average import Tolerance, checks_of, compare_best_of
from rmcore.policy.logged_answers import logged_answers

UNMEASURED = {"n": 4, "num_prompts": 0, "reason": "no answers"}
LEVEL = (-0.001, 0.0, 0.001)


def value(low, middle, high):
    return MetricValue(middle, low, high, 100, None if low is not None else "one prompt")


def path(*heights):
    places = tuple(value(*one) for one in heights)
    return MemberPath("m", 1.0, places, places, places)


def checked(height=LEVEL, accuracy=LEVEL, win_rate=None, allowed=0.01):
    best_of = UNMEASURED if win_rate is None else {"n": 4, "difference": value(*win_rate).to_dict()}
    paths = [path(LEVEL), path(LEVEL, height)]
    return checks_of(paths, value(*accuracy).to_dict(), best_of, "best", Tolerance(share=0.01, height=allowed))


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        ({}, [True, True, None], "cannot be measured: no answers"),
        ({"height": (0.02, 0.3, 0.5)}, [False, True, None], "a barrier: "),
        ({"height": (-0.2, 0.0, 0.5)}, [False, True, None], "a barrier is not excluded: "),
        ({"height": (-0.2, 0.0, 0.5), "allowed": 0.6}, [True, True, None], "no barrier: "),
        ({"height": (None, None, None)}, [False, True, None], "has no interval"),
        ({"accuracy": (-0.03, -0.02, -0.011)}, [True, False, None], "worse: pairwise accuracy"),
        ({"accuracy": (-0.03, 0.0, 0.03)}, [True, False, None], "not shown to be no worse: pairwise accuracy"),
        ({"accuracy": (-0.009, 0.0, 0.03)}, [True, True, None], "no worse: pairwise accuracy"),
        ({"accuracy": (None, 0.1, None)}, [True, False, None], "has no interval"),
        ({"win_rate": (-0.002, 0.0, 0.03)}, [True, True, True], "no worse: best-of-4"),
        ({"win_rate": (-0.2, 0.0, 0.3)}, [True, True, False], "not shown to be no worse: best-of-4"),
    ],
)
def test_only_what_is_shown_to_be_no_worse_passes(given, expected, words):
    found = checked(**given)
    assert [one.passed for one in found] == expected
    assert any(words in one.text for one in found)


def test_win_rates_are_those_of_logged_answers_and_differences_are_paired():
    one, other = table(2.0), table(0.2)
    found = compare_best_of({"one": one, "other": other, "again": one}, "one", "other", 4, num_resamples=200)
    for name, frame in (("one", one), ("other", other)):
        choice = next(row for row in logged_answers(frame, num_resamples=200)["choices"] if row["k"] == 4)
        assert found["win_rate"][name] == choice["win_rate"]
        assert found["num_prompts"] == choice["num_prompts"]
    low, high = (found["win_rate"][name]["value"] for name in ("other", "one"))
    assert found["difference"]["value"] == pytest.approx(high - low)
    assert found["difference"]["ci_low"] > 0
    same = compare_best_of({"one": one, "again": one}, "one", "again", 4, num_resamples=200)["difference"]
    assert same["value"] == 0
    assert same["ci_low"] < 0 < same["ci_high"]


def test_too_few_prompts_and_other_answers_are_told_apart():
    few = table(num_prompts=9, sizes=(6, 8))
    assert "needs 10" in compare_best_of({"a": few, "b": few}, "a", "b", 4)["reason"]
    assert compare_best_of({"a": few.head(1), "b": few.head(1)}, "a", "b", 4)["num_prompts"] == 0
    with pytest.raises(DataError, match="not scored on the same answers"):
        compare_best_of({"a": few, "b": table(num_prompts=8, sizes=(6, 8))}, "a", "b", 4)
