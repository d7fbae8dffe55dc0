"""Numbers as text: readable, never NaN, and true to the number within the digits shown."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rmcore.reporting.figures import numbers


@given(st.floats(-1e12, 1e12))
def test_decimals_are_true_to_three_digits(value):
    text = numbers.decimal(value).replace("−", "-").replace(",", "")
    assert math.isclose(float(text), value, rel_tol=0.005, abs_tol=5e-4 if abs(value) >= 1e-3 else 0)
    assert len(text) <= 10


@given(st.floats(-5, 5))
def test_percent_is_true_to_a_tenth(value):
    text = numbers.percent(value)
    assert text.endswith("\u00a0%")
    assert abs(float(text[:-2].replace("−", "-")) - 100 * value) <= 0.0501
    assert not text.startswith("−0.0")


def test_missing_numbers_are_a_dash():
    for value in (None, math.nan, math.inf):
        for show in (numbers.decimal, numbers.percent, numbers.count, numbers.duration):
            assert show(value) == numbers.MISSING
        assert numbers.text(value, "logits") == numbers.MISSING
        assert numbers.interval({"ci_low": value, "ci_high": 1.0}) == ""
    assert numbers.interval({}) == ""


def test_units():
    assert numbers.text(12345, "count") == "12,345"
    assert numbers.text(0.5, "nats") == "0.500\u00a0nats"
    assert numbers.interval({"ci_low": 0.69, "ci_high": 0.734}, "share") == "69.0 to 73.4\u00a0%"
    assert [numbers.duration(s) for s in (3.21, 59.97, 125, 3599.7, 7800)] == [
        "3.2 s",
        "60.0 s",
        "2 min 05 s",
        "1 h 00 min",
        "2 h 10 min",
    ]
