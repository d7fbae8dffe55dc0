"""The section about probes: every rule with its interval, violated ones as failed, and nothing where none was made."""

import pytest

import probe_sample
from rmcore.reporting.figures import numbers


@pytest.fixture
def page(report_with):
    return lambda record: report_with(probe=record)


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
