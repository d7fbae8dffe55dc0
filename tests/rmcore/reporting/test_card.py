"""What each kind of result tells a card, what a model must not be used for, and texts of others, shown as they are."""

import html
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import report_sample
from rmcore.core.errors import DataError
from rmcore.reporting.card import (
    KINDS,
    Evidence,
    Judgement,
    Markdown,
    highest,
    limits,
    public_name,
    read_evidence,
    shown,
)
from rmcore.reporting.html.blocks import Block, Table, markdown

READY = Judgement(3, "ready", "Ready", "samples", kl=3.0, method="best-of-n", policy="some/policy", source="a run")


@pytest.mark.slow
def test_a_run_tells_metrics_and_verdict():
    results = report_sample.results()
    evidence = read_evidence(results, "run demo")
    judgement = highest(evidence)
    assert (judgement.headline, judgement.rung) == (results["verdict"]["headline"], results["verdict"]["rung"])
    assert evidence[0].results[0].metric_value == round(results["metrics"]["pairwise_accuracy"]["value"], 4)
    sections = [section for part in evidence for section in part.sections]
    (checks,) = [section for section in sections if section.title.startswith("Checks of evidence level")]
    assert len(checks.tables[0].rows) == len(results["gate"])


def verdict(rung, status="passes", **more):
    judged = {"rung": rung, "status": status, "headline": f"rung {rung}", "evidence": "e", "reasons": []}
    return {"verdict": judged, "gate": [], "next_rung": None, **more}


def test_the_highest_rung_counts_and_of_two_there_the_last():
    records = [
        verdict(1, "fails"),
        verdict(3, "ready", readiness={"plan": {"kl": 3, "optimizer": "best_of_n"}}),
        verdict(3, "not_ready", readiness={"plan": {"kl": 5, "optimizer": "kl_optimum"}}),
        verdict(2),
    ]
    judgement = highest([part for record in records for part in read_evidence(record, "f.json")])
    assert (judgement.rung, judgement.status, judgement.kl) == (3, "not_ready", 5.0)
    assert judgement.method == "RL with a KL penalty"
    assert highest([]) is None
    (served,) = read_evidence(verdict(4, "gained", n=64, kl=3.17), "confirm.json")
    assert (served.judgement.kl, served.judgement.method) == (3.17, "best-of-64")


@pytest.mark.parametrize(
    "broken", [{"other": 1}, {"metrics": {}}, {"suites": {"a": {}}}, {"verdict": {}}, {"suites": {"a": 3}}]
)
def test_a_file_of_no_kind_or_of_another_form_is_refused(broken):
    says = r"x\.json holds none of " + ", ".join(KINDS) if "other" in broken else "not as the command wrote it"
    with pytest.raises(DataError, match=says):
        read_evidence(broken, "x.json")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/home/alice/secret-project/pairs.jsonl", "pairs.jsonl"),
        ("https://host/pairs.jsonl?X-Amz-Signature=abc", "pairs.jsonl"),
        ("stanfordnlp/SHP", "stanfordnlp/SHP"),
        ("pairs/", "pairs"),
        (None, "pairs that are not named"),
    ],
)
def test_strangers_read_names_and_no_places(source, name):
    assert public_name(source) == name


def uses(judgement, truncation=None, **measured):
    return limits(judgement, [Evidence(**measured), Evidence()], truncation or {}, 128, synthetic=False)


@pytest.mark.parametrize(
    ("judgement", "said"),
    [
        (READY, "further than 3 nats of KL**, by another method than best-of-n, or from another policy than some/pol"),
        (None, "Nobody judged"),
        *((replace(READY, rung=rung), f"level {rung} of 4") for rung in (1, 2)),
        *((replace(READY, rung=1, status=status), "level 1 of 4") for status in ("passes", "fails", "unclear")),
        *((replace(READY, rung=4, status=status), "not shown to be worth it") for status in ("lost", "unclear")),
        (replace(READY, status="not_ready"), "not shown to be worth it"),
    ],
)
def test_only_a_ready_model_is_for_optimisation_and_for_its_plan_alone(judgement, said):
    optimising = uses(judgement)[0]
    assert said in optimising
    assert ("further than" in optimising) == (judgement is READY)


def test_what_failed_checks_or_is_not_shown_to_beat_length_is_not_for_ranking():
    def ranking(judgement, **measured):
        return [use for use in uses(judgement, **measured) if "Ranking answers" in use]

    assert ranking(replace(READY, rung=1, status="fails"))
    assert not ranking(replace(READY, rung=1, status="passes"))
    for low, forbids in ((-0.107, True), (0.0, True), (None, True), (0.01, False)):
        found = ranking(None, over_baseline={"value": 0.06, "ci_low": low, "ci_high": 0.2, "num": 300})
        assert bool(found) == forbids
        assert not found or "on 300 pairs" in found[0]


def test_accuracy_on_other_pairs_and_cut_texts_are_told_with_their_numbers():
    measured = {"value": 0.61, "ci_low": 0.58, "ci_high": 0.65, "num": 720}
    told = "\n".join(uses(READY, {"num_pairs": 960, "num_cut_sides": 1214}, out_of_distribution=measured))
    assert "61.0 % (58.0 to 65.0 %) of 720 pairs" in told.replace("\u00a0", " ")
    assert "1,214 of the 1,920 texts that it was trained on were longer" in told
    assert "was not measured" in "\n".join(uses(READY))


RENDER = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])
HOSTILE = st.text(alphabet="ab <>&\"'`*_[](){}#|~@$!\\-+=:/.\n\t1)\u202e\u0000é", max_size=40)


def visible(text):
    line = " ".join(text.split())
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in line)


@given(HOSTILE)
@example("<script>alert(1)</script>")
@example("![x](http://a.b/c) $$x$$ | --- |")
@example("1. a")
@example("2)")
@example("---")
def test_a_text_is_shown_as_it_is_and_begins_nothing_and_ends_no_cell(text):
    page = RENDER.render(f"x {shown(text)} y")
    assert page.count("<") == 2  # the paragraph's own
    assert html.unescape(page) == f"<p>x {visible(text)} y</p>\n"
    assert not visible(text) or RENDER.render(str(shown(text))).startswith("<p>")
    block = Block("title", tables=(Table(("a", "b"), [(text, "end")], left=range(2)),))
    page = RENDER.render(markdown(block, escape=shown))
    assert page.count("<td>") == 2
    assert "<td>end</td>" in page


def test_markdown_that_was_written_here_stays():
    assert shown(Markdown("**yes**")) == "**yes**"
    assert shown("**yes**") != "**yes**"
