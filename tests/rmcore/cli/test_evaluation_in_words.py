"""The two sentences of an evaluation say no more than its intervals do."""

import pytest

import report_sample
from rmcore.cli.measure import in_words


def metrics(**changed):
    return report_sample.metrics() | changed


def words(**changed):
    return [sentence.replace("\u00a0", " ") for sentence in in_words(metrics(**changed))]


@pytest.mark.parametrize(
    ("over", "half", "said"),
    [
        (0.03, 0.02, "shown to be better than both"),
        (0.03, 0.04, "not shown to be better than the better of the two"),
        (-0.03, 0.04, "not shown to be better than the better of the two"),
        (-0.03, 0.02, "shown to be worse than the better of the two"),
        (0.40, None, "without an interval nothing is shown by that"),
    ],
)
def test_better_is_said_at_the_end_of_the_interval_alone(over, half, said):
    found = words(accuracy_over_baseline=report_sample.metric(over, half))
    assert found[0].endswith(f": {said}.")


def test_what_is_unknown_says_why():
    found = words(
        pairwise_accuracy=report_sample.metric(None, reason="no pairs"),
        ece_debiased=report_sample.metric(None, reason="all margins are zero"),
    )
    assert found[0].endswith("unknown: no pairs.")
    assert found[1].endswith("unknown: all margins are zero.")


def test_no_error_found_is_no_error_of_zero():
    none = {"value": -0.01, "ci_low": 0.0, "ci_high": 0.041, "num": 1200, "reason": None}
    assert words(ece_debiased=none)[1] == (
        "No error of its probabilities was found; it may be up to 4.1 points (ECE, debiased)."
    )
