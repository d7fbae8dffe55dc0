"""A report as its reader sees it, and figures drawn strictly."""

import io
import warnings
from html.parser import HTMLParser

import pytest

VOID = {"meta", "img", "br", "hr", "input", "link"}
APART = {"td", "th", "dt", "dd", "span", "p", "div", "h2", "h3", "li", "summary"}
"""Elements after which the next word is another one."""


class Page(HTMLParser):
    """Checks nesting and gathers tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.raw = html
        self.open, self.tags, self.attributes, self.pieces = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in APART:
            self.pieces.append(" ")

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())

    def assert_safe(self) -> None:
        """Nothing is fetched and nothing runs; links of the page lead to its own places."""
        assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(self.tags)
        assert not [name for _, name, _ in self.attributes if name.startswith("on") or name == "srcset"]
        assert all(value.startswith("data:image/png;base64,") for value in self.values("src"))
        assert any("default-src 'none'" in value for value in self.values("content"))
        assert "url(" not in self.raw
        assert "@import" not in self.raw
        ids = self.values("id")
        assert len(ids) == len(set(ids))
        assert {value[1:] for value in self.values("href") if value.startswith("#")} <= set(ids)

    def values(self, name: str) -> list[str]:
        """Of every attribute of this name."""
        return [value for _, attribute, value in self.attributes if attribute == name]

    def section(self, name: str) -> str:
        """Text of one section."""
        return Page(self.raw.split(f'<section id="{name}">', 1)[1].split("</section>", 1)[0]).text


@pytest.fixture(scope="session")
def parse():
    """Factory of pages from HTML."""
    return Page


@pytest.fixture
def report_with(parse, tmp_path):
    """Write the report of a run with some parts of its record exchanged."""

    import report_sample  # here: most tests need none
    from rmcore.reporting.html.report import write_report

    def render(**parts):
        out = write_report(report_sample.results() | parts, {}, tmp_path / "report.html")
        return parse(out.read_text(encoding="utf-8"))

    return render


@pytest.fixture(scope="session")
def draw():
    """Renders small with warnings as errors: a missing glyph, a log of zero or a failed layout is a defect."""

    def drawn(figure):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.savefig(io.BytesIO(), format="png", dpi=40)
        return figure

    return drawn
