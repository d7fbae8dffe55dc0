"""The curvature section says every number with its kind of error, leaves out what was not measured, is one text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import report_sample
from rmcore.core.errors import DataError
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import new_figure, save
from rmcore.reporting.html.curvature import CAPTIONS, view, write_curvature_page
from rmcore.reporting.html.glossary import CURVATURE_WORDS
from rmcore.reporting.html.html import write_report

sample = report_sample.curvature_sample

TRACES = {
    "spectrum": "Hessian of the loss",
    "normalized": "Hessian at margins of size 1",
    "gauss_newton": "Gauss–Newton matrix · 64 pairs",
    "density": "8 probes of 40 Lanczos steps",
    "layers": "trace / parameters",
    "slices": "SAM sharpness",
    "noise": "pairs for an error of 10 %",
}
"""A text that only this part of the record brings into the section."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return {
        name: save(new_figure(1.0 + number / 10, 0.5), folder / f"{name}.png") for number, name in enumerate(CAPTIONS)
    }


@pytest.fixture(scope="module")
def render(parse, tmp_path_factory):
    def write(record, figures=None, title="Curvature of x", facts=(("checkpoint", "x"),)):
        out = tmp_path_factory.mktemp("page") / "deep" / "curvature.html"
        assert write_curvature_page(record, figures or {}, out, title=title, facts=facts) == out
        return parse(out.read_text(encoding="utf-8"))

    return write


def rows(record) -> dict:
    """Rows of the table by group and label."""
    return {(group.title, row.label): row for group in view(record)["groups"] for row in group.rows}


def test_page_is_one_safe_file_with_all_figures_and_words(render, figures):
    page = render(sample.curvature(), figures)
    assert not {"script", "link", "iframe", "form"} & set(page.tags)
    assert len(page.values("src")) == len(figures)
    assert all(value.startswith("data:image/png;base64,") for value in page.values("src"))
    assert "://" not in page.raw
    for text in ("Curvature of x", "checkpoint x", *CAPTIONS.values(), *CURVATURE_WORDS, *CURVATURE_WORDS.values()):
        assert text in page.text
    assert "was not drawn" not in page.text


def test_the_report_of_a_run_has_the_same_section(parse, render, figures, tmp_path):
    results = report_sample.results()
    report = parse(write_report(results, figures, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert report.section("landscape") == render(results["curvature"], figures).section("landscape")


def test_section_opens_with_what_was_measured_and_what_it_is_not(render):
    section = render(sample.curvature()).section("landscape")
    order = [
        "mean loss of 64 pairs of 21 prompts",
        "11,240,449 trained parameters",
        "The computation converged: after 57 products",
        "Sharpness alone says nothing",
        "λmax falls merely because margins grow",
        "The Gauss–Newton matrix is not the Hessian",
        "not a small error over pairs",
        "the numbers and their errors",
    ]
    places = [section.index(text) for text in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("change", "words", "absent"),
    [
        ({"converged": False}, "did not converge", "The computation converged"),
        ({"method": "full"}, "exact up to rounding", "converge"),
        ({"parameters": "head"}, "trained parameters (head only)", "all only"),
        ({"num_pairs": 1}, "mean loss of 1 pair of", "1 pairs of 21"),
        (
            {"lambda_max": None, "reasons": {"lambda_max": "only negative ones"}},
            "only negative ones",
            "a step of length",
        ),
        ({"lambda_min": 0.3}, "largest eigenvalue", "not at a minimum"),
        ({"residuals": [0.5] * 10}, "smallest eigenvalue", "not at a minimum"),
    ],
)
def test_opening_follows_the_record(render, change, words, absent):
    record = sample.curvature()
    record["spectrum"] |= change
    section = render({"spectrum": record["spectrum"], "noise": record["noise"]}).section("landscape")
    assert words in section
    assert absent not in section


def test_every_number_stands_with_its_errors_and_their_kinds():
    table = rows(sample.curvature())
    largest = table["Hessian of the loss", "largest eigenvalue λmax"]
    assert largest.computed == ("± 0.001", "residual bound")
    assert largest.sampled == ("± 1.900", "standard error over prompts")
    assert table["Hessian of the loss", "trace"].computed == ("± 3.200", "standard error over probes")
    curved = table["Gauss–Newton matrix", "λmax of the Gauss–Newton matrix"]
    assert curved.computed == ("exact", "up to rounding")
    assert curved.sampled == ("± 1.744", "standard error over prompts; 95 %: 7.630 to 15.80")
    mass = table["All eigenvalues of the Hessian", "negative mass"]
    assert (mass.value[0], mass.computed[0]) == (numbers.percent(0.183), f"± {numbers.percent(0.021)}")
    for row in table.values():
        for error, kind in (row.computed, row.sampled):
            assert bool(error) == bool(kind)
        assert row.definition
        assert "exact" in row.computed or row.computed[0].startswith("±") or not row.computed[0]


def test_an_error_over_other_pairs_is_not_put_beside_the_number():
    record = sample.curvature()
    record["noise"]["num_pairs"] += 1
    assert rows(record)["Hessian of the loss", "largest eigenvalue λmax"].sampled == ("", "")


def test_undefined_numbers_and_intervals_give_their_reason(render):
    record = sample.curvature()
    record["gauss_newton"] |= dict.fromkeys([f"trace_{name}" for name in ("standard_error", "ci_low", "ci_high")]) | {
        "reasons": {"trace_standard_error": "only one prompt"}
    }
    record["density"] |= {"negative_mass": None, "reasons": {"negative_mass": "the matrix is zero"}}
    record["normalized"] = {"temperature": 0.0, "reasons": {"lambda_max": "every margin is 0"}}
    record["slices"]["sam"] |= {"sharpness": None, "reasons": {"sharpness": "the gradient is zero"}}
    record["layers"]["reasons"] = {"embeddings": "the basis does not fit"}
    record["layers"]["blocks"][0] |= {"lambda_max": None, "lambda_max_residual": None}
    record["noise"] |= {"reasons": {"trace": "all pairs have one prompt"}}
    del record["noise"]["trace"]
    page = render(record)
    reasons = ("only one prompt", "the matrix is zero", "every margin is 0", "the gradient is zero")
    for text in (*reasons, "embeddings: the basis does not fit", "all pairs have one prompt"):
        assert text in page.text
    assert "None" not in page.text
    assert "nan" not in page.text.lower().split()


@pytest.mark.slow
@pytest.mark.parametrize("part", TRACES)
def test_a_part_that_is_absent_leaves_nothing_behind(render, part):
    whole = sample.curvature()
    assert TRACES[part] in render(whole).text
    record = {name: held for name, held in whole.items() if name != part}
    page = render(record)
    assert TRACES[part] not in page.section("landscape")
    drawn = {"gauss_newton": 1, "density": 1, "layers": 1, "slices": 2, "spectrum": 2}
    assert page.text.count("was not drawn") == len(CAPTIONS) - drawn.get(part, 0)
    assert "None" not in page.text


@pytest.mark.slow
def test_each_part_can_stand_beside_the_spectrum_alone_or_be_all_there_is(render):
    whole = sample.curvature()
    for part, held in whole.items():
        assert TRACES[part] in render({"spectrum": whole["spectrum"], part: held}).text
        assert TRACES[part] in render({part: held}).text
    assert "not measured" in render({}).section("landscape")


def test_blocks_are_listed_with_both_matrices():
    record = sample.curvature()
    listed = view(record)["blocks"]
    assert [block.name for block in listed] == [block["name"] for block in record["layers"]["blocks"]]
    for shown, held in zip(listed, record["layers"]["blocks"], strict=True):
        assert shown.trace.startswith(numbers.decimal(held["trace"]))
        assert shown.lambda_max.endswith(f"± {numbers.decimal(held['lambda_max_residual'])}")
        assert shown.gauss_newton == numbers.decimal(record["gauss_newton"]["blocks"][held["name"]]["lambda_max"])
    alone = view({"gauss_newton": record["gauss_newton"]})["blocks"]
    assert [block.gauss_newton for block in alone] == [block.gauss_newton for block in listed]


@given(st.floats(0.01, 1e4), st.floats(1e-6, 1e3), st.integers(2, 5000))
def test_pairs_are_enough_within_ten_percent_and_uncounted_where_the_sign_is_unsure(value, error, num_pairs):
    wanted = num_pairs * (error / (0.1 * value)) ** 2
    noise = {"lambda_max": {"value": -value, "standard_error": error, "pairs_for_10_percent": wanted}}
    (row,) = view({"noise": noise | {"num_pairs": num_pairs, "num_prompts": 2}})["enough"]
    assert row.pairs.startswith("enough") == (error / value <= 0.1)
    assert any(digit in row.pairs for digit in "0123456789") == (error / value <= 0.5)
    assert row.relative == numbers.percent(error / value)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60))
def test_any_text_stays_text(render, text):
    hostile = f"<script>alert(1)</script><img src=x onerror=y>\" ' {{{{ 7*7 }}}} &lt; {text} </main>"
    record = sample.curvature()
    record["spectrum"] |= {"parameters": hostile, "method": hostile, "reasons": {"condition_number": hostile}}
    record["layers"]["blocks"][0]["name"] = hostile
    record["layers"]["reasons"] = {hostile: hostile}
    page = render(record, title=hostile, facts=[(hostile, hostile)])
    assert set(page.tags) <= set(render(sample.curvature()).tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(" ".join(hostile.split())) >= 8


def test_a_figure_that_is_no_png_is_refused(tmp_path):
    broken = tmp_path / "density.png"
    broken.write_bytes(b"<svg/>")
    with pytest.raises(DataError, match="not a PNG"):
        write_curvature_page(sample.curvature(), {"density": broken}, tmp_path / "p.html", title="t", facts=[])
