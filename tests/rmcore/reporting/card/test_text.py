"""Text of others in a card: it is shown as it is, whatever it holds."""

import html
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rmcore.reporting.card.text import Markdown, shown
from rmcore.reporting.html.blocks import Block, Table, markdown

RENDER = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])
HOSTILE = st.text(alphabet="ab <>&\"'`*_[](){}#|~@$!\\-+=:/.\n\t1)\u202e\u0000é", max_size=40)


def visible(text):
    line = " ".join(text.split())
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in line)


@given(HOSTILE)
@example("<script>alert(1)</script>")
@example("![x](http://a.b/c) $$x$$ | --- |")
@example("1. a")
@example("---")
def test_a_text_is_shown_as_it_is(text):
    page = RENDER.render(f"x {shown(text)} y")
    assert page.count("<") == 2  # the paragraph's own
    assert html.unescape(page) == f"<p>x {visible(text)} y</p>\n"


@given(HOSTILE)
@example("1.")
@example("2)")
def test_a_text_begins_nothing_and_ends_no_cell(text):
    started = RENDER.render(str(shown(text)))
    assert not visible(text) or started.startswith("<p>")
    block = Block("title", tables=(Table(("a", "b"), [(text, "end")], left=range(2)),))
    page = RENDER.render(markdown(block, escape=shown))
    assert page.count("<td>") == 2
    assert "<td>end</td>" in page


def test_markdown_that_was_written_here_stays():
    assert shown(Markdown("**yes**")) == "**yes**"
    assert shown("**yes**") != "**yes**"
