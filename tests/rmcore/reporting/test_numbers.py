"""Numbers as people read them; no page, figure or console line shows a negative error."""

import copy
import math
import re

import matplotlib.text
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import experiment_sample
import report_sample
from flows.cli_experiment import print_outcome
from rmcore.cli.common import print_metrics
from rmcore.core.metrics import floored, is_at_floor
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arms import arm_intervals_figure
from rmcore.reporting.figures.experiment import forest_plot_figure
from rmcore.reporting.figures.pairs import reliability_diagram_figure
from rmcore.reporting.figures.style import new_figure, unit_ticks
from rmcore.reporting.html.blocks import cell_text
from rmcore.reporting.html.experiment import experiment_markdown
from rmcore.reporting.html.experiment import sections as experiment_sections
from rmcore.reporting.html.report import sections, summary_markdown

ECE = experiment_sample.ECE
FOUND = {"value": -0.0123, "ci_low": -0.06, "ci_high": 0.0412, "num": 90, "reason": None}
NEGATIVE = re.compile(r"[-−]\s?\d")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(((0.0241, "share", "difference"), "+2.4 points"), ((-0.00001, "share", "difference"), "0.0 points")),
        *(((-12.3, "seconds", "difference"), "−12.30 s"), ((1.42, "seconds", "ratio"), "1.420×")),
        *(((0.631, "share", "level"), "63.1 %"), ((None, "share", "difference"), "–"), ((560.4, "steps"), "560 steps")),
        *(((-0.068, "", "difference"), "−0.068"), ((-4.2, "seconds"), "−4.2 s"), ((12.5, "steps"), "12.50 steps")),
        *(((12345, "count"), "12,345"), ((0.5, "nats"), "0.500 nats"), ((3599.7, "seconds"), "1 h 00 min")),
    ],
)
def test_quantities_read_as_people_write_them(value, text):
    assert numbers.text(*value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("low", "high", "how", "text"),
    [
        *((0.019, 0.055, ("share", "difference"), "+1.9 to +5.5 points"), (48.0, 55.1, ("seconds",), "48.0 to 55.1 s")),
        *((48.0, 106.0, ("seconds",), "48.0 s to 1 min 46 s"), (0.55, 0.73, ("share", "ratio"), "0.550× to 0.730×")),
        *((0.62, 0.66, ("share",), "62.0 to 66.0 %"), (None, 0.66, ("share",), ""), (math.nan, 1.0, (), "")),
    ],
)
def test_intervals_have_their_unit_once(low, high, how, text):
    assert numbers.interval({"ci_low": low, "ci_high": high}, *how).replace("\u00a0", " ") == text


def test_distances_and_ticks_have_the_unit_of_their_comparison():
    for said, expected in (((0.031, "share", "level"), "3.1 points"), ((75.0, "seconds", "level"), "1 min 15 s")):
        assert numbers.distance(*said).replace("\u00a0", " ") == expected
    for unit, how, value, expected in (("share", "difference", 0.025, "+2.5"), ("seconds", "ratio", 0.7, "0.7×")):
        axis = new_figure(2, 2).subplots().xaxis
        unit_ticks(axis, unit, how)
        assert axis.get_major_formatter()(value, 0) == expected


@given(st.floats(-1e12, 1e12), st.floats(-5, 5))
def test_decimals_are_true_to_three_digits_and_percentages_to_a_tenth(value, share):
    text = numbers.decimal(value).replace("−", "-").replace(",", "")
    assert math.isclose(float(text), value, rel_tol=0.005, abs_tol=5e-4 if abs(value) >= 1e-3 else 0)
    assert len(text) <= 10
    text = numbers.percent(share)
    assert text.endswith("\u00a0%")
    assert abs(float(text[:-2].replace("−", "-")) - 100 * share) <= 0.0501
    assert not text.startswith("−0.0")


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_missing_numbers_are_a_dash(value):
    for show in (numbers.decimal, numbers.percent, numbers.count, numbers.duration, numbers.text):
        assert show(value) == numbers.MISSING


# --- errors, whose estimate may be below zero ----------------------------------------------------------------------


def test_an_error_is_shown_from_its_floor_on_and_a_difference_of_errors_as_it_is():
    for name in ("ece_debiased", "ece_tempered_debiased", ECE):
        assert [floored(name, value) for value in (-0.1, 0.0, 0.1, None)] == [0.0, 0.0, 0.1, None]
        assert [is_at_floor(name, value) for value in (-0.1, 0.0, 0.1, None)] == [True, True, False, False]
    item = {"value": 0.02, "ci_low": -0.01, "ci_high": 0.05}
    assert numbers.estimate("ece_debiased", item, "") == numbers.estimate(ECE, item, "") == ("0.020", "0 to 0.050")
    assert numbers.estimate(ECE, item, "", "difference") == ("+0.020", "−0.010 to +0.050")
    assert numbers.estimate("mean_margin", item, "logits") == ("0.020\u00a0logits", "−0.010 to 0.050\u00a0logits")
    assert numbers.estimate("ece_debiased", {"value": 0.0, "ci_low": None, "ci_high": None}, "") == ("0.00", "")


@pytest.fixture
def run():
    """A run whose model has no calibration error."""
    run = report_sample.results() | {"policy": None}  # whose gain would take the place of the calibration error
    for metrics in (run["metrics"], run["ood_metrics"]):
        metrics |= {"ece_debiased": dict(FOUND), "ece_tempered_debiased": dict(FOUND)}
    for check in run["gate"]:
        check["value"] = FOUND["value"] if check["name"] == "ece_debiased" else check["value"]
    return run


@pytest.fixture
def matrix():
    """An experiment in which no arm has a calibration error, and a claim about that."""
    results = copy.deepcopy(experiment_sample.results())
    for arm in results["arms"]:
        arm["metrics"][ECE] = dict(FOUND)
    for cell in results["cells"]:
        if cell["metrics"].get(ECE) is not None:
            cell["metrics"][ECE] = -0.02 if cell["seed"] else 0.01
    claim = experiment_sample.hypothesis(
        "H9", "Calibrated.", ECE, "supported", "below it", comparison="level", arm="A5 full", versus=None,
        direction="below", threshold=0.12,
    )  # fmt: skip
    results["hypotheses"] = [claim | {key: FOUND[key] for key in ("value", "ci_low", "ci_high")}]
    return results


def cells(found):
    """All cells of the tables of sections, as they read."""
    rows = [row for one in found for table in one.block.tables for row in table.rows]
    return "\n".join(" ".join(cell_text(cell, True) for cell in row) for row in rows)


@pytest.mark.slow
def test_no_negative_error_is_in_a_report_its_summary_or_the_console(run, matrix, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    print_metrics("a model", {"ece_debiased": FOUND})
    ece = capsys.readouterr().out
    print_outcome({"results": matrix, "report": "/report.html", "mlflow_url": None})
    told = {
        "report": cells(sections(run)),
        "summary": summary_markdown(run),
        "report of an experiment": cells(experiment_sections(matrix)),
        "log of an experiment": experiment_markdown(matrix),
        "console": ece,
        "console of an experiment": capsys.readouterr().out,
    }
    for place, text in told.items():
        assert re.search(r"0\.00\W+upper end 0\.041", text), place
        assert not re.search(r"[-−]0\.0(12|20|60)", text), place


def texts(figure):
    """Everything that can be read in a figure, tick labels included, but those beyond the ends of their axis."""
    figure.draw_without_rendering()
    beyond = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        places = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)  # a shared axis has none
        beyond |= {label for place, label in places if not low <= place <= high}
    return [
        text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text not in beyond
    ]


@pytest.mark.slow
def test_none_is_in_a_figure(matrix):
    row = {"bin_low": 0.5, "bin_high": 0.6, "mean_confidence": 0.55, "count": 9}
    bins = pd.DataFrame([row | {"accuracy": 0.56, "accuracy_low": 0.5, "accuracy_high": 0.6}])
    assert "0.00 (95 %: upper end 0.041)" in " ".join(texts(reliability_diagram_figure(bins, FOUND)))
    infos, arms, cells = matrix["metrics"], matrix["arms"], matrix["cells"]
    figures = [arm_intervals_figure(arms, cells, [ECE], infos), forest_plot_figure(matrix["hypotheses"], infos)]
    for figure in figures:
        assert not [text for text in texts(figure) if NEGATIVE.search(text)]
        assert any("upper end 0.041" in text for text in texts(figure))
