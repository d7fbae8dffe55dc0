"""The specification's bands: eval accuracy < 58 failure, 58-63 acceptable, > 63 success; gap > 15 / 10-15 / < 10
points; stop step (of 1000) > 900 / 600-900 / 400-600."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.core.metrics import BANDS, band, bands

CASES = [
    ("eval accuracy", {"failure": (0.0, 0.579), "acceptable": (0.58, 0.6, 0.63), "success": (0.631, 1.0)}),
    ("train-test gap", {"success": (-0.2, 0.0, 0.099), "acceptable": (0.10, 0.15), "failure": (0.151, 0.5)}),
    (
        "stopped after",
        {"early": (0.1, 0.399), "success": (0.4, 0.6), "acceptable": (0.601, 0.9), "failure": (0.901, 1.0)},
    ),
]


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [(name, word, value) for name, words in CASES for word, values in words.items() for value in values],
)
def test_bands_are_those_of_the_specification(name, word, value):
    assert band(name, value) == word


@given(st.sampled_from(sorted(BANDS)), st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_value_has_a_band(name, value):
    assert band(name, value) in {word for _, _, word in BANDS[name].words}


def test_what_was_not_measured_has_none():
    assert bands({"eval/test_pairwise_accuracy": 0.7, "eval/train_test_gap": None, "other": 1.0}) == {
        "eval accuracy": "success"
    }


def test_unknown_names_and_undefined_values_are_refused():
    with pytest.raises(ConfigError, match="no bands for 'accuracy'; there are eval accuracy"):
        band("accuracy", 0.5)
    with pytest.raises(ConfigError, match="eval accuracy=nan"):
        band("eval accuracy", math.nan)
