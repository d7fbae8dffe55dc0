"""The registry of metrics, and the bands of the specification."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.metrics import BANDS, CELL_METRICS, CURVES, METRICS, band, bands, metric_order, metric_spec
from rmcore.training.record import HIGHER_IS_BETTER


def test_unknown_metrics_keep_their_name():
    assert metric_spec("brand_new").label == "brand new"
    assert metric_spec("brand_new").unit == metric_spec("brand_new").definition == ""
    assert metric_spec("pairwise_accuracy[a[b]]").label == "accuracy: a[b]"
    assert metric_spec("fpr@0.3").label == "false positive rate at 0.3"


def test_a_table_has_the_listed_ones_first_then_families_then_the_rest():
    names = ["zeta", "fpr@0.3", "brier", "alpha", "pairwise_accuracy[x]", "pairwise_accuracy"]
    assert sorted(names, key=metric_order) == [
        "pairwise_accuracy", "brier", "pairwise_accuracy[x]", "fpr@0.3", "alpha", "zeta",
    ]  # fmt: skip


def test_no_two_have_one_name():
    assert len(CELL_METRICS) == sum(bool(spec.cell_name) for spec in METRICS.values())
    assert all(spec.stage is not None for spec in CELL_METRICS.values())
    assert all(not spec.needs_target and spec.bands is None for spec in METRICS.values() if not spec.cell_name)


def test_what_training_selects_by_is_directed_as_the_registry_has_it():
    """Training keeps its own direction: a reworded label must not have every checkpoint computed again."""
    for name, spec in {**CURVES, "eval/loss": METRICS["loss"], "eval/ece": METRICS["ece_debiased"]}.items():
        if name in HIGHER_IS_BETTER:
            assert HIGHER_IS_BETTER[name] == spec.higher_is_better, name
    assert TrainConfig().best_metric in HIGHER_IS_BETTER


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
