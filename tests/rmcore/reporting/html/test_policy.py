"""The policy's section of a report: there where a policy was measured, with every number and its interval."""

import pytest

import report_sample as sample
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.policy import best_of_n_block, confirmation_block, readiness_block

policy_sample = sample.policy_sample


@pytest.fixture
def page(report_with):
    return lambda results: report_with(**results)


@pytest.mark.slow
def test_the_section_shows_parts_choices_and_findings(page):
    results = policy_sample.judged(sample.results())
    text = page(results).section("policy")
    parts = results["policy"]["readiness"]["readiness"]["parts"]
    assert f"{parts['on_policy_accuracy']['value']:.3f}" in text
    assert f"{parts['on_policy_accuracy']['ci_low']:.3f} to {parts['on_policy_accuracy']['ci_high']:.3f}" in text
    for said in (
        "510 samples of 30 prompts by generate",
        "97.5% ended",
        "2 are empty",
        "5 exceeded",
        "60 independent prompts",
        "Sort <these>",
        "-2.50",
        "the worst one",
    ):
        assert said in text
    assert "the <gold> world" in text  # as text, not as an element
    assert "1.500 nats by best-of-n" in text


@pytest.mark.slow
def test_the_verdict_names_its_rung_and_follows_from_its_checks(page):
    good, bad = (policy_sample.judged(sample.results(), quality) for quality in (3.0, -1.0))
    assert "evidence level 3 of 4: samples of the policy, judged by the <gold> world" in page(good).text
    assert good["verdict"]["status"] == "ready"
    assert bad["verdict"]["status"] == "not_ready"
    assert "checks on samples of the policy failed" in page(bad).text


def test_the_markdown_has_the_same_numbers():
    found = policy_sample.policy()
    told = markdown(best_of_n_block(found))
    assert "| 16 |" in told
    assert "best-of-n: " in told
    assert "510 samples" in told
    judged = markdown(readiness_block(found["readiness"]))
    assert judged.count("pass: ") + judged.count("FAIL: ") == len(found["readiness"]["gate"])


def test_what_was_served_is_told_with_its_labels_and_its_first_prompts():
    found = policy_sample.served()
    told = markdown(confirmation_block(found))
    gain = found["gold"]["gain"]
    assert told.startswith(f"# {found['verdict']['headline']}".replace("_", r"\_"))
    assert f"{gain['value']:.3f} ({gain['ci_low']:.3f} to {gain['ci_high']:.3f})" in told
    assert "304 (128 of 400 prompts; " in told
    assert r"| Sort \| these numbers. | 1, 2 \<b\> | (an empty answer) | +0.31 |" in told
