"""No page, figure or console line shows a negative error: where none was found it says so, with the upper end."""

import copy
import re

import matplotlib.text
import pandas as pd
import pytest

import experiment_sample
import report_sample
from flows.cli_experiment import print_outcome
from rmcore.cli.common import print_metrics
from rmcore.core.metrics import METRICS, floored, is_at_floor
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arm_intervals import arm_intervals_figure
from rmcore.reporting.figures.calibration import reliability_diagram_figure
from rmcore.reporting.figures.forest import forest_plot_figure
from rmcore.reporting.figures.tradeoff import tradeoff_figure
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.experiment import experiment_markdown
from rmcore.reporting.html.experiment import sections as experiment_sections
from rmcore.reporting.html.html import sections
from rmcore.reporting.html.summary import summary_markdown

ECE, ACCURACY = experiment_sample.ECE, experiment_sample.ACCURACY
FOUND = {"value": -0.0123, "ci_low": -0.06, "ci_high": 0.0412, "num": 90, "reason": None}
NEGATIVE = re.compile(r"[-−]\s?\d")
TOLD = "0.00 (upper end 0.041)"


def texts(figure):
    """Everything that can be read in a figure, tick labels included, but those beyond the ends of their axis."""
    figure.draw_without_rendering()
    beyond = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            places = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)  # a shared axis has none
            beyond |= {label for place, label in places if not low <= place <= high}
    found = figure.findobj(matplotlib.text.Text)
    return [text.get_text() for text in found if text.get_visible() and text not in beyond]


def negative(found):
    return [text for text in found if NEGATIVE.search(text)]


@pytest.fixture
def run():
    results = report_sample.results()
    for metrics in (results["metrics"], results["ood_metrics"]):
        metrics |= {"ece_debiased": dict(FOUND), "ece_tempered_debiased": dict(FOUND)}
    for check in results["gate"]:
        if check["name"] == "ece_debiased":
            check["value"] = FOUND["value"]
    return results


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


def test_the_rule_is_the_registrys():
    assert {name for name, spec in METRICS.items() if spec.floor is not None} == {
        "ece_debiased",
        "ece_tempered_debiased",
        "seconds_to_target",
        "steps_to_target",
        "train_seconds",
    }
    for name in ("ece_debiased", "ece_tempered_debiased", ECE):
        assert [floored(name, value) for value in (-0.1, 0.0, 0.1, None)] == [0.0, 0.0, 0.1, None]
        assert [is_at_floor(name, value) for value in (-0.1, 0.0, 0.1, None)] == [True, True, False, False]
    for name in ("mean_margin", "hessian/test_lambda_min", "brand new", ""):
        assert floored(name, -0.1) == -0.1
        assert not is_at_floor(name, -0.1)


def test_what_is_above_the_floor_is_shown_as_any_number_and_its_interval_ends_at_the_floor():
    item = {"value": 0.02, "ci_low": -0.01, "ci_high": 0.05}
    assert numbers.estimate("ece_debiased", item, "") == numbers.estimate(ECE, item, "") == ("0.020", "0 to 0.050")
    assert numbers.estimate(ECE, item, "", "difference") == ("+0.020", "−0.010 to +0.050")
    assert numbers.estimate("mean_margin", item, "logits") == ("0.020\u00a0logits", "−0.010 to 0.050\u00a0logits")
    assert numbers.estimate("ece_debiased", {"value": 0.0, "ci_low": None, "ci_high": None}, "") == ("0.00", "")


def test_a_report_and_its_summary(run):
    run["policy"] = None  # whose gain would take the place of the calibration error
    tables = {one.anchor: one.block.tables for one in sections(run)}
    [card] = [card for card in headline_cards(run) if card.label == METRICS["ece_debiased"].label]
    assert (card.value, card.interval) == ("0.00", "95 %: upper end 0.041")
    rows = {name.text: cells for name, *cells in tables["metrics"][0].rows}
    for name in ("ece_debiased", "ece_tempered_debiased"):
        value, interval, _, ood_value, ood_interval = rows[METRICS[name].label]
        assert (value, interval) == (ood_value, ood_interval) == ("0.00", "upper end 0.041")
    label = METRICS["ece_debiased"].label
    assert [value for _, name, value, _ in tables["gate"][0].rows if name.text == label] == ["0.00"]
    [line] = [line for line in summary_markdown(run).splitlines() if "ECE" in line]
    assert "| 0.00 | upper end 0.041 |" in line


def test_the_report_of_an_experiment_and_its_summary(matrix):
    tables = {one.anchor: one.block.tables[0] for one in experiment_sections(matrix) if one.block.tables}
    shown = {name: tables[name].headings.index(matrix["metrics"][ECE]["label"]) for name in ("arms", "cells")}
    assert {row[shown["arms"]][:2] for row in tables["arms"].rows} == {("0.00", "upper end 0.041")}
    assert {row[shown["cells"]] for row in tables["cells"].rows} == {"0.00", "0.010", ""}
    [answer] = tables["answer"].rows
    assert answer[2][:2] == ("0.00", "upper end 0.041")
    markdown = experiment_markdown(matrix)
    assert markdown.count(TOLD) == len(matrix["arms"]) + 1
    assert not [line for line in markdown.splitlines() if "A5 full" in line and NEGATIVE.search(line)]


@pytest.mark.slow
def test_figures(matrix):
    row = {"bin_low": 0.5, "bin_high": 0.6, "mean_confidence": 0.55, "count": 9}
    bins = pd.DataFrame([row | {"accuracy": 0.56, "accuracy_low": 0.5, "accuracy_high": 0.6}])
    assert TOLD.replace("(", "(95 %: ") in " ".join(texts(reliability_diagram_figure(bins, FOUND)))
    infos, arms, cells = matrix["metrics"], matrix["arms"], matrix["cells"]
    drawn = {
        "intervals": arm_intervals_figure(arms, cells, [ECE], infos),
        "tradeoff": tradeoff_figure(arms, cells, infos, accuracy=ACCURACY, others=[ECE]),
        "forest": forest_plot_figure(matrix["hypotheses"], infos),
    }
    for name, figure in drawn.items():
        assert negative(texts(figure)) == [], name
        assert any("upper end 0.041" in text for text in texts(figure)), name


def test_axes_where_every_error_is_zero(matrix):
    for cell in matrix["cells"]:
        cell["metrics"][ECE] = 0.0
    for arm in matrix["arms"]:
        arm["metrics"][ECE] = {"value": 0.0, "ci_low": None, "ci_high": None, "num": 1, "reason": "one seed only"}
    infos, arms, cells = matrix["metrics"], matrix["arms"], matrix["cells"]
    assert negative(texts(arm_intervals_figure(arms, cells, [ECE], infos))) == []
    assert negative(texts(tradeoff_figure(arms, cells, infos, accuracy=ACCURACY, others=[ECE]))) == []


def test_the_console(matrix, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    print_metrics("a model", {"ece_debiased": FOUND, "mean_margin": {**FOUND, "value": -1.5, "ci_low": -2.0}})
    ece, margin = (line for line in capsys.readouterr().out.splitlines() if "│" in line)
    assert "0.00" in ece
    assert "upper end 0.041" in ece
    assert not NEGATIVE.search(ece)
    assert "−1.500 logits" in margin.replace("\u00a0", " ")
    assert "−2.000 to 0.041" in margin
    print_outcome({"results": matrix, "report": "/report.html", "mlflow_url": None})
    lines = capsys.readouterr().out.splitlines()
    [at] = [at for at, line in enumerate(lines) if line.startswith("H9")]
    assert lines[at].endswith("Calibrated.")
    assert "0.00 (upper end 0.041), claimed below 0.120" in lines[at + 1]
