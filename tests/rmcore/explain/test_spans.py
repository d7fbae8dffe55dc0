import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.explain.spans import spans_of, text_of

PIECES = (
    *(
        "Dr. ",
        "e.g. ",
        "3.5 ",
        "It ends. ",
        "Does it? ",
        "no",
        " ",
        "\n",
        "\n\n",
        "- item\n",
        "1. ",
        "```\n",
        "x = 1.\n",
    ),
    *("你好。", "走吧", "U.S. ", "...", '"Yes!" ', "ok. ", "\t", "\u00a0", "\u0e2a\u0e27\u0e31"),
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
UNITS = st.sampled_from(["sentence", "word"])


@given(TEXTS, UNITS, st.integers(1, 9))
def test_spans_tile_the_text_and_are_no_more_than_asked_for(text, unit, most):
    spans = spans_of(text, unit, most=most)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(start < end for start, end in spans)
    assert len(spans) <= most
    if text.strip():
        assert all(one.of(text) for one in spans)


@given(TEXTS, UNITS)
def test_all_spans_make_the_text_and_none_the_empty_one(text, unit):
    spans = spans_of(text, unit, most=64)
    assert text_of(text, spans, range(len(spans))) == text
    assert text_of(text, spans, ()) == ""


@given(TEXTS, UNITS, st.sets(st.integers(0, 5)))
def test_what_is_kept_is_there_in_order_and_nothing_else(text, unit, chosen):
    spans = spans_of(text, unit, most=64)
    kept = [place for place in sorted(chosen) if place < len(spans)]
    made = text_of(text, spans, kept)
    assert "".join(made.split()) == "".join("".join(spans[place].of(text).split()) for place in kept)


@given(st.lists(st.sampled_from(["One is.", "Two is!", "Is it three?", "Four."]), min_size=2, max_size=6), st.data())
def test_what_is_left_reads_on(parts, data):
    """One space between sentences, none at an end, and the paragraphs stay."""
    text = " ".join(parts)
    spans = spans_of(text, "sentence", most=64)
    assert len(spans) == len(parts)
    gone = data.draw(st.integers(0, len(parts) - 1))
    left = [place for place in range(len(parts)) if place != gone]
    assert text_of(text, spans, left) == " ".join(parts[place] for place in left)
    paragraphs = "\n\n".join(parts)
    spans = spans_of(paragraphs, "sentence", most=64)
    assert text_of(paragraphs, spans, left) == "\n\n".join(parts[place] for place in left)


def test_the_wider_gap_stays():
    text = "One. Two.\n\nThree. Four."
    spans = spans_of(text, "sentence", most=64)
    assert text_of(text, spans, (0, 2, 3)) == "One.\n\nThree. Four."
    assert text_of(text, spans, (0, 1, 3)) == "One. Two.\n\nFour."


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith paid 3.5 dollars, e.g. to J. Doe. ", "He left! ", '"Really?" he asked. ', "Good."],
        ["U.S. law is old etc. ", "The end."],
        ["No. ", "It is no. 5 of them. ", "I met her at 5 p.m. ", "She left."],
        ["It is I. ", "so it is. ", "well... ", "yes"],
        ["Steps:\n", "1. Do this. ", "Then that.\n", "2. Rest\n", "   - inner\n\n", "a wrapped\nline. ", "End."],
        ["See:\n\n", "```py\nx = 1. \n\nprint(x). \n```\n", "After."],
        ["See:\n", "```\nx = 1. \nIt breaks off. "],
        ["你好。", "今天天气很好！", "「走吧。」", "好"],
        ["यह है। ", "वह था।"],
        ["هل هذا؟ ", "نعم."],
        ["  Led in. ", "By space.  "],
        [" \n "],
        [],
    ],
)
def test_sentences(parts):
    text = "".join(parts)
    assert [text[start:end] for start, end in spans_of(text, "sentence", most=64)] == parts


def test_words_and_the_phrases_of_too_many_words():
    text = "One two three four five. Six seven.\n好的 x"
    words = [one.of(text) for one in spans_of(text, "word", most=64)]
    assert words == ["One", "two", "three", "four", "five.", "Six", "seven.", "好", "的", "x"]
    phrases = [one.of(text) for one in spans_of(text, "word", most=6)]
    assert phrases == ["One two", "three four", "five.", "Six seven.", "好的", "x"]  # no phrase crosses a sentence
    assert [one.of(text) for one in spans_of(text, "word", most=2)] == ["One two three four five. Six seven.", "好的 x"]
