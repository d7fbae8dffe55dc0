"""What reports and the terminal show of a curvature."""

import pytest

from capability_samples import RECORDS
from rmcore.landscape.blocks import curvature_block, rows

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
