"""The section about probes: every rule with its interval, violated ones as failed, and nothing where none was made."""

import pytest

import probe_sample
import report_sample as sample
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.html import write_report
from rmcore.reporting.html.probe import probe_section


@pytest.fixture
def page(parse, tmp_path):
    def render(record):
        out = write_report(sample.results() | {"probe": record}, {}, tmp_path / "report.html")
        return parse(out.read_text(encoding="utf-8"))

    return render


def test_violated_rules_fail_with_their_numbers_and_their_worst_example(page):
    record = probe_sample.record()
    html = page(record)
    text = html.section("probe")
    assert record["violated"] == ["shorter", "louder", "hidden_fault"]
    assert "✗ 3 of 5 rules are shown to be violated, on 120 held-out pairs of 60 prompts" in text
    for one in record["findings"]:
        assert f"Edit {one['rule']}." in text
        assert numbers.with_interval(one["shift"]).replace("\xa0", " ") in text
        decided = one["changed"] or one["violations"]
        assert numbers.with_interval(decided, "share").replace("\xa0", " ") in text
    assert "not applied" in text
    examples = text.partition("Worst examples")[2]
    for one in record["findings"]:
        assert (f"edited by <{one['rule']}>" in examples) == (one["verdict"] == "violated")
    assert "No verdict follows" in text


def test_a_model_without_a_violated_rule_passes(page):
    text = page(probe_sample.record(is_good=True)).section("probe")
    assert "✓ None of 4 rules is shown to be violated" in text
    assert "Worst examples" not in text


def test_without_probes_there_is_no_section(page):
    html = page(None)
    assert 'id="probe"' not in html.raw
    assert 'href="#probe"' not in html.raw
    assert probe_section(None) is None
