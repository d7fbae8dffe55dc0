"""The curvature section says every number with its kinds of error, and what was not measured is left out."""

import pytest

import report_sample
from rmcore.reporting.html.curvature import curvature_block, rows
from rmcore.reporting.html.html import write_report

spectrum = report_sample.curvature_sample.spectrum


def by_label(record):
    """(value, error over prompts, error of the computation) by quantity."""
    return {label: cells for label, *cells in rows(record)}


def test_every_number_is_shown_with_its_errors_and_their_kinds():
    table = by_label(spectrum())
    assert table["largest eigenvalue λmax"] == ["12.30", "± 1.900", "± 0.001 residual bound"]
    assert table["smallest eigenvalue λmin"][2] == "± 0.010 residual bound"
    assert table["trace"][1:] == ["", "± 3.200 standard error over probes"]  # over prompts it was not measured
    assert table["λmax at margins of size 1"] == ["21.60", "", "± 0.002 residual bound"]
    assert "undefined: fewer than two positive" in table["condition number"][0]


@pytest.mark.parametrize("name", ["over_prompts", "normalized"])
def test_what_was_not_measured_is_left_out(name):
    record = spectrum()
    del record[name]
    table = by_label(record)
    assert ("λmax at margins of size 1" in table) == (name != "normalized")
    assert bool(table["largest eigenvalue λmax"][1]) == (name != "over_prompts")


def test_an_error_that_cannot_be_told_has_its_reason():
    record = spectrum()
    record["over_prompts"] |= {"standard_error": None, "reasons": {"standard_error": "all pairs have one prompt"}}
    assert by_label(record)["largest eigenvalue λmax"][1] == "undefined: all pairs have one prompt"


@pytest.mark.parametrize(
    ("change", "said", "absent"),
    [
        ({}, "after 57 products the extremes are known", "did not converge"),
        ({"converged": False}, "did not converge", "The computation converged"),
        ({"method": "full"}, "exact up to rounding", "converge"),
        ({"parameters": "head"}, "trained parameters (head only)", "all only"),
    ],
)
def test_the_section_opens_with_what_was_measured(change, said, absent):
    text = " ".join(curvature_block(spectrum() | change).text)
    assert "mean loss of 64 pairs" in text
    assert "11,240,449 trained parameters" in text
    assert "Sharpness alone says nothing" in text
    assert said in text
    assert absent not in text


def test_the_report_of_a_run_has_the_section_and_no_curvature_on_its_first_screen(parse, tmp_path):
    results = report_sample.results() | {"spectrum": spectrum()}
    page = parse(write_report(results, {}, tmp_path / "report.html").read_text(encoding="utf-8"))
    section = page.section("landscape")
    for row in rows(spectrum()):
        assert all(" ".join(cell.split()) in section for cell in row)
    assert "λmax" not in page.text[: page.text.index("Curvature of the loss")].replace("λmax falls", "")
