"""What reports and the terminal show of a curvature."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capability_samples import RECORDS
from rmcore.landscape.blocks import curvature_block, eigenvalues_figure, rows

spectrum = RECORDS["landscape"]


def test_every_eigenvalue_is_shown_with_its_errors_and_their_kinds():
    table = {label: cells for label, *cells in rows(spectrum())}
    assert table["largest eigenvalue λmax"] == ["12.30", "± 1.900", "± 0.001 residual bound"]
    assert table["trace"][1:] == ["", "± 3.200 standard error over probes"]  # over prompts it was not measured
    assert table["λmax at margins of size 1"] == ["21.60", "", "± 0.002 residual bound"]
    assert "undefined: fewer than two positive" in table["condition number"][0]
    record = spectrum()
    del record["normalized"]
    record["over_prompts"] |= {"standard_error": None, "reasons": {"standard_error": "all pairs have one prompt"}}
    table = {label: cells for label, *cells in rows(record)}
    assert "λmax at margins of size 1" not in table
    assert table["largest eigenvalue λmax"][1] == "undefined: all pairs have one prompt"


@pytest.mark.parametrize(
    ("change", "said", "absent"),
    [
        ({}, "after 57 products the extremes are known", "did not converge"),
        ({"converged": False}, "did not converge", "The computation converged"),
        ({"method": "full"}, "exact up to rounding", "converge"),
        ({"parameters": "head"}, "trained parameters (head only)", "all only"),
    ],
)
def test_the_section_of_curvature_says_what_was_measured(change, said, absent):
    text = " ".join(curvature_block(spectrum() | change).text)
    assert "mean loss of 64 pairs" in text
    assert said in text
    assert absent not in text


def test_a_spectrum_without_an_eigenvalue_says_why(report_with):
    broken = {"eigenvalues": [], "residuals": [], "lambda_max": None, "reasons": {"lambda_max": "it broke down"}}
    assert "it broke down" in report_with(landscape=spectrum() | broken).section("landscape")


def figure_of(values):
    return eigenvalues_figure(spectrum() | {"eigenvalues": list(values), "residuals": None})


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.floats(-1e8, 1e8, allow_subnormal=False), min_size=1, max_size=20))
def test_all_eigenvalues_are_inside_the_axes_and_sorted(values):
    ax = figure_of(values).axes[0]
    points = np.concatenate([line.get_ydata() for line in ax.lines if line.get_marker() == "o"])
    assert sorted(points) == sorted(values)
    assert points[: sum(value >= 0 for value in values)].tolist() == sorted((v for v in values if v >= 0), reverse=True)
    low, high = ax.get_ylim()
    assert low <= min(values) <= max(values) <= high
