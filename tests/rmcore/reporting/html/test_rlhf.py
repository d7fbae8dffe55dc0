"""The trained policy's section of a report, its table for terminals and its figure: every number, no empty words."""

import re

import pytest

import report_sample as sample
from rmcore.reporting.figures.rlhf import rlhf_curves_figure
from rmcore.reporting.figures.style import save
from rmcore.reporting.figures.watch import watch_figure
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.rlhf import DIGITS, rlhf_block

pytestmark = pytest.mark.slow

make = sample.rlhf_sample.record
KINDS = {
    "whole": {},
    "nobody judged": {"judged": False},
    "one seed": {"num_seeds": 1},
    "one point": {"num_points": 1},
    "watched, one seed": {"watched": True, "num_seeds": 1},
    "watched, back to the start": {"watched": False},
    "two rewards": {"rewards": 2},
    "two rewards, one point": {"rewards": 2, "num_points": 1},
}


@pytest.fixture(params=KINDS)
def record(request):
    return make(**KINDS[request.param])


@pytest.fixture
def page(report_with):
    return lambda record: report_with(rlhf=record)


def test_every_number_of_the_record_is_in_the_section(page, record):
    text = page(record).section("rlhf")
    assert record["verdict"]["headline"] in text
    for point in record["curve"]:
        for name, digits in DIGITS:
            value = point[name]
            if value is not None:
                assert (value["reason"] if value["value"] is None else f"{value['value']:.{digits}f}") in text
    block = rlhf_block(record)
    for part in (block, *block.parts):
        assert all(" ".join(cell.split()) in text for table in part.tables for row in table.rows for cell in row)
        assert all(" ".join(line.split()) in text for line in (*part.text, *part.findings))


def test_nothing_is_said_with_words_of_the_program(page, record):
    for text in (page(record).section("rlhf"), markdown(rlhf_block(record))):
        assert not re.search(r"\b(None|nan|inf|NaN)\b", text)


def test_a_judges_name_is_text_and_not_an_element(page):
    assert "the <gold> world" in page(make()).section("rlhf")
    assert "<gold>" not in markdown(rlhf_block(make())).replace(r"\<gold\>", "")


def test_rows_fit_their_headings(record):
    block = rlhf_block(record)
    for table in (table for part in (block, *block.parts) for table in part.tables):
        assert {len(row) for row in table.rows} == {len(table.headings)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_figure_is_drawn_whatever_the_record_lacks(kind, tmp_path):
    figure = save(rlhf_curves_figure(make(**KINDS[kind]), sample.rlhf_sample.best_of_n()), tmp_path / "rlhf.png")
    assert figure.stat().st_size > 20_000


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("watched")])
def test_a_watch_has_a_figure_of_its_own(kind, tmp_path):
    assert save(watch_figure(make(**KINDS[kind])), tmp_path / "watch.png").stat().st_size > 20_000


def test_looks_are_shown_where_somebody_watched_alone(page):
    heading = "few labels said on the way"
    assert heading not in page(make()).section("rlhf")
    text = page(make(watched=False)).section("rlhf")
    assert heading in text
    assert "the start is kept" in text


@pytest.mark.parametrize("kind", ["whole", "nobody judged"])  # each has a gold curve to compare with, or none
@pytest.mark.parametrize("best_of_n", [None, sample.rlhf_sample.best_of_n(gold=False)])
def test_the_figure_is_drawn_whatever_best_of_n_lacks(kind, best_of_n, tmp_path):
    assert save(rlhf_curves_figure(make(**KINDS[kind]), best_of_n), tmp_path / "rlhf.png").stat().st_size > 20_000
