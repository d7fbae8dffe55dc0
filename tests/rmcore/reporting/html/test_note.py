"""A verdict as MLflow's description: what is said, in the order of its weight, and no text that becomes markup."""

import re

import pytest

import report_sample as sample
from rmcore.reporting.html.note import (
    RUN_FILES,
    in_run,
    number_rows,
    numbers_line,
    plain,
    summary_curves,
    summary_numbers,
    verdict_note,
)

NASTY = (
    "<img src=x onerror=1> <b>b</b> [x](http://evil.example) ![i](y) `code` **bold** __u__ @mention :smile: a|b ~~s~~ "
    "https://evil.example www.evil.example me@evil.example &lt; # head \\<i>"
)


def test_the_verdict_comes_first_then_links_reasons_and_what_would_raise_it():
    verdict = {
        "rung": 1,
        "evidence": "labelled pairs",
        "status": "fails",
        "headline": "1 of 7 checks on labelled pairs failed",
        "reasons": ["ECE: 0.400", "accuracy too low"],
    }
    more = {"rung": 3, "evidence": "samples, judged", "command": "rm-opt readiness policy --x 'a_b'", "cost": "hours"}
    note = verdict_note(verdict, more, {"Report": f"{RUN_FILES}report/r.html"}, ["/place/r.html"])
    assert in_run(note, "#/here").splitlines() == [
        "### ✗ 1 of 7 checks on labelled pairs failed",
        "",
        "**Evidence level 1 of 4**: labelled pairs  ",
        "",
        "[Report](#/here/report/r.html) · /place/r.html",
        "",
        "**What speaks against it**",
        "",
        "- ECE: 0.400",
        "- accuracy too low",
        "",
        "**Next step**: samples, judged",
        "",
        "    rm-opt readiness policy --x 'a_b'",
        "",
        "It costs hours.",
    ]
    assert verdict_note(verdict, more, {}, (), "accuracy 70 % (60 %_80 %)").splitlines()[3] == (
        "accuracy 70 % (60 %&#95;80 %)"
    )
    least = verdict_note({**verdict, "reasons": []}, None, {})
    assert least.count("\n\n") == 1


@pytest.mark.parametrize("start", ["", "- ", "1. ", "+ ", "= ", "# ", "    ", "> "])
def test_no_text_becomes_markup(start):
    shown = plain(f"{start}{NASTY}\n\n# heading\n- item")
    assert "\n" not in shown
    assert not set(re.sub(r"&#\d+;", "", shown)) & set("<>&`*_[]{}\\#|~@")
    assert "://" not in shown
    assert "www." not in shown
    assert not re.match(r"\s|[-+=]|\d+[.)]\s", shown)
    assert not re.search(r":\w+:", shown)


def test_neither_addresses_nor_texts_reach_another_place():
    verdict = sample.results()["verdict"] | {"headline": f"x]({RUN_FILES}y", "reasons": [f"[a]({RUN_FILES}b)"]}
    more = {"rung": 4, "evidence": NASTY, "command": "rm-opt\n\n# heading", "cost": NASTY}
    note = verdict_note(verdict, more, {"a]b": "https://here.example/a b)(<c>"}, [NASTY])
    assert in_run(note, "#/here") == note
    assert "[a&#93;b](https://here.example/a%20b%29%28%3Cc%3E)" in note
    assert [line for line in note.splitlines() if line.startswith("#")] == note.splitlines()[:1]
    assert "\n    rm-opt  # heading\n" in note


def test_the_first_numbers_are_the_eight_that_matter_two_of_them_by_step():
    results = sample.results()
    results["metrics"] = {
        "pairwise_accuracy": sample.metric(0.7, 0.125),
        "accuracy_over_baseline": sample.metric(0.25, 0.125),
        "ece_debiased": sample.metric(0.03, 0.01),
    }
    found = summary_numbers(results)
    assert {name.partition("/")[0] for name in found} == {"at_a_glance"}
    found = {name.partition("/")[2]: value for name, value in found.items()}
    assert list(found) == [
        *("accuracy", "accuracy_ci_low", "accuracy_ci_high"),
        *("accuracy_over_baseline", "accuracy_over_baseline_ci_low", "ece_debiased"),
    ]
    assert (found["accuracy_ci_low"], found["accuracy_over_baseline_ci_low"], found["ece_debiased"]) == (
        0.575,
        0.125,
        0.03,
    )
    results["metrics"] = {}
    assert summary_numbers(results) == {}
    history = [
        {"step": 0, "metrics": {"eval/pairwise_accuracy": 0.5, "eval/loss": 0.69, "eval/ece": 0.1}},
        {"step": 1, "metrics": {"train/loss": 0.7}},
        {"step": 2, "metrics": {"eval/pairwise_accuracy": None, "eval/loss": 0.6}},
    ]
    assert summary_curves(history) == {
        0: {"at_a_glance/validation_accuracy": 0.5, "at_a_glance/validation_loss": 0.69},
        2: {"at_a_glance/validation_loss": 0.6},
    }


def test_numbers_are_said_in_a_line_and_kept_in_a_table():
    results = sample.results()
    results["metrics"] = {"pairwise_accuracy": sample.metric(0.75, 0.125)}
    results["ood_metrics"] = {"loss": sample.metric(None, reason="not measured")}
    assert plain(numbers_line(results["metrics"])) == "pairwise accuracy 75.0 % (62.5 to 87.5 %)"
    assert number_rows(results) == [
        {"split": "test", "metric": "pairwise_accuracy", "value": 0.75, "ci_low": 0.625, "ci_high": 0.875, "num": 1200},
        {"split": "out of distribution", "metric": "loss", "value": None, "ci_low": None, "ci_high": None, "num": 1200},
    ]
    results["ood_metrics"] = None
    assert len(number_rows(results)) == 1
