"""The section about mistakes: parts of answers in their colours, what would turn them, and no markup of theirs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import explain_sample
from rmcore.reporting.html.explained import changes, coloured, write_explanation


@pytest.fixture
def page(report_with):
    return lambda record: report_with(explained=record)


@pytest.mark.slow
def test_a_mistake_is_shown_with_its_parts_and_its_edit(page):
    html = page(json.loads(json.dumps(explain_sample.record())))
    text = html.section("explained")
    assert "2 of 40 held-out pairs (5.0 %) are ranked against their label" in text.replace("\xa0", " ")
    for words in ("surely (9 : 1)", "water (5 : 0)", "facts (2)", "kind 1", "margin", "The smallest of 3 edits"):
        assert words in text
    assert "9 tokens are beyond what the model reads" in text
    assert 'class="unseen"' in html.raw
    assert "No verdict follows" in text


def test_texts_are_texts_whatever_is_in_them(page):
    html = page(explain_sample.record())
    for markup in ("<script>bad()", "<b>water</b>"):
        assert markup in html.section("explained")
        assert markup not in html.raw


def test_the_page_of_the_command_says_whose_it_is(parse, tmp_path):
    named = {"title": "Why out/best says what it says", "subtitle": "out/best on a pair of x."}
    out = write_explanation({**explain_sample.record(), **named}, tmp_path / "new" / "page.html")
    text = parse(out.read_text(encoding="utf-8")).raw
    assert "<title>Why out/best says what it says</title>" in text
    assert "out/best on a pair of x." in text


@given(st.text(max_size=60), st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.data())
def test_coloured_pieces_are_the_text_and_no_darker_than_the_largest(text, shares, data):
    inner = sorted(data.draw(st.integers(0, len(text))) for _ in shares[1:])
    ends = [*inner, len(text)]
    spans = [
        {"start": start, "end": end, "share": share, "seen": True}
        for start, end, share in zip([0, *inner], ends, shares, strict=True)
    ]
    pieces = coloured(text, spans, max(map(abs, shares)))
    assert "".join(piece["text"] + piece["gap"] for piece in pieces) == text
    opacity = [float(piece["style"].rpartition(",")[2].rstrip(")")) for piece in pieces]
    assert all(0 <= one <= 0.551 for one in opacity)
    assert max(shares) == 0 == min(shares) or max(opacity) == pytest.approx(0.55, abs=1e-3)


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=40).map(" ".join)


@given(WORDS, WORDS)
def test_changes_name_every_word_that_was_changed(before, after):
    pieces = changes(before, after)
    assert all(piece["text"] for piece in pieces)
    taken = " ".join(piece["text"] for piece in pieces if piece["tag"] == "del").split()
    put = " ".join(piece["text"] for piece in pieces if piece["tag"] == "ins").split()
    assert len(before.split()) - len(taken) == len(after.split()) - len(put)
    assert (before.split() == after.split()) == (not taken and not put)
