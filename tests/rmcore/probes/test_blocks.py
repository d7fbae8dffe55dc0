"""What reports and cards show of probes."""

import pytest

import report_sample
from capability_samples import sample_of
from rmcore.reporting.card import read_evidence
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.report import sections

sample = sample_of("probes")


@pytest.mark.slow
def test_violated_rules_fail_with_their_worst_example_and_a_model_without_one_passes(report_with):
    record = sample.record()
    text = report_with(probe=record).section("probe")
    assert record["violated"] == ["shorter", "louder", "hidden_fault"]
    assert "✗ 3 of 5 rules are shown to be violated, on 120 held-out pairs of 60 prompts" in text
    examples = text.partition("Worst examples")[2]
    for one in record["findings"]:
        assert (f"edited by <{one['rule']}>" in examples) == (one["verdict"] == "violated")
        share = [numbers.with_interval(one["violations"], "share")] if one["violations"] else []
        assert all(" ".join(shown.split()) in text for shown in (*share, numbers.with_interval(one["shift"])))
        assert f"Edit {one['rule']}." in text
    good = sample.record(is_good=True)
    text = report_with(probe=good).section("probe")
    assert "✓ None of 4 rules is shown to be violated" in text
    assert "Worst examples" not in text
    for found in (record, good):  # the section is open where rules are violated
        shown = sections(report_sample.results() | {"probe": found})
        assert [one.block.is_folded for one in shown if one.anchor == "probe"] == [found is good]


def test_probes_tell_a_card_which_edits_pay():
    record = sample.record()
    (found,) = read_evidence(record, "probe.json")
    (section,) = found.sections
    told = "\n".join(markdown(one, 2, is_whole=True) for one in found.sections)
    assert told.count("✗ violated |") == len(record["violated"]) > 0
    assert "60 prompts" in section.text[0]
    assert not section.tables  # which have texts of the data
    told = read_evidence(report_sample.results(), "run demo")
    assert any(one.title == section.title for part in told for one in part.sections)


@pytest.mark.slow
def test_each_sentence_of_the_worst_mistakes_is_shown_with_what_it_adds(report_with):
    text = report_with().text
    for part in (part for parts in sample.EFFECTS.values() for part in parts):
        effect = "not read" if part["effect"] is None else numbers.decimal(part["effect"])
        assert f"{part['text']} {effect}" in text
