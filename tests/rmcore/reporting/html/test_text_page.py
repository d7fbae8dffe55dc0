"""The page of a flow that tells what it found in Markdown: tables as tables, markup as it was typed."""

from rmcore.reporting.html.markdown import bullets, escape, text_table
from rmcore.reporting.html.text_page import write_text_report


def test_a_table_becomes_one_and_markup_of_names_stays_text(tmp_path):
    nasty = "<script>alert(1)</script> [x](javascript:alert) | ![y](http://evil.example/z)"
    markdown = f"# {escape(nasty)}\n\n{text_table(('name', 'value'), [(nasty, '1.5')])}\n\n{bullets([nasty])}\n"
    page = write_text_report("a <b> run", markdown, {}, tmp_path / "new" / "report.html").read_text()
    assert "<td>1.5</td>" in page
    assert "a &lt;b&gt; run" in page
    assert "<script" not in page
    assert 'href="javascript' not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
