"""What the model chooses among logged answers: shown where it was measured, and never as more than it is."""

import pytest

import logged_sample
import report_sample as sample
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.logged_answers import finding
from rmcore.reporting.html.summary import summary_markdown


@pytest.fixture
def page(report_with):
    return lambda record: report_with(logged=record)


@pytest.mark.slow
def test_the_section_shows_every_k_with_its_interval(page):
    record = logged_sample.record(length=1.0)
    text = page(record).section("logged")
    for row in record["choices"]:
        for name in ("win_rate", "longest_win_rate"):
            assert numbers.with_interval(row[name], "share").replace("\xa0", " ") in text
        assert numbers.with_interval(row["gain"]) in text
        assert numbers.percent(row["perfect_win_rate"]).replace("\xa0", " ") in text
    assert finding(record).replace("\xa0", " ") in text
    assert "all up to k = 8 do" in text
    assert "what ended it: prompts with more than 16 answers: " in text
    assert "not a policy's samples" in text


@pytest.mark.slow
def test_the_summary_has_the_same_numbers_and_leaves_them_out_alike():
    record = logged_sample.record()
    told = summary_markdown(sample.results() | {"logged": record})
    assert "## Choosing among logged answers" in told
    assert numbers.with_interval(record["choices"][0]["win_rate"], "share") in told
    assert "logged answers" not in summary_markdown(sample.results() | {"logged": None})


@pytest.mark.parametrize(
    ("ends", "said"),
    [((0.01, 0.05), "more than the longest"), ((-0.05, -0.01), "yet less than"), ((-0.01, 0.05), "cannot be told")],
)
def test_the_finding_holds_the_model_against_the_longest_answer(ends, said):
    record = logged_sample.record(2.0)
    best = next(row for row in record["choices"] if row["k"] == record["best_k"])
    best["over_longest"] |= {"ci_low": ends[0], "ci_high": ends[1]}
    assert said in finding(record)
    assert f"Up to k = {record['best_k']} the model picks better answers among logged ones" in finding(record)


@pytest.mark.slow
def test_no_claim_is_no_claim(page):
    record = logged_sample.record(0.0)
    assert finding(record).startswith("It is not certain")
    assert finding(logged_sample.record(-2.0)).startswith("The model picks the worse answers among logged ones: best")
    assert "none does; what ended it: the win rate of the best of 2" in page(record).section("logged")
