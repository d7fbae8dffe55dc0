"""The report is one safe file: it parses, needs nothing from outside, shows every number, bears missing parts."""

import base64

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import report_sample as sample
from capability_samples import RECORDS as CAPABILITIES
from rmcore.core.errors import DataError
from rmcore.reporting.figures.style import new_figure, save
from rmcore.reporting.html.blocks import LONGEST_TEXT, shorten
from rmcore.reporting.html.glossary import NUMBER_WORDS, READINESS_WEAKNESS, RUN_WORDS
from rmcore.reporting.html.report import CAPTIONS, sections, write_report


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    paths = {}
    for index, name in enumerate([*CAPTIONS, "one_more"]):
        figure = new_figure(1.0 + index / 10, 0.5)
        paths[name] = save(figure, folder / f"{name}.png")
    return paths


@pytest.fixture(scope="module")
def render(parse):
    def write(results, figures, folder):
        return parse(write_report(results, figures, folder / "report.html").read_text(encoding="utf-8"))

    return write


@pytest.fixture(scope="module")
def page(figures, render, tmp_path_factory):
    return render(sample.results(), figures, tmp_path_factory.mktemp("report") / "deep")


def test_nothing_is_fetched_or_executed_and_no_address_is_in_the_file(page):
    page.assert_safe()
    assert all(value.startswith("#") for value in page.values("href"))
    assert "://" not in page.raw


def test_every_image_is_the_figure_with_its_size(page, figures, tmp_path):
    sources = page.values("src")
    assert sorted(base64.b64decode(source.split(",", 1)[1]) for source in sources) == sorted(
        path.read_bytes() for path in figures.values()
    )
    for number, source in enumerate(sources):
        (tmp_path / f"{number}.png").write_bytes(base64.b64decode(source.split(",", 1)[1]))
        assert imread(tmp_path / f"{number}.png").shape[1] == pytest.approx(
            1.5 * int(page.values("width")[number]), abs=1
        )
    assert all(page.values("alt"))


def test_verdict_and_its_reasons_come_first_and_every_metric_is_shown_with_value_interval_and_definition(page):
    results = sample.results()
    for told in (results["verdict"]["headline"], *results["verdict"]["reasons"]):
        assert page.text.index(told) < page.text.index("What was found")
    [block] = [one.block for one in sections(results) if one.anchor == "metrics"]
    rows = block.tables[0].rows
    assert len(rows) == len(sample.metrics())
    for name, *cells in rows:
        assert " ".join(f"{name.text}{name.definition} {' '.join(cells)}".split()) in page.text
        assert name.definition


def test_every_gate_check_and_the_rest_of_the_record_are_shown(page):
    results = sample.results()
    assert page.text.count("✓ pass") == sum(check["passed"] for check in [*results["gate"], *results["label_gate"]])
    is_missing = [check["value"] is None for check in results["gate"] if not check["passed"]]
    assert (page.text.count("✗ fail"), page.text.count("? missing")) == (is_missing.count(False), sum(is_missing))
    expected = [check["text"] for check in results["gate"]] + [READINESS_WEAKNESS, *WORDS, *WORDS.values()]
    expected += [text for found in results["diagnoses"] for text in found.values()]
    expected += [stage[part] for stage in results["stages"] for part in ("name", "key", "path")]
    expected += [*results["environment"].values(), *results["readiness"]["recommendations"]]
    expected += results["audit"]["warnings"] + ["empty chosen", "share of completions", "21 November 2026, 01:30 UTC"]
    expected += ["completions cut", "step 400"]
    for text in expected:
        assert " ".join(text.split()) in page.text


def test_configuration_reads_back(parse, page):
    listing = parse(page.raw.rsplit("<pre>", 1)[1].split("</pre>", 1)[0])
    assert yaml.safe_load("".join(listing.pieces)) == sample.results()["config"]


def test_all_mistakes_are_shown_folded_and_shortened(page):
    mistakes = sample.results()["mistakes"]
    assert all(mistake["pair_id"] in page.text for mistake in mistakes)
    assert not [name for tag, name, _ in page.attributes if tag == "details" and name == "open"]
    assert mistakes[0]["rejected"] not in page.text
    assert len(page.text) < 60 * (3 * LONGEST_TEXT)


def test_what_the_verdict_rests_on_is_open_and_the_rest_is_folded():
    results = sample.results()
    for rung, name in ((1, "context"), (2, "logged"), (3, "policy"), (4, "rlhf")):
        found = {
            one.anchor: one.block.is_folded
            for one in sections(results | {"verdict": results["verdict"] | {"rung": rung}})
        }
        assert [one for one in ("context", "logged", "policy", "rlhf") if not found[one]] == [name]
        assert not found["gate"]
        assert not found["training"]  # it has a diagnosis
        assert found["metrics"]
        assert found["calibration"]


@pytest.mark.slow
@settings(max_examples=4)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60))
def test_any_text_stays_text(render, page, tmp_path_factory, text):
    hostile = f"<script>alert(1)</script><img src=x onerror=y>\" ' {{{{ 7*7 }}}} &lt; {text} </main>"
    results = sample.results()
    results["mistakes"] = [
        {"pair_id": hostile, "prompt": hostile, "chosen": hostile, "rejected": hostile, "margin": -1.0}
    ]
    for name in ("study", "run_name"):
        results[name] = hostile
    results["verdict"] |= {"evidence": hostile, "headline": hostile, "reasons": [hostile, hostile]}
    results["next_rung"] |= {"evidence": hostile, "command": hostile, "cost": hostile}
    results["metrics"][f"pairwise_accuracy[{hostile}]"] = sample.metric(0.5, 0.1)
    results["audit"] = {
        hostile: hostile,
        "warnings": [hostile * 3],
        "splits": {hostile: {"a": 1, "deep": {"b": {"c": 2}}}},
    }
    results["config"] = {"study": hostile}
    results["environment"] = {hostile: hostile}
    found = render(results, {}, tmp_path_factory.mktemp("hostile"))
    assert set(found.tags) <= set(page.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert found.text.count(" ".join(hostile.split())) >= 8


WORDS = NUMBER_WORDS | RUN_WORDS
SECTIONS = {"observations": "judgements"} | {name: name for name in ("logged", "policy", *CAPABILITIES, "rlhf")}
"""Of a report, by the part of the record that each shows."""


def test_a_part_that_was_not_measured_has_no_section():
    every = sections(sample.results())
    for part, anchor in SECTIONS.items():
        without = sections(sample.results() | {part: None})
        assert [section.anchor for section in every if section.anchor != anchor] == [one.anchor for one in without]


def test_missing_parts_are_said_not_hidden(render, tmp_path):
    results = sample.results()
    results.update(ood_metrics=None, diagnoses=[], mistakes=[], gate=[], metrics={}, audit={}, context=[], stages=[])
    results["training"].update(best_metric=None, best_value=None)
    results["readiness"]["landscape_score"] = None
    page = render(results, {}, tmp_path)
    assert page.text.count("was not drawn in this run") == len(CAPTIONS)
    for text in (
        "none was chosen by validation pairs: the last step was kept",
        "No check was made",
        "not measured",
        "No held-out pair is ranked",
        "sum of the other three parts over the sum of their weights",
    ):
        assert text in page.text
    assert "out of distribution 95 % interval" not in page.text
    assert "None" not in page.text
    assert "nan" not in page.text.lower().split()


@pytest.mark.slow
def test_a_figure_that_is_no_png_is_refused(tmp_path):
    broken = tmp_path / "broken.png"
    with pytest.raises(DataError, match="cannot be read"):
        write_report(sample.results(), {"reward_by_length": broken}, tmp_path / "r.html")
    broken.write_bytes(b"<svg/>")
    with pytest.raises(DataError, match="not a PNG"):
        write_report(sample.results(), {"reward_by_length": broken}, tmp_path / "r.html")


@given(st.text(max_size=300), st.integers(40, 150))
@example("0123456789" * 20, 60)  # random texts are rarely this long
@example("0123456789" * 20, 61)
def test_shortened_texts_keep_both_ends(text, longest):
    short = shorten(text, longest)
    if len(text) <= longest:
        assert short == text
    else:
        assert len(short) < longest + 40
        assert short.startswith(text[: longest // 2])
        assert short.endswith(text[-(longest // 2) :])
        assert (
            short[longest // 2 : len(short) - (longest - longest // 2)] == f" […{len(text) - longest:,} characters…] "
        )
