"""Sections of a report: each shows every number of its record in the page and in Markdown, and claims nothing more."""

import re

import pytest

import judgement_sample
import logged_sample
import report_sample as sample
from capability_samples import RECORDS as CAPABILITIES
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.logged import logged_finding
from rmcore.reporting.html.policy import best_of_n_block, confirmation_block, readiness_block
from rmcore.reporting.html.report import sections, summary_markdown
from rmcore.reporting.html.rlhf import DIGITS

pytestmark = pytest.mark.slow

policy_sample, make = sample.policy_sample, sample.rlhf_sample.record
KINDS = {
    "whole": {},
    "nobody judged": {"judged": False},
    "one seed": {"num_seeds": 1},
    "one point": {"num_points": 1},
    "watched, one seed": {"watched": True, "num_seeds": 1},
    "watched, back to the start": {"watched": False},
    "two rewards": {"rewards": 2},
    "two rewards, one point": {"rewards": 2, "num_points": 1},
}
RECORDS = {
    **{f"rlhf, {kind}": ("rlhf", lambda kind=kind: {"rlhf": make(**KINDS[kind])}) for kind in KINDS},
    "judgements": ("judgements", lambda: {"observations": judgement_sample.record()}),
    "logged": ("logged", lambda: {"logged": logged_sample.record(length=1.0)}),
    "policy": ("policy", lambda: policy_sample.judged(sample.results())),
    **{name: (name, lambda name=name: {name: CAPABILITIES[name]()}) for name in CAPABILITIES},
}  # fmt: skip


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", RECORDS)
def test_all_of_a_section_and_every_number_of_its_record_is_in_the_page_and_in_markdown(report_with, name):
    """In whole rows, with no word of the program, nor an element that a text would be."""
    anchor, make_record = RECORDS[name]
    record = make_record()
    text = report_with(**record).section(anchor)
    for number in numbers_of(anchor, next(iter(record.values()))):
        assert flat(number) in text
    [block] = [section.block for section in sections(sample.results() | record) if section.anchor == anchor]
    for part in (block, *block.parts):
        for table in part.tables:
            assert {len(row) for row in table.rows} <= {len(table.headings)}
            assert all(flat(str(cell)) in text for row in table.rows for cell in row if isinstance(cell, str))
        assert all(flat(line) in text for line in (*part.text, *part.findings))
    told = markdown(block)
    for shown in (text, told):
        assert not re.search(r"\b(None|nan|inf|NaN)\b", shown)
    assert "<gold>" not in told.replace(r"\<gold\>", "")


def numbers_of(anchor, record):
    """What a section has to show of its record, as it is written there."""
    if anchor == "rlhf":
        yield record["verdict"]["headline"]
        for value, digits in ((point[name], digits) for point in record["curve"] for name, digits in DIGITS):
            if value is not None:
                yield value["reason"] if value["value"] is None else f"{value['value']:.{digits}f}"
    elif anchor == "judgements":
        yield from map(numbers.with_interval, record["metrics"].values())
        yield from (numbers.with_interval(part["alone"], "share") for part in record["parts"].values())
    elif anchor == "logged":
        for row in record["choices"]:
            yield from (numbers.with_interval(row[name], "share") for name in ("win_rate", "longest_win_rate"))
            yield from (numbers.with_interval(row["gain"]), numbers.percent(row["perfect_win_rate"]))
        yield logged_finding(record)


@pytest.mark.parametrize(
    ("ends", "said"),
    [((0.01, 0.05), "more than the longest"), ((-0.05, -0.01), "yet less than"), ((-0.01, 0.05), "cannot be told")],
)
def test_the_finding_compares_the_model_with_the_longest_answer(ends, said):
    record = logged_sample.record(2.0)
    best = next(row for row in record["choices"] if row["k"] == record["best_k"])
    best["over_longest"] |= {"ci_low": ends[0], "ci_high": ends[1]}
    assert said in logged_finding(record)
    assert f"Up to k = {record['best_k']} the model picks better answers among logged ones" in logged_finding(record)
    assert logged_finding(logged_sample.record(0.0)).startswith("It is not certain")
    assert logged_finding(logged_sample.record(-2.0)).startswith("The model picks the worse answers")
    told = summary_markdown(sample.results() | {"logged": record})
    assert numbers.with_interval(record["choices"][0]["win_rate"], "share") in told
    assert "logged answers" not in summary_markdown(sample.results() | {"logged": None})


def test_the_verdict_on_a_policy_names_its_rung_and_follows_from_its_checks(report_with):
    good, bad = (policy_sample.judged(sample.results(), quality) for quality in (3.0, -1.0))
    assert "evidence level 3 of 4: samples of the policy, judged by the <gold> world" in report_with(**good).text
    assert (good["verdict"]["status"], bad["verdict"]["status"]) == ("ready", "not_ready")
    assert "checks on samples of the policy failed" in report_with(**bad).text
    found = policy_sample.policy()
    assert "| 16 |" in markdown(best_of_n_block(found))
    judged = markdown(readiness_block(found["readiness"]))
    assert judged.count("pass: ") + judged.count("FAIL: ") == len(found["readiness"]["gate"])
    served = policy_sample.served()
    told, gain = markdown(confirmation_block(served)), served["gold"]["gain"]
    assert told.startswith(f"# {served['verdict']['headline']}".replace("_", r"\_"))
    assert f"{gain['value']:.3f} ({gain['ci_low']:.3f} to {gain['ci_high']:.3f})" in told
    assert r"| Sort \| these numbers. | 1, 2 \<b\> | (an empty answer) | +0.31 |" in told


def test_looks_are_shown_where_somebody_watched_alone(report_with):
    heading = "few labels said on the way"
    assert heading not in report_with(rlhf=make()).section("rlhf")
    text = report_with(rlhf=make(watched=False)).section("rlhf")
    assert heading in text
    assert "the start is kept" in text
