"""Effects of an answer's sentences on its reward: the reward, less the reward of the answer without the sentence.

These are exact differences of rewards; nothing is fitted or drawn (Covert, Lundberg and Lee 2021, JMLR 22, explaining
by removing). Sentences interact, so effects need not add up to the reward. An answer of one sentence has no effects.

Sentences tile an answer. One ends behind a full stop, exclamation or question mark (also those of other scripts, which
need no white space behind them), and where a line ends, unless the next one begins in lower case. Points of
abbreviations, initials, decimals and list markers end none; a fenced block of code is one. These are rules, and no
trained model: they are wrong where an abbreviation that is not listed ends in a full stop, and a Thai sentence is a
line.

An answer longer than the model reads is taken apart as far as the model sees it: what is beyond has no effect. Where
the limit cuts the prompt, too, a text without a sentence lets the model read more of it.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import Answer, PreferencePair, Prompt, prompt_text
from rmcore.ensembles.score import SideScorer, readable_pairs
from rmcore.models.checks import refuse_not_finite
from rmcore.models.reward_model import BradleyTerryRM

MOST_SPANS = 64
"""Most parts of an answer: more sentences are taken together as passages."""
NUM_EXPLAINED = 10
"""Mistakes whose sentences are measured: those with the largest wrong margins."""
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


class Span(NamedTuple):
    """One sentence of a text: its characters from `start` to before `end`, the white space behind it included."""

    start: int
    end: int


class SentenceEffect(NamedTuple):
    """One sentence of an answer, and what the answer loses without it, in logits."""

    text: str
    effect: float | None
    """None: it is beyond what the model reads."""


def explain_mistakes(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, most: int = NUM_EXPLAINED, report: Report = silent
) -> list[dict[str, Any]]:
    """Measure the sentences of both answers of the pairs with the largest wrong margins.

    Args:
        rm: the reward model.
        pairs: P pairs; those that it cannot read are left out and said on stderr, and so are mistakes whose answers are
            more than texts.
        most: mistakes that are explained.
        report: told of the texts scored.

    Returns:
        JSON-ready, the largest wrong margin first: pair_id, prompt, chosen, rejected, margin (in logits) and `effects`,
        by side the sentences with their effects.

    Raises:
        DataError: none of the pairs can be read, or an answer without a sentence cannot.
        ModelError: a reward is not finite.
    """
    pairs = readable_pairs(rm, pairs)
    rewards = rm.score_pairs(pairs, report=prefixed(report, "mistakes")).astype(np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    worst = [int(place) for place in np.argsort(margins, kind="stable") if margins[place] < 0]
    texts = [place for place in worst if not isinstance(pairs[place].chosen, Answer)]
    texts = [place for place in texts if not isinstance(pairs[place].rejected, Answer)][:most]
    sides = [(pairs[at].prompt, text) for at in texts for text in (pairs[at].chosen, pairs[at].rejected)]
    found = sentence_effects(rm, sides, report=prefixed(report, "sentences"))
    return [
        {
            "pair_id": pairs[place].pair_id,
            "prompt": prompt_text(pairs[place].prompt),
            "chosen": pairs[place].chosen,
            "rejected": pairs[place].rejected,
            "margin": float(margins[place]),
            "effects": {"chosen": [one._asdict() for one in chosen], "rejected": [one._asdict() for one in rejected]},
        }
        for place, chosen, rejected in zip(texts, found[::2], found[1::2], strict=True)
    ]


def sentence_effects(
    rm: SideScorer, sides: Sequence[tuple[Prompt, str]], *, report: Report = silent
) -> list[list[SentenceEffect]]:
    """Measure what each sentence of N answers adds to its reward; an answer of n sentences costs n + 1 rewards.

    All texts of all answers are scored in one call, so those of one answer share the prompt where rows are packed.

    Args:
        rm: a reward model, here or served.
        sides: N (prompt, answer).
        report: told of the texts scored.

    Returns:
        N lists of sentences in order; empty where the model reads one sentence or none.

    Raises:
        DataError: the model cannot read a side, or what is left of it without a sentence.
        ModelError: a reward is not finite.
    """
    whole = rm.renderer.tokenize_sides(sides)
    seen = [
        answer[: rm.renderer.place_side(prompt, answer).end] if tokens.num_cut else answer
        for (prompt, answer), tokens in zip(sides, whole, strict=True)
    ]
    spans = [found if len(found := sentences(text)) > 1 else [] for text in seen]
    left = [
        (prompt, without(text, parts, place))
        for (prompt, _), text, parts in zip(sides, seen, spans, strict=True)
        for place in range(len(parts))
    ]
    rewards = rm.score_sides([*whole, *rm.renderer.tokenize_sides(left)], report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda place: _name(place, len(sides)))
    rest = iter(rewards[len(sides) :])
    told: list[list[SentenceEffect]] = []
    for (_, answer), text, parts, total in zip(sides, seen, spans, rewards, strict=False):
        effects = [SentenceEffect(text[start:end].strip(), float(total - next(rest))) for start, end in parts]
        beyond = answer[len(text) :].strip()
        told.append([*effects, *([SentenceEffect(beyond, None)] if effects and beyond else [])])
    return told


def without(text: str, spans: Sequence[Span], place: int) -> str:
    """Give the text without one of its N sentences, N above 1, with the white space mended so that it reads on.

    Between the two sentences that become neighbours is the white space with the most line breaks of what was between
    them. Without the last one the text ends with the sentence before it.
    """
    gaps = [_gap(text, span) for span in spans]
    before, after = text[: spans[place].start], text[spans[place].end :]
    if not before:
        return after.lstrip()
    before = before[: len(before) - len(gaps[place - 1])]
    return (
        before + max(gaps[place - 1 : place + 1], key=lambda gap: (gap.count("\n"), bool(gap))) + after
        if after
        else before
    )


def sentences(text: str, most: int = MOST_SPANS) -> list[Span]:
    """Take a text apart into at most so many parts, which tile it in order. An empty text has none."""
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
    ends = [at for at in ordered if at not in blank]
    size = -(-(len(ends) - 1) // most) or 1
    return [Span(*both) for both in pairwise([*ends[:-1:size], ends[-1]])]


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


def _gap(text: str, span: Span) -> str:
    """White space at a span's end; none of a span that is nothing else."""
    body = text[span.start : span.end].rstrip()
    return text[span.start + len(body) : span.end] if body else ""


def _name(place: int, num_sides: int) -> str:
    return (
        f"answer {place}" if place < num_sides else f"text {place - num_sides} of what answers are without a sentence"
    )
