"""The page of a study of what choosing labels saves: every number, safe, and gaps are said rather than hidden."""

import re

import pytest

from rmcore.active.analysis import analyse, analyse_check
from rmcore.config.active import ActiveConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.reporting.figures.active import label_efficiency_figure, label_savings_figure
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.active import check_rows, claim_rows, saving_rows
from rmcore.reporting.html.active_page import CAPTIONS, WORDS, write_active_report

STUDY = ActiveConfig(num_seeds=10, noise=(0.0, 0.25), targets=(0.5, 0.8))
COUNTS = [100, 200, 400, 800]
LEARNING = [0.60, 0.66, 0.71, 0.75]
REGISTRATION = {"number": 2, "hash": "ab12" * 16, "frozen_at": "2026-03-01T12:00:00+00:00", "changes": []}


def record(seed, ahead):
    """One seed's: some functions are a step ahead of random, one never gets anywhere."""
    shaken = 0.002 * (seed % 3)
    curves = {name: [value + shaken for value in LEARNING] for name in STUDY.acquisitions}
    curves["d-optimal"] = [0.60 + shaken, *(value + ahead - shaken for value in LEARNING[2:]), 0.75 + shaken]
    curves["variance"] = [0.60 + shaken] * len(COUNTS)
    return {"num_labels": COUNTS, "accuracy": curves, "end": 0.75 + shaken, "num_pool": 700, "num_test_prompts": 250}


def flat(cell):
    return " ".join(cell.split())


def found(check=False):
    study = analyse({noise: [record(seed, -0.01 * bool(noise)) for seed in range(10)] for noise in STUDY.noise}, STUDY)
    study["registration"] = REGISTRATION
    if check:
        rows = {"random": (0.58, 0.62), "entropy": (0.60, 0.63)}
        study["check"] = analyse_check(
            {
                name: [
                    {"num_labels": [100, 300], "accuracy": [one + 0.01 * seed for one in values], "num_test_pairs": 500}
                    for seed in range(3)
                ]
                for name, values in rows.items()
            }
        )
    return study


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    study = found()
    return {
        "label_efficiency": save(label_efficiency_figure(study), folder / "label_efficiency.png"),
        "label_savings": save(label_savings_figure(study), folder / "label_savings.png"),
    }


@pytest.fixture
def page(parse, figures, tmp_path):
    def render(study, source="gold"):
        config = PipelineConfig(study="labels", active=STUDY).model_dump(mode="json")
        config["data"]["source"] = source
        out = write_active_report(study, figures, tmp_path / "deep" / "report.html", config=config)
        return parse(out.read_text(encoding="utf-8"))

    return render


def test_one_file_that_fetches_and_runs_nothing(page, figures):
    shown = page(found(check=True))
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(shown.tags)
    assert len(shown.values("src")) == len(figures) == len(CAPTIONS)
    assert all(value.startswith("data:image/png;base64,") for value in shown.values("src"))
    assert shown.values("href") == []


@pytest.mark.parametrize("check", [False, True])
def test_every_claim_saving_and_check_is_on_the_page(page, check):
    study = found(check)
    shown = page(study)
    verdicts = {claim["acquisition"]: claim["verdict"] for claim in study["claims"] if claim["threshold"] == 0}
    assert (verdicts["d-optimal"], verdicts["entropy"]) == ("supported", "inconclusive")
    assert study["headline"] in shown.text
    claims, savings = shown.section("claims"), shown.section("savings")
    assert all(flat(cell) in claims for row in claim_rows(study) for cell in row)
    assert all(flat(cell) in savings for row in saving_rows(study) for cell in row)
    assert "none: not reached in 10 seeds" in savings  # variance
    assert "Registration 2 (ab12ab12ab12) was frozen 1 March 2026, 12:00 UTC" in claims
    checked = shown.section("check")
    if check:
        assert all(flat(cell) in checked for row in check_rows(study["check"]) for cell in row)
    else:
        assert "active.check.num_seeds=3" in checked
    assert not re.search(r"\b(None|nan|NaN|inf)\b", shown.text.split("Configuration")[0])
    assert all(word in shown.section("glossary") for word in WORDS)


def test_names_from_outside_are_text(page):
    shown = page(found(), source="<b onclick=x>pairs</b>.parquet")
    assert "<b onclick=x>pairs</b>.parquet" in shown.text
    assert not [name for _, name, _ in shown.attributes if name.startswith("on")]
