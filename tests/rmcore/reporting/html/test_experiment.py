"""The report of an experiment: everything of the record is there, safe, and gaps are said rather than hidden."""

import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import experiment_sample as sample
from rmcore.reporting.figures import claims, numbers
from rmcore.reporting.figures.arms import looks
from rmcore.reporting.figures.claims import VERDICTS
from rmcore.reporting.figures.experiment import draw_experiment
from rmcore.reporting.html.experiment import experiment_markdown, write_experiment_report
from rmcore.reporting.html.glossary import EXPERIMENT_WORDS

pytestmark = pytest.mark.slow


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    return draw_experiment(sample.results(), tmp_path_factory.mktemp("figures"))


@pytest.fixture(scope="module")
def render(parse):
    def write(results, figures, folder):
        return parse(write_experiment_report(results, figures, folder / "report.html").read_text(encoding="utf-8"))

    return write


@pytest.fixture(scope="module")
def page(figures, render, tmp_path_factory):
    return render(sample.results(), figures, tmp_path_factory.mktemp("report") / "deep")


def test_one_file_that_fetches_and_runs_nothing_and_links_to_mlflow_alone(page, figures):
    page.assert_safe()
    assert len(page.raw.encode()) < 2_000_000
    assert len(page.values("src")) == len(figures)
    assert {one for one in page.values("href") if one[0] != "#"} == {sample.results()["mlflow_url"]}


def test_the_answer_stands_before_everything_else(page):
    order = ["answer", "notes", "arms", "figures", "cells", "registration", "cost", "again", "glossary"]
    places = [page.raw.index(f'<section id="{name}">') for name in order]
    assert places == sorted(places)
    assert page.text.index(sample.results()["question"]) < page.text.index("The answer")
    assert page.raw.index('id="in-figures"') < page.raw.index("<h2>Cells")  # only what comes after it is folded


@pytest.mark.parametrize("item", sample.hypotheses(), ids=lambda item: item["name"])
def test_every_claim_is_answered_in_words(parse, page, item):
    info = sample.metric_infos()[item["metric"]]
    answer, judged = page.raw.split('<section id="answer">')[1].split("</section>")[0].split("<details>")
    row = next(part for part in answer.split("<tr>") if f"{item['name']}: " in part)
    text = parse(f"<table><tr>{row.split('</tr>')[0]}</tr></table>").text
    others = [look.words for verdict, look in VERDICTS.items() if verdict != item["verdict"]]
    assert text.startswith(VERDICTS[item["verdict"]].words)
    assert not any(words in text for words in others)
    bounds = numbers.interval(item, info["unit"], item["comparison"])
    for expected in (item["claim"], item["reason"], flat(bounds or "no interval"), item["arm"]):
        assert expected in text
    rows = [parse(f"<table><tr>{one.split('</tr>')[0]}</tr></table>").text for one in judged.split("<tr>")[1:]]
    [how] = [one for one in rows if one.startswith(f"{item['name']} ") and item["method"] in one]
    assert f"{item['num_seeds']} seeds" in how
    assert ("137 prompts" in how) == (item["num_prompts"] is not None)


def test_every_arm_cell_note_and_the_registration_are_shown(page):
    results = sample.results()
    for arm in results["arms"]:
        assert arm["name"] in page.section("arms")
        for metric, mean in arm["metrics"].items():
            unit = results["metrics"][metric]["unit"]
            if mean["value"] is not None:
                assert flat("".join(claims.mean_estimate(metric, mean, unit))) in page.section("arms")
        for setting, value in arm["changes"].items():
            assert re.search(rf"{re.escape(setting)}: .*{re.escape(str(value))}", page.section("arms"))
        for name, band in arm["bands"].items():
            assert f"{name}: {band}" in page.section("arms")
    for note in results["notes"]:
        assert note in page.section("notes")
    for change in results["registration"]["changes"]:
        assert change in page.section("registration")
    assert results["registration"]["hash"] in page.raw
    assert results["registration"]["path"] in page.text
    assert results["command"] in page.section("again")
    for word, meaning in EXPERIMENT_WORDS.items():
        assert word in page.section("glossary")
        assert meaning in page.section("glossary")


def test_every_cell_has_a_row_with_its_numbers(parse, page):
    results = sample.results()
    rows = [parse(f"<table><tr>{row}</table>").text for row in
            page.raw.split('<section id="cells">')[1].split("</table>")[0].split("<tr>")[2:]
            for row in [row.split("</tr>")[0] + "</tr>"]]  # fmt: skip
    assert len(rows) == len(results["cells"])
    details = page.raw.split('<section id="cells">')[1].split("</table>")[1].split("<tr>")[2:]
    lines = [parse(f"<table><tr>{line.split('</tr>')[0]}</tr></table>").text for line in details]
    for row, cell in zip(rows, results["cells"], strict=True):
        assert row.startswith(f"{cell['arm']} {cell['seed']}")
        assert cell["status"] in row
        if cell["status"] == "failed":
            assert cell["error"] in row
            continue
        for name, value in cell["metrics"].items():
            assert value is None or flat(numbers.text(value, results["metrics"][name]["unit"])) in row
        assert f"{sum(check['passed'] for check in cell['gate'])}/{len(cell['gate'])}" in row
        own = f"{cell['arm']} {cell['seed']} "
        found = [line for line in lines if line.startswith(own)]
        for check in cell["gate"]:
            assert any(check["text"] in line for line in found) == (not check["passed"])
        for one in cell["diagnoses"]:
            assert any(all(text in line for text in one.values()) for line in found)
        assert all(path in page.section("cells") for path in cell["paths"].values())
        assert numbers.duration(cell["device_seconds"]) in row
        if cell["device_seconds"] is not None:
            assert f"{cell['device_seconds'] / 3600 * 2:.2f}" in row  # at 2 an hour


def test_cost_and_detectable_effects(page):
    cost = sample.results()["cost"]
    for key in ("estimated_seconds", "measured_seconds", "device_seconds", "run_seconds"):
        assert numbers.duration(cost[key]) in page.section("cost")
    assert "0.40 at 2 an hour" in page.section("cost")
    shown = page.section("answer")
    for text in ("2.1 points", "3.1 points", "0.080×", "80 % power"):
        assert text in shown


def test_arms_have_the_colour_that_the_figures_give_them(page):
    results = sample.results()
    for arm, look in looks(results["arms"], sample.ACCURACY, True).items():
        assert re.search(rf'style="background:{look.colour}"></span>{re.escape(arm)}\b', page.raw)


def test_base_config_reads_back_and_the_record_is_left_as_it_was(render, parse, tmp_path):
    results = sample.results()
    raw = render(results, {}, tmp_path).raw
    experiment_markdown(results)
    assert results == sample.results()
    listing = parse(raw.rsplit("<pre>", 1)[1].split("</pre>", 1)[0])
    assert yaml.safe_load("".join(listing.pieces)) == sample.results()["base"]


def emptied() -> dict:
    """The sample with everything gone that may be missing."""
    results = sample.results()
    for item in results["hypotheses"]:
        item.update(value=None, ci_low=None, ci_high=None, num_seeds=0, num_prompts=None, smallest_detectable=None)
        item.update(p=None, p_holm=None, sign_flip_p=None, verdict="inconclusive", reason="no cell finished")
    for arm in results["arms"]:
        arm.update(metrics={name: sample.metric([]) for name in arm["metrics"]}, bands={}, changes={})
    for cell in results["cells"]:
        cell.update(status="failed", error=None, key=None, metrics={}, seconds=None, gate=[], diagnoses=[], paths={})
    results["cost"].update(estimated_seconds=None)
    results["registration"].update(number=1, changes=[])
    results.update(curves={}, notes=[], environment={}, mlflow_url=None, sizes={})
    return results


def test_missing_numbers_are_dashes_and_missing_parts_are_said(render, tmp_path):
    results = emptied()
    drawn = draw_experiment(results, tmp_path)
    page = render(results, drawn, tmp_path)
    assert set(drawn) == {"forest_plot"}
    assert "None" not in page.text
    assert "nan" not in re.findall(r"\w+", page.text.lower())
    assert numbers.MISSING in page.section("answer")
    assert page.section("cells").count("no reason was recorded") == len(results["cells"])
    assert page.section("figures").count("was not drawn in this run") == 3
    for label in (info["label"] for info in results["metrics"].values()):
        assert label in page.section("arms")  # as not measured
    assert "15 of 15 cells failed" in page.text
    assert "first registration" in page.text
    assert "None" not in experiment_markdown(results)


def test_an_experiment_without_claims_or_arms(render, tmp_path):
    results = emptied()
    results.update(hypotheses=[], sizes={}, arms=[], cells=[], metrics={}, seeds=[])
    page = render(results, draw_experiment(results, tmp_path), tmp_path)
    assert "No claim was registered" in page.text
    assert "No claim was registered" in experiment_markdown(results)


@settings(max_examples=6)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40))
@example("`L")
def test_any_text_stays_text(render, tmp_path_factory, text):
    hostile = f"<script>alert(1)</script><img src=x onerror=y>\" ' {{{{ 7*7 }}}} &lt; | {text} </main>"
    results = sample.results()
    results.update(title=hostile, question=hostile, command=hostile, notes=[hostile], environment={hostile: hostile})
    results.update(base={hostile: hostile}, mlflow_url=f"javascript:alert('{hostile}')")
    results["registration"].update(changes=[hostile], path=hostile)
    results["hypotheses"][0].update(claim=hostile, reason=hostile, method=hostile, name=hostile)
    results["cells"][0].update(error=hostile, status="failed")
    results["cells"][1]["paths"] = {hostile: hostile}
    results["cells"][1]["diagnoses"] = [{"symptom": hostile, "diagnosis": hostile, "advice": hostile}]
    results["arms"][0].update(changes={hostile: hostile}, merged=[hostile], bands={hostile: hostile})
    found = render(results, {}, tmp_path_factory.mktemp("hostile"))
    plain = render(sample.results(), {}, tmp_path_factory.mktemp("plain"))
    assert set(found.tags) <= set(plain.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert not [value for value in found.values("href") if not value.startswith("#")]
    assert found.text.count(flat(hostile)) >= 12
    markdown = experiment_markdown(results)
    tables = [line.replace("\\|", "") for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {6, 8}
    assert "<img" not in markdown.split("```")[0].replace("\\<", "")
    assert "javascript" not in markdown


def test_markdown_is_a_log_entry():
    results = sample.results()
    text = experiment_markdown(results)
    assert text.startswith("## 2026-11-21 · ablation (small): ")
    assert sum(line.startswith("#") for line in text.splitlines()) == 1
    assert results["registration"]["hash"][:12] in text
    rows = [line for line in text.splitlines() if re.match(r"\| . [a-z]+ \| H", line)]
    for row, item in zip(rows, results["hypotheses"], strict=True):
        info = results["metrics"][item["metric"]]
        assert row.startswith(f"| {VERDICTS[item['verdict']].words} | {item['name']}: ")
        assert row.endswith(f"| {item['reason']} |")
        assert (numbers.interval(item, info["unit"], item["comparison"]) or "no interval") in row
    for arm in results["arms"]:
        mean = arm["metrics"][sample.ACCURACY]
        named = f"| {arm['name']}{' (control)' * arm['is_control']} | "
        [row] = [line for line in text.splitlines() if line.startswith(named)]
        assert f" | {numbers.text(mean['value'], 'share')} (" in row
    assert f"\n{results['command']}\n```" in text
    assert numbers.duration(results["cost"]["run_seconds"]) in text
    assert text.rstrip().splitlines()[-1].startswith("[Cells in MLflow](http://127.0.0.1:5000/")


def test_the_summary_names_arms_of_fewer_seeds():
    results = sample.results()
    arm, seed = sample.FAILED
    assert f"Means over seeds 0, 1, 2, {claims.SEED_INTERVAL}." in experiment_markdown(results)
    assert f"| {arm} | 2 of 3 |" in experiment_markdown(results)
    results["cells"] = [cell for cell in results["cells"] if cell["seed"] != seed]
    results["seeds"] = [0, 1]
    assert f"| {arm} | 2 of 2 |" in experiment_markdown(results)


def test_an_interval_over_two_seeds_is_none_unless_it_decides(render, tmp_path):
    wide = {"num_seeds": 2, "value": 0.174, "ci_low": -1.008, "ci_high": 1.355, "verdict": "inconclusive"}
    results = sample.results()
    base = results["hypotheses"][0] | {
        "comparison": "difference",
        "reason": "the interval −100.8 to +135.5 points holds the threshold",
    }
    results["hypotheses"] = [base | wide]
    for arm in results["arms"]:
        for metric in arm["metrics"].values():
            if metric["ci_low"] is not None:
                metric |= {"num": 2, "ci_low": -1.008, "ci_high": 1.355}
    for shown in (render(results, {}, tmp_path).text, experiment_markdown(results)):
        assert "two seeds are too few" in shown
        assert "135.5" not in shown
    results["hypotheses"] = [base | wide | {"verdict": "supported", "ci_low": 0.101, "ci_high": 0.247}]
    assert "24.7" in experiment_markdown(results)
