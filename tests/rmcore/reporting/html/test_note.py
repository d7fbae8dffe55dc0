"""A verdict as MLflow's description: what is said, in the order of its weight, and no text that becomes markup."""

import re

import pytest

import report_sample as sample
from rmcore.reporting.html.note import RUN_FILES, in_run, numbers_line, plain, verdict_note

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


def test_numbers_are_said_in_a_line():
    assert plain(numbers_line({"pairwise_accuracy": sample.metric(0.75, 0.125)})) == (
        "pairwise accuracy 75.0 % (62.5 to 87.5 %)"
    )
