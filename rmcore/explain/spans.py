"""The parts that an answer is taken apart into, by sentence or by word, and the text that some of them make.

Spans tile a text: each is a half-open range of characters, the white space behind a part belongs to it, and that in
front of the text to the first. So `text[span.start : span.end]` put together is the text.

    sentence    ends behind a full stop, exclamation or question mark (also those of other scripts, which need no white
                space behind them), and where a line ends, unless the next one begins in lower case. Points of
                abbreviations, initials, decimals and list markers end none; a fenced block of code is one
    word        what white space parts; a single character in Chinese and Japanese, which write none

Rules, and no trained model: they are wrong where an abbreviation that is not listed ends in a full stop, and a Thai
sentence is a line.
"""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Unit = Literal["sentence", "word"]

_CODE = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block: to its closing fence, or to the end of a text that was cut."""
_CLOSING = "\"'”’»)\\]*_`"
_END = re.compile(
    rf"[.!?…]+[{_CLOSING}]*(?=\s)"  # scripts with white space between sentences
    r"|[。！？｡．]+[」』）】”’]*"  # Chinese and Japanese
    r"|[।॥؟۔።]+(?=\s)"  # Devanagari, Arabic and Urdu, Ethiopic
    r"|\n"
)
_SHORT = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "mt", "rev", "gen", "col", "lt", "sgt", "capt", "hon", "sr", "jr", "messrs"}
    | {"vs", "cf", "ca", "approx", "esp", "viz", "resp", "incl", "fig", "figs", "eq", "eqs", "sec", "ch", "vol", "vols"}
    | {"pp", "ed", "eds", "al", "dept", "univ", "assn", "bros", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep"}
    | {"sept", "oct", "nov", "dec", "bzw", "usw", "evtl", "ggf", "sra", "mme", "mlle"}
)
"""Words whose full stop ends no sentence, whatever follows."""
_OPEN = frozenset({"etc", "inc", "ltd", "co", "corp", "no", "nr", "art", "p", "est", "min", "max", "a.m", "p.m"})
"""Words whose full stop ends a sentence where a capital follows, and no number or lower-case word."""
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
"""e.g, U.S and an initial, without the last full stop."""
_MARKER = re.compile(r"(?:[(\[]?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})|#{1,6}|[-*+•])\Z")
"""A list marker without its full stop, from the beginning of a line."""
_UNSPACED = "\u2e80-\u2fdf\u3040-\u30ff\u31c0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_JOINED = "\u3000-\u303f\u3099\u309a\ufe00-\ufe0f\uff00-\uff0f\uff1a-\uff20"
"""Marks that stay with the character before them: punctuation of those scripts, voicing, variants of a glyph."""
_WORD = re.compile(rf"(?:[{_UNSPACED}][{_JOINED}]*|[^\s{_UNSPACED}]+)\s*")


class Span(NamedTuple):
    """One part of a text: its characters from `start` to before `end`, the white space behind them included."""

    start: int
    end: int

    def of(self, text: str) -> str:
        """The part itself, without the white space around it."""
        return text[self.start : self.end].strip()


def spans_of(text: str, unit: Unit, *, most: int) -> list[Span]:
    """Take a text apart; the spans tile it, in order. An empty text has none.

    Args:
        text: any text; one of white space alone is one span.
        unit: by sentence or by word.
        most: the most spans, from 1 on. Where there are more words, neighbours of one sentence are taken together as
            phrases of equally many; where there are more sentences, neighbouring ones as passages.
    """
    sentences = _sentences(text)
    if unit == "sentence":
        return _merged(sentences, most)
    words = [_words(text, sentence) for sentence in sentences]
    for size in range(1, max(map(len, words), default=0) + 1):
        phrases = [one for inside in words for one in _runs(inside, size)]
        if len(phrases) <= most:
            return phrases
    return _merged(sentences, most)


def text_of(text: str, spans: Sequence[Span], kept: Collection[int]) -> str:
    """Give the text that some of the spans make, with the white space between them mended so that it reads on.

    Between two spans that become neighbours is the white space with the most line breaks of all that was between
    them. All spans make the text itself, none the empty one.

    Args:
        text: the whole text.
        spans: N spans that tile it.
        kept: places in `spans` of those that stay.
    """
    places = sorted(set(kept))
    if not places:
        return ""
    gaps = [_gap(text, span) for span in spans]
    made = []
    for place, following in pairwise([*places, len(spans)]):
        span = spans[place]
        body = text[span.start : span.end - len(gaps[place])]
        # After the last part is what was there, or nothing where that was not the last of the text.
        last = following == len(spans)
        gap = (gaps[place] if place == len(spans) - 1 else "") if last else _widest(gaps[place:following])
        made.append(body + gap)
    whole = "".join(made)
    return whole if places[0] == 0 else whole.lstrip()


def _gap(text: str, span: Span) -> str:
    """White space at a span's end; none of a span that is nothing else."""
    body = text[span.start : span.end].rstrip()
    return text[span.start + len(body) : span.end] if body else ""


def _widest(gaps: Sequence[str]) -> str:
    return max(gaps, key=lambda gap: (gap.count("\n"), bool(gap)))


def _merged(spans: list[Span], most: int) -> list[Span]:
    return _runs(spans, -(-len(spans) // most)) if spans else []


def _runs(spans: list[Span], size: int) -> list[Span]:
    """Every `size` neighbours as one."""
    starts = range(0, len(spans), size)
    return [Span(spans[at].start, spans[min(at + size, len(spans)) - 1].end) for at in starts]


def _words(text: str, sentence: Span) -> list[Span]:
    found = [Span(*one.span()) for one in _WORD.finditer(text, sentence.start, sentence.end)]
    if not found:
        return [sentence]
    return [Span(sentence.start, found[0].end), *found[1:]]


def _sentences(text: str) -> list[Span]:
    bounds = {0, len(text)}
    code = [block.span() for block in _CODE.finditer(text)]
    for start, end in code:
        bounds |= {start, _behind(text, end)}
    inside = iter(code)
    block = next(inside, None)
    for found in _END.finditer(text):
        while block is not None and found.start() >= block[1]:
            block = next(inside, None)
        if (block is None or found.start() < block[0]) and _ends_sentence(text, found):
            bounds.add(_behind(text, found.end()))
    ordered = sorted(bounds)
    blank = [at for at in ordered[1:-1] if not text[:at].strip()]  # white space in front belongs to the first
    return [Span(*both) for both in pairwise([at for at in ordered if at not in blank])]


def _behind(text: str, place: int) -> int:
    """Where the white space that begins at a place ends; the indentation of a line behind it stays with that line."""
    end = place
    while end < len(text) and text[end].isspace():
        end += 1
    if end == len(text):
        return end
    line = text.rfind("\n", max(0, place - 1), end) + 1
    return max(line, place) if line else end


def _ends_sentence(text: str, found: re.Match[str]) -> bool:
    rest = text[found.end() :].lstrip()
    following = rest[:1]
    if found[0] == "\n":
        # The continuation of a wrapped line begins in lower case.
        return not (following.islower() and text[found.end() : found.end() + 1] != "\n" and not _is_item(rest))
    if not found[0].startswith(".") or found[0].startswith(".."):
        quoted = found[0][-1] in "\"'”’»"
        return not (quoted and following.islower())
    line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()].lstrip()
    if _MARKER.fullmatch(line):
        return False
    word = re.split(r"[\s(\[\"'“‘]", line[-24:])[-1]
    short = word.lower()
    if short in _OPEN:
        return following.isupper()
    return not (short in _SHORT or _DOTTED.fullmatch(word) or (len(word) == 1 and word.isupper() and word != "I"))


def _is_item(line: str) -> bool:
    """Whether a line begins with a list marker that is a letter."""
    return re.match(r"[a-z][.)]\s", line) is not None
