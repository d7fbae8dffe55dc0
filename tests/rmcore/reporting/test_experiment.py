"""The figures and the report of an experiment: all of the record is there, safe, and gaps are said, not hidden."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import experiment_sample as sample
from rmcore.reporting.figures import claims, numbers
from rmcore.reporting.figures.arms import MOST, arm_intervals_figure, arm_styles, labelled_arms, main_metrics
from rmcore.reporting.figures.claims import VERDICTS, subject, tally
from rmcore.reporting.figures.experiment import draw_experiment, forest_plot_figure, learning_curves_figure
from rmcore.reporting.figures.style import short
from rmcore.reporting.html.experiment import experiment_markdown, write_experiment_report
from rmcore.reporting.html.glossary import EXPERIMENT_WORDS

RESULTS = sample.results()
INFOS = RESULTS["metrics"]
MAIN = (sample.ACCURACY, True)


def flat(text: str) -> str:
    return " ".join(text.split())


# --- figures ----------------------------------------------------------------------------------------------------------


def matrix(num_arms: int) -> tuple[list, dict]:
    """Arms and curves of a larger matrix with similar arms."""
    rng = np.random.default_rng(0)
    names = [f"learning_rate={10.0**-number:.0e}, smoothing={number}" for number in range(num_arms)]
    means = [{sample.ACCURACY: sample.metric([0.7 + 0.01 * rng.normal()])} for _ in names]
    arms = [
        RESULTS["arms"][1] | {"name": name, "is_control": name == names[0], "metrics": mean}
        for name, mean in zip(names, means, strict=True)
    ]
    curves = [
        {"arm": name, "seed": 0, "steps": list(range(8)), "values": np.linspace(0.5, 0.6, 8).tolist()} for name in names
    ]
    return arms, {"eval/pairwise_accuracy": curves}


@pytest.mark.slow
def test_forest_has_a_panel_a_claim_on_its_own_scale_and_no_text_over_another(draw):
    figure = draw(forest_plot_figure(RESULTS["hypotheses"], INFOS))
    assert figure.get_suptitle() == "4 claims: 1 supported, 1 refuted, 2 inconclusive" == tally(RESULTS["hypotheses"])
    for ax, item in zip(figure.axes, RESULTS["hypotheses"], strict=True):
        texts = {text.get_text(): text.get_color() for text in ax.texts}
        words, colour, _ = VERDICTS[item["verdict"]]
        assert texts[words] == colour
        assert item["claim"] in ax.get_title(loc="left").replace("\n", " ")
        assert subject(item) in ax.get_xlabel()
        assert INFOS[item["metric"]]["label"] in ax.get_xlabel()
        lines = {line.get_label(): line for line in ax.lines}
        assert set(lines["threshold"].get_xdata()) == {item["threshold"]}
        assert list(lines["value"].get_xdata()) == [item["value"]]
        assert ("interval" in lines) == (item["ci_low"] is not None)
        left, right = ax.get_xlim()
        inside = [item[key] for key in ("value", "ci_low", "ci_high", "threshold") if item[key] is not None]
        assert left < min(inside) <= max(inside) < right
        shade = ax.patches[0].get_extents().transformed(ax.transData.inverted())
        edge = right if item["direction"] == "above" else left
        assert sorted((shade.x0, shade.x1)) == pytest.approx(sorted((item["threshold"], edge)))
    units = [ax.get_xlabel().rpartition("(")[2] for ax in figure.axes]
    assert [units[0], units[1], units[3]] == ["percentage points)", "%)", "ratio)"]
    boxes = [text.get_window_extent() for ax in figure.axes for text in (*ax.texts, ax.xaxis.label)]
    for one, other in combinations(boxes, 2):
        across, along = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, along) <= 0.5
    bare = RESULTS["hypotheses"][0] | {"value": None, "ci_low": None, "ci_high": None, "verdict": "inconclusive"}
    assert any("no value" in text.get_text() for text in draw(forest_plot_figure([bare], {})).axes[0].texts)


@pytest.mark.slow
def test_arm_intervals_show_means_seeds_and_the_control(draw):
    metrics = list(sample.LEVELS)
    figure = draw(arm_intervals_figure(RESULTS["arms"], RESULTS["cells"], metrics, INFOS))
    assert "control" in figure.get_suptitle()
    for ax, metric in zip(figure.axes, metrics, strict=False):
        assert INFOS[metric]["label"] in ax.get_title(loc="left").replace("\n", " ")
        for row, arm in enumerate(RESULTS["arms"]):
            mean = next(line for line in ax.lines if line.get_label() == arm["name"])
            assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([arm["metrics"][metric]["value"]], [row])
        seeds = np.concatenate([line.get_xdata() for line in ax.lines if line.get_label() == "seeds"])
        known = [cell["metrics"][metric] for cell in RESULTS["cells"] if cell["metrics"][metric] is not None]
        assert sorted(seeds) == sorted(known)
        left, right = ax.get_xlim()
        assert left < min(known) <= max(known) < right
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == list(sample.ARMS)


def test_an_interval_far_wider_than_the_points_does_not_flatten_them_and_ends_in_arrows(draw):
    arms = [arm | {"metrics": dict(arm["metrics"])} for arm in RESULTS["arms"]]
    wide = sample.metric([0.5, 0.7])
    arms[2]["metrics"][sample.ACCURACY] = wide
    ax = draw(arm_intervals_figure(arms, RESULTS["cells"], [sample.ACCURACY], INFOS)).axes[0]
    points = [arm["metrics"][sample.ACCURACY]["value"] for arm in arms]
    assert np.ptp(ax.get_xlim()) < min(5 * np.ptp(points), 0.5 * (wide["ci_high"] - wide["ci_low"]))
    edges = [line for line in ax.lines if list(line.get_xdata()) in ([ax.get_xlim()[0]], [ax.get_xlim()[1]])]
    assert len(edges) == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_arms", [1, 14])
def test_nine_arms_are_named_and_the_others_counted(draw, num_arms):
    arms, curves = matrix(num_arms)
    drawn = draw(learning_curves_figure(curves, arms, MAIN))
    [legend], [ax] = drawn.legends, drawn.axes
    assert [text.get_text() for text in legend.get_texts()] == [short(name) for name in labelled_arms(arms, *MAIN)]
    assert len(legend.get_texts()) == min(num_arms, MOST)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer step", "validation accuracy (%)")
    assert (f"grey: {num_arms - MOST} further arms" in ax.get_title(loc="left")) == (num_arms > MOST)


@pytest.mark.slow
def test_learning_curves_draw_every_seed_the_mean_of_all_of_them_and_no_axis_for_one_that_diverged(draw):
    curves = RESULTS["curves"]
    accuracy = curves["eval/pairwise_accuracy"]
    figure = draw(learning_curves_figure(curves, RESULTS["arms"], MAIN))
    thin = [line for line in figure.axes[0].lines if line.get_linewidth() < 1 and line.get_linestyle() == "-"]
    assert sorted(tuple(line.get_ydata()) for line in thin) == sorted(tuple(curve["values"]) for curve in accuracy)
    stopped = [curve for curve in accuracy if curve["arm"] == "A4 stopping"]
    end = next(line for line in figure.axes[0].lines if line.get_label() == "A4 stopping")
    last = min(curve["steps"][-1] for curve in stopped)
    assert end.get_xdata()[0] == last
    assert end.get_ydata()[0] == pytest.approx(np.mean([one["values"][one["steps"].index(last)] for one in stopped]))
    losses = [curve | {"values": list(curve["values"])} for curve in curves["train/loss"]]
    losses[0]["values"][-1] = 1e6
    assert learning_curves_figure({"train/loss": losses}, RESULTS["arms"], MAIN).axes[0].get_ylim()[1] < 1e4


@given(st.permutations(range(15)), st.booleans(), st.integers(0, 14))
def test_the_control_and_the_best_arms_are_labelled(order, better, control):
    arms = [
        {"name": str(k), "is_control": k == control, "metrics": {"m": {"value": float(rank)}}}
        for k, rank in enumerate(order)
    ]
    names = labelled_arms(arms, "m", better)
    assert len(names) == MOST
    assert str(control) in names
    assert [arm["name"] for arm in arms if arm["name"] in names] == names
    inside = [order[int(name)] for name in names if name != str(control)]
    outside = [rank for k, rank in enumerate(order) if str(k) not in names]
    assert min(inside) > max(outside) if better else max(inside) < min(outside)
    styles = arm_styles(arms, "m", better)
    assert len({styles[name].colour for name in names}) == len({styles[name].marker for name in names}) == MOST


def test_main_metrics_hold_the_first_and_those_of_claims():
    names = [f"m{k}" for k in range(12)]
    assert main_metrics(names, [{"metric": "m9"}, {"metric": "m11"}]) == ["m0", "m1", "m2", "m3", "m9", "m11"]
    assert main_metrics(names, [{"metric": name} for name in names]) == names
    assert short("a" * 30 + "z" * 30, 11) == "aaaaa…zzzzz"


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def render(parse):
    def write(results, figures, folder):
        return parse(write_experiment_report(results, figures, folder / "report.html").read_text(encoding="utf-8"))

    return write


@pytest.fixture(scope="module")
def page(render, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return render(sample.results(), draw_experiment(sample.results(), folder), folder / "deep")


@pytest.mark.slow
def test_one_file_that_fetches_and_runs_nothing_links_to_mlflow_alone_and_begins_with_the_answer(page):
    page.assert_safe()
    assert len(page.raw.encode()) < 2_000_000
    assert len(page.values("src")) == 3
    assert {one for one in page.values("href") if one[0] != "#"} == {sample.results()["mlflow_url"]}
    order = ["answer", "notes", "arms", "figures", "cells", "registration", "cost", "again", "glossary"]
    places = [page.raw.index(f'<section id="{name}">') for name in order]
    assert places == sorted(places)
    assert page.text.index(sample.results()["question"]) < page.text.index("The answer")
    assert page.raw.index('id="in-figures"') < page.raw.index("<h2>Cells")  # only what comes after it is folded


@pytest.mark.slow
def test_every_claim_is_answered_in_words(parse, page):
    answer, judged = page.raw.split('<section id="answer">')[1].split("</section>")[0].split("<details>")
    answers, hows = (
        [parse(f"<table><tr>{row.split('</tr>')[0]}</tr></table>").text for row in part.split("<tr>")[1:]]
        for part in (answer, judged)
    )
    for item in sample.hypotheses():
        info = sample.metric_infos()[item["metric"]]
        [text] = [row for row in answers if f"{item['name']}: " in row]
        assert text.startswith(VERDICTS[item["verdict"]].words)
        bounds = numbers.interval(item, info["unit"], item["comparison"])
        for expected in (item["claim"], item["reason"], flat(bounds or "no interval"), item["arm"]):
            assert expected in text
        [how] = [row for row in hows if row.startswith(f"{item['name']} ") and item["method"] in row]
        assert f"{item['num_seeds']} seeds" in how
        assert ("137 prompts" in how) == (item["num_prompts"] is not None)


@pytest.mark.slow
def test_every_arm_note_cost_and_the_registration_are_shown(page):
    results = sample.results()
    for arm in results["arms"]:
        for metric, mean in arm["metrics"].items():
            if mean["value"] is not None:
                told = claims.mean_estimate(metric, mean, results["metrics"][metric]["unit"])
                assert flat("".join(told)) in page.section("arms")
        for setting, value in arm["changes"].items():
            assert re.search(rf"{re.escape(setting)}: .*{re.escape(str(value))}", page.section("arms"))
        assert all(f"{name}: {band}" in page.section("arms") for name, band in arm["bands"].items())
    for arm, look in arm_styles(results["arms"], sample.ACCURACY, True).items():
        assert re.search(rf'style="background:{look.colour}"></span>{re.escape(arm)}\b', page.raw)
    registration, cost = results["registration"], results["cost"]
    expected = {
        "notes": results["notes"],
        "registration": [*registration["changes"], registration["hash"], registration["path"]],
        "again": [results["command"]],
        "glossary": [*EXPERIMENT_WORDS, *EXPERIMENT_WORDS.values()],
        "cost": [numbers.duration(cost[f"{part}_seconds"]) for part in ("estimated", "measured", "device", "run")],
        "answer": ["2.1 points", "3.1 points", "0.080×", "80 % power"],
    }
    for section, texts in expected.items():
        assert all(flat(text) in page.section(section) for text in texts), section


@pytest.mark.slow
def test_every_cell_has_a_row_with_its_numbers(parse, page):
    results = sample.results()
    tables = page.raw.split('<section id="cells">')[1].split("</table>")
    rows, lines = (
        [parse(f"<table><tr>{row.split('</tr>')[0]}</tr></table>").text for row in table.split("<tr>")[2:]]
        for table in tables[:2]
    )
    for row, cell in zip(rows, results["cells"], strict=True):
        assert row.startswith(f"{cell['arm']} {cell['seed']}")
        assert cell["status"] in row
        if cell["status"] == "failed":
            assert cell["error"] in row
            continue
        for name, value in cell["metrics"].items():
            assert value is None or flat(numbers.text(value, results["metrics"][name]["unit"])) in row
        assert f"{sum(check['passed'] for check in cell['gate'])}/{len(cell['gate'])}" in row
        own = [line for line in lines if line.startswith(f"{cell['arm']} {cell['seed']} ")]
        for check in cell["gate"]:
            assert any(check["text"] in line for line in own) == (not check["passed"])
        assert all(any(all(text in line for text in one.values()) for line in own) for one in cell["diagnoses"])
        assert all(path in page.section("cells") for path in cell["paths"].values())
        assert numbers.duration(cell["device_seconds"]) in row


def emptied() -> dict:
    """The sample with everything gone that may be missing."""
    results = sample.results()
    for item in results["hypotheses"]:
        item.update(value=None, ci_low=None, ci_high=None, num_seeds=0, num_prompts=None, smallest_detectable=None)
        item.update(p=None, p_holm=None, verdict="inconclusive", reason="no cell finished")
    for arm in results["arms"]:
        arm.update(metrics={name: sample.metric([]) for name in arm["metrics"]}, bands={}, changes={})
    for cell in results["cells"]:
        cell.update(status="failed", error=None, key=None, metrics={}, seconds=None, gate=[], diagnoses=[], paths={})
    results["cost"].update(estimated_seconds=None)
    results["registration"].update(number=1, changes=[])
    results.update(curves={}, notes=[], environment={}, mlflow_url=None)
    return results


@pytest.mark.slow
def test_missing_numbers_are_dashes_and_missing_parts_are_said(render, tmp_path):
    results = emptied()
    drawn = draw_experiment(results, tmp_path)
    page = render(results, drawn, tmp_path)
    assert set(drawn) == {"forest_plot"}
    assert "nan" not in re.findall(r"\w+", page.text.lower())
    assert numbers.MISSING in page.section("answer")
    assert page.section("cells").count("no reason was recorded") == len(results["cells"])
    assert page.section("figures").count("was not drawn in this run") == 2
    assert all(info["label"] in page.section("arms") for info in results["metrics"].values())  # as not measured
    assert "15 of 15 cells failed" in page.text
    assert "first registration" in page.text
    assert "None" not in page.text + experiment_markdown(results)
    results.update(hypotheses=[], arms=[], cells=[], metrics={}, seeds=[])
    for told in (render(results, draw_experiment(results, tmp_path), tmp_path).text, experiment_markdown(results)):
        assert "No claim was registered" in told


@pytest.mark.slow
@settings(max_examples=4)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40))
@example("`L")
def test_any_text_stays_text(render, page, tmp_path_factory, text):
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
    assert set(found.tags) <= set(page.tags)
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
    assert f"Means over seeds 0, 1, 2, {claims.SEED_INTERVAL}." in text
    rows = [line for line in text.splitlines() if re.match(r"\| . [a-z]+ \| H", line)]
    for row, item in zip(rows, results["hypotheses"], strict=True):
        info = results["metrics"][item["metric"]]
        assert row.startswith(f"| {VERDICTS[item['verdict']].words} | {item['name']}: ")
        assert row.endswith(f"| {item['reason']} |")
        assert (numbers.interval(item, info["unit"], item["comparison"]) or "no interval") in row
    for arm in results["arms"]:
        num_finished = 2 if arm["name"] == sample.FAILED[0] else 3
        named = f"| {arm['name']}{' (control)' * arm['is_control']} | {num_finished} of 3 | "
        [row] = [line for line in text.splitlines() if line.startswith(named)]
        assert f" | {numbers.text(arm['metrics'][sample.ACCURACY]['value'], 'share')} (" in row
    assert f"\n{results['command']}\n```" in text
    assert text.rstrip().splitlines()[-1].startswith("[Cells in MLflow](http://127.0.0.1:5000/")


def test_an_interval_over_two_seeds_is_none_unless_it_decides(render, tmp_path):
    wide = {"num_seeds": 2, "value": 0.174, "ci_low": -1.008, "ci_high": 1.355, "verdict": "inconclusive"}
    results = sample.results()
    reason = "the interval −100.8 to +135.5 points holds the threshold"
    base = results["hypotheses"][0] | {"comparison": "difference", "reason": reason}
    results["hypotheses"] = [base | wide]
    for arm in results["arms"]:
        for metric in arm["metrics"].values():
            if metric["ci_low"] is not None:
                metric |= {"num": 2, "ci_low": -1.008, "ci_high": 1.355}
    for told in (render(results, {}, tmp_path).text, experiment_markdown(results)):
        assert "two seeds are too few" in told
        assert "135.5" not in told
    results["hypotheses"] = [base | wide | {"verdict": "supported", "ci_low": 0.101, "ci_high": 0.247}]
    assert "24.7" in experiment_markdown(results)
