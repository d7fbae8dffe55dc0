"""Blocks as a page, as Markdown and as a note: markup stays text, and every leaf of a record is found."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import report_sample as sample
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import new_figure, save
from rmcore.reporting.html.blocks import Block, Named, Table, capabilities_shown, escape, markdown
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.logged import HEADINGS, TITLE
from rmcore.reporting.html.note import RUN_FILES, in_run, plain, verdict_note
from rmcore.reporting.html.page import write_block_report
from rmcore.reporting.html.report import summary_markdown
from rmcore.reporting.html.tree import record_blocks

NASTY = "<script>alert(1)</script> [x](javascript:alert) | ![y](http://evil.example/z)"


def test_a_table_becomes_one_and_markup_of_names_stays_text(tmp_path):
    part = Block(NASTY, tables=(Table(("name", "value"), [(Named(NASTY, NASTY), "1.5")]),), code=f"a: 1 # {NASTY}")
    block = Block(NASTY, text=(NASTY,), findings=(NASTY,), parts=(part,))
    page = write_block_report("a <b> run", block, {}, tmp_path / "new" / "report.html").read_text()
    assert '<td class=" number">1.5</td>' in page
    assert "a &lt;b&gt; run" in page
    assert "<script" not in page
    assert 'href="javascript' not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 7


def test_figures_stand_in_their_place_once_and_those_not_drawn_are_not_named(tmp_path):
    figures = {name: save(new_figure(1.0, 0.5), tmp_path / f"{name}.png") for name in ("named", "more")}
    block = Block("title", parts=(Block("part", figures=("named", "absent")), Block("last")))
    page = write_block_report("run", block, figures, tmp_path / "report.html").read_text()
    assert page.count("<img") == 2
    assert page.index("<img") < page.index("last") < page.rindex("<img")
    assert "not drawn" not in page


def test_a_long_list_is_cut_and_says_so():
    (cut,) = record_blocks({"rows": [{"a": index} for index in range(1200)]}, "t")
    assert (cut.title, len(cut.tables[0].rows)) == ("rows (the first 50 of 1,200)", 50)


TEXT = st.text(alphabet="ab <>&\"'`*_[](){}#|~!\\-+=.1)", min_size=1, max_size=20).map(lambda text: f"x{text}x")
FEW = st.lists(TEXT, max_size=2)


@given(TEXT, FEW, FEW, st.lists(st.tuples(TEXT, TEXT), max_size=3), TEXT)
def test_markdown_shows_every_text_as_it_is_and_keeps_its_columns(title, text, findings, rows, code):
    part = Block("part", tables=(Table(("a",), [("b",)]),), code=f"y: 1\n{code}\n```")
    block = Block(title, text=text, tables=(Table(("one", "two"), rows),), findings=findings, parts=(part,))
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown(block))
    assert html.count("<td") == 2 * len(rows) + 1
    assert html.count("<h1>") == html.count("<h2>") == html.count("<code>") == 1
    assert html.count("<li>") == len(findings)
    assert not any(tag in html for tag in ("<em>", "<strong>", "<a ", "<img", "<script"))


def test_only_results_have_the_colour_of_their_sign_and_a_long_text_is_no_number(tmp_path):
    rows = [("✗ a  prompt", "y" * 80)]
    tables = (Table(("prompt", "answer"), rows), Table(("result", "check"), [("✗ fail", "1")]))
    page = write_block_report("run", Block("title", tables=tables), {}, tmp_path / "report.html").read_text()
    assert page.count('class="fail') == 1
    assert '<td data-heading="check" class=" number">1</td>' in page  # its heading is before it on a phone
    assert f'<td class="">{"y" * 80}</td>' in page
    assert "✗ a  prompt" in page


KEYS = st.text("abcdefghij_", min_size=1, max_size=8)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), st.text("xyz ", max_size=90)
)
RECORDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=30,
)


def string_leaves(value) -> list[str]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in string_leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in string_leaves(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.slow
@settings(max_examples=50)
@given(st.dictionaries(KEYS, RECORDS, max_size=5))
def test_every_text_leaf_is_shown_and_tables_are_rectangular(record):
    found = record_blocks(record, "all")
    tables = [table for block in found for table in block.tables]
    cells = [cell for one in tables for row in one.rows for cell in row] + [s for b in found for s in b.findings]
    everything = "\n".join(cells)
    for leaf in string_leaves(record):
        assert leaf in everything
    for one in tables:
        assert {len(row) for row in one.rows} == {len(one.headings)}
        assert all(isinstance(cell, str) for row in one.rows for cell in row)


def test_splits_stand_side_by_side_and_distributions_are_folded():
    split = {"num_pairs": 3, "longer_wins": {"accuracy": 0.75}, "characters": {"prompt": {"p5": 1.0, "max": 9.0}}}
    found = record_blocks({"num_rows": 9, "splits": {"train": split, "test": split | {"num_pairs": 1200}}}, "overview")
    assert found[0].tables[0].rows == [["rows", "9"]]
    [table] = found[1].tables
    assert table.headings == ["", "train", "test"]
    assert ["pairs", "3", "1,200"] in table.rows
    assert ["longer wins: accuracy", numbers.percent(0.75), numbers.percent(0.75)] in table.rows
    assert [block.is_folded for block in found] == [False, False, True, True]
    assert found[2].tables[0].headings == ["", "p5", "max"]


NOTE_NASTY = (
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
    shown = plain(f"{start}{NOTE_NASTY}\n\n# heading\n- item")
    assert "\n" not in shown
    assert not set(re.sub(r"&#\d+;", "", shown)) & set("<>&`*_[]{}\\#|~@")
    assert "://" not in shown
    assert "www." not in shown
    assert not re.match(r"\s|[-+=]|\d+[.)]\s", shown)
    assert not re.search(r":\w+:", shown)


def test_neither_addresses_nor_texts_reach_another_place():
    verdict = sample.results()["verdict"] | {"headline": f"x]({RUN_FILES}y", "reasons": [f"[a]({RUN_FILES}b)"]}
    more = {"rung": 4, "evidence": NOTE_NASTY, "command": "rm-opt\n\n# heading", "cost": NOTE_NASTY}
    note = verdict_note(verdict, more, {"a]b": "https://here.example/a b)(<c>"}, [NOTE_NASTY])
    assert in_run(note, "#/here") == note
    assert "[a&#93;b](https://here.example/a%20b%29%28%3Cc%3E)" in note
    assert [line for line in note.splitlines() if line.startswith("#")] == note.splitlines()[:1]
    assert "\n    rm-opt  # heading\n" in note


def test_the_summary_has_verdict_numbers_reasons_and_paths_in_whole_rows_whatever_the_texts_hold():
    results = sample.results()
    results["stages"][0] |= {"name": "a|b\n`c`", "path": "/x|y`z"}
    results["run_name"] = "<b>[x](y)\n# not a heading"
    text = summary_markdown(results)
    assert text.startswith(f"# {results['verdict']['headline']}")
    assert numbers.interval(results["metrics"]["pairwise_accuracy"], "share") in text
    assert all(escape(stage["path"]) in text for stage in results["stages"])
    assert all(f"- {reason}" in text for reason in results["verdict"]["reasons"])
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    blocks = [shown.block(results[shown.stage]) for shown in capabilities_shown() if shown.in_summary]
    columns = {1 + len(table.headings) for block in blocks for table in block.tables if not table.title}
    assert {line.count("|") for line in tables} == {4, 1 + len(HEADINGS), *columns}
    headings = ["What speaks against it", "Next step", *(block.title for block in blocks), TITLE, "Artifacts"]
    assert [line for line in text.splitlines() if line.startswith("#")][1:] == [f"## {title}" for title in headings]
    assert "<b>" not in text.replace("\\<b\\>", "")


def test_cards_say_what_is_missing():
    results = sample.results() | {"policy": None}
    results["metrics"] = {"pairwise_accuracy": sample.metric(0.7, None, reason="only one prompt")}
    cards = headline_cards(results)
    assert len(cards) == 4
    assert (cards[0].value, cards[0].interval) == (numbers.percent(0.7), "only one prompt")
    assert (cards[1].value, cards[1].interval) == (numbers.MISSING, "not measured")
    assert all(card.definition for card in cards)
