"""The original readiness score is what it was specified to be, flaws included, and never a verdict."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.readiness.original_score import RLReadinessScorer

measurements = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e6), st.floats(-1e3, 1e6))


@given(measurements)
def test_the_score_is_the_specified_sum(values):
    accuracy, ece, variance, eigenvalue = values
    report = RLReadinessScorer().compute_score(*values)
    parts = {
        "accuracy": min(1, accuracy),
        "calibration": max(0, 1 - 5 * ece),
        "stability": max(0, 1 - (variance - 0.5) / 2.5),
        "landscape": max(0, 1 - (eigenvalue - 50) / 450),
    }
    assert {name: getattr(report, f"{name}_score") for name in parts} == parts
    expected = sum(weight * part for weight, part in zip((0.35, 0.25, 0.25, 0.15), parts.values(), strict=True))
    assert report.overall_score == pytest.approx(expected, abs=1e-12)
    # Without curvature it is the mean of the other parts, so a part equal to it gives the same score.
    without = RLReadinessScorer().compute_score(*values[:3], None)
    assert without.landscape_score is None
    assert report.overall_score == pytest.approx(0.85 * without.overall_score + 0.15 * report.landscape_score, abs=1e-9)
    assert "Landscape:   not measured; the overall score is formed of the other three parts" in str(without)
    assert not any("eigenvalue" in advice for advice in without.recommendations)


@pytest.mark.parametrize(
    ("values", "score", "band"),
    [
        ((0.87, 0.05, 1.2, 150), 0.789, "0.6 to 0.8"),  # the printed example, which says 0.82
        ((0.494, 0.007, 0.001, 1.0), 0.880, "above 0.8"),  # a model that guesses: its rewards hardly differ
        ((1, 0, 0, 0), 1.067, "above 0.8"),  # parts beyond 1: stability 1.2, landscape 10 / 9
        ((0.5, 0.5, 5.0, 500.0), 0.175, "below 0.6"),
    ],
)
def test_known_values_have_their_flaws_and_print_their_advice(values, score, band):
    report = RLReadinessScorer().compute_score(*values)
    assert report.overall_score == pytest.approx(score, abs=5e-3)
    assert (report.band, report.version) == (band, "v1")
    lines = str(report).splitlines()
    assert f"Overall Score: {report.overall_score:.2f}/1.00 ({band})" in lines
    assert [line.removeprefix("  - ") for line in lines if line.startswith("  - ")] == [*report.recommendations]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.69, 0.1, 2.0, 200.0), "accuracy"),
        ((0.7, 0.11, 2.0, 200.0), "Calibration"),
        ((0.7, 0.1, 2.1, 200.0), "variance"),
        ((0.7, 0.1, 2.0, 201.0), "eigenvalue"),
    ],
)
def test_advice_starts_beyond_each_threshold(values, word):
    (advice,) = RLReadinessScorer().compute_score(*values).recommendations
    assert word in advice
    assert RLReadinessScorer().compute_score(0.7, 0.1, 2.0, 200.0).recommendations == ()


BAD = [(place, bad) for place in range(4) for bad in (math.nan, -math.inf, "0.5")]


@pytest.mark.parametrize(("place", "bad"), [*BAD, (0, 1.01), (0, -0.01), (1, 1.1), (2, -1)])
def test_values_that_are_not_finite_numbers_or_out_of_range_are_refused(place, bad):
    values = [0.8, 0.05, 1.0, 100.0]
    values[place] = bad
    with pytest.raises(ConfigError, match="a finite number from"):
        RLReadinessScorer().compute_score(*values)
