"""The page of a flow whose result is one block: tables as tables, markup as it was typed; Markdown shows the same."""

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import report_sample
from rmcore.reporting.figures.style import new_figure, save
from rmcore.reporting.html.blocks import Block, Named, Table, markdown
from rmcore.reporting.html.html import sections
from rmcore.reporting.html.page import write_block_report

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


def test_every_section_of_a_report_can_be_shown_in_markdown():
    for one in sections(report_sample.results()):
        told = markdown(one.block)
        assert told.startswith("# ")
        assert "None" not in told.split()


def test_only_results_have_the_colour_of_their_sign_and_a_long_text_is_no_number(tmp_path):
    rows = [("✗ a  prompt", "y" * 80)]
    tables = (Table(("prompt", "answer"), rows), Table(("result", "check"), [("✗ fail", "1")]))
    page = write_block_report("run", Block("title", tables=tables), {}, tmp_path / "report.html").read_text()
    assert page.count('class="fail') == 1
    assert '<td data-heading="check" class=" number">1</td>' in page  # its heading is before it on a phone
    assert f'<td class="">{"y" * 80}</td>' in page
    assert "✗ a  prompt" in page
