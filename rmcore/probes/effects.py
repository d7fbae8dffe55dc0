"""Effects of an answer's sentences on its reward: the reward, less the reward of the answer without the sentence.

These are exact differences of rewards, each text as far as the model reads it; nothing is fitted or drawn (Covert,
Lundberg and Lee 2021, JMLR 22, explaining by removing). Sentences interact, so effects need not add up to the reward.
An answer of one sentence has no effects.

Sentences tile an answer. One ends behind a full stop, exclamation or question mark (also those of other scripts, which
need no white space behind them), and where a line ends, unless the next one begins in lower case. Points of
abbreviations, initials, decimals and list markers end none; a fenced block of code is one. These are rules, and no
trained model: they are wrong where an abbreviation that is not listed ends in a full stop, and a Thai sentence is a
line.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import Answer, PreferencePair, Prompt, prompt_text
from rmcore.ensembles.score import SideScorer, readable_pairs
from rmcore.models.checks import refuse_not_finite
from rmcore.models.reward_model import BradleyTerryRM

MOST_PARTS = 64
"""Most parts of an answer: more sentences are taken together as passages."""
NUM_EXPLAINED = 10
"""Mistakes whose sentences are measured: those with the largest wrong margins."""
_CODE = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block: to its closing fence, or to the end of a text that was cut."""
_END = re.compile(
    r"[.!?…]+[\"'”’»)\]*_`]*(?=\s)"  # scripts with white space between sentences
    r"|[。！？｡．]+[」』）】”’]*"  # Chinese and Japanese
    r"|[।॥؟۔።]+(?=\s)"  # Devanagari, Arabic and Urdu, Ethiopic
    r"|\n"
)
_SHORT = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:(?i:mr|mrs|ms|dr|prof|st|gen|col|lt|capt|sr|jr|vs|cf|ca|approx|esp|resp|incl|figs?|eqs?|sec"
    r"|ch|vols?|pp?|eds?|al|dept|univ|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|nr|bzw|usw|ggf|sra|mme)"
    r"|(?:[^\W\d_]\.)+[^\W\d_]|[A-HJ-Z])\Z"
)
"""Before a full stop that ends no sentence: an abbreviation, e.g and U.S without the last one, an initial."""
_MARKER = re.compile(r"\s*(?:[(\[]?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})|#{1,6}|[-*+•])\Z")
"""A list marker without its full stop, from the beginning of a line."""


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
        by side as `sentence_effects` gives them.

    Raises:
        DataError: none of the pairs can be read, or an answer without a sentence cannot.
        ModelError: a reward is not finite.
    """
    pairs = readable_pairs(rm, pairs)
    rewards = rm.score_pairs(pairs, report=prefixed(report, "mistakes")).astype(np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    worst = [int(place) for place in np.argsort(margins, kind="stable") if margins[place] < 0]
    texts = [at for at in worst if not isinstance(pairs[at].chosen, Answer)]
    texts = [at for at in texts if not isinstance(pairs[at].rejected, Answer)][:most]
    sides = [(pairs[at].prompt, text) for at in texts for text in (pairs[at].chosen, pairs[at].rejected)]
    found = sentence_effects(rm, sides, report=prefixed(report, "sentences"))
    return [
        {
            "pair_id": pairs[at].pair_id,
            "prompt": prompt_text(pairs[at].prompt),
            "chosen": pairs[at].chosen,
            "rejected": pairs[at].rejected,
            "margin": float(margins[at]),
            "effects": {"chosen": chosen, "rejected": rejected},
        }
        for at, chosen, rejected in zip(texts, found[::2], found[1::2], strict=True)
    ]


def sentence_effects(
    rm: SideScorer, sides: Sequence[tuple[Prompt, str]], *, report: Report = silent
) -> list[list[dict[str, Any]]]:
    """Measure what each sentence of N answers adds to its reward; an answer of n sentences costs n + 1 rewards.

    All texts of all answers are scored in one call, so those of one answer share the prompt where rows are packed.

    Args:
        rm: a reward model, here or served.
        sides: N (prompt, answer).
        report: told of the texts scored.

    Returns:
        N lists of {"text", "effect"} in the order of the sentences, effects in logits, None of a sentence that is
        beyond what the model reads; empty where there is one sentence or none.

    Raises:
        DataError: the model cannot read a side, or what is left of it without a sentence.
        ModelError: a reward is not finite.
    """
    parts = [found if len(found := sentences(answer)) > 1 else [] for _, answer in sides]
    left = [
        (prompt, without(of_answer, place))
        for (prompt, _), of_answer in zip(sides, parts, strict=True)
        for place in range(len(of_answer))
    ]
    whole, shorter = rm.renderer.tokenize_sides(sides), rm.renderer.tokenize_sides(left)
    rewards = rm.score_sides([*whole, *shorter], report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda at: f"text {at} of {len(sides)} answers and what each is without a sentence")
    rest = iter(zip(shorter, rewards[len(sides) :], strict=True))
    told = []
    for of_answer, tokens, total in zip(parts, whole, rewards, strict=False):
        effects = []
        for text, (without_it, reward) in zip(of_answer, rest, strict=False):
            is_unread = tokens.num_cut > 0 and without_it.ids == tokens.ids
            effects.append({"text": text.strip(), "effect": None if is_unread else float(total - reward)})
        told.append(effects)
    return told


def without(parts: Sequence[str], place: int) -> str:
    """Join all N parts of a text but one, N above 1, so that it reads on: of two gaps that meet the wider one stays."""
    before, gone = parts[:place], parts[place]
    after = "".join(parts[place + 1 :])
    if not before:
        return after.lstrip()
    text = "".join(before)
    gaps = [one[len(one.rstrip()) :] for one in (text, gone)]
    return text.rstrip() + max(gaps, key=lambda gap: (gap.count("\n"), bool(gap))) + after if after else text.rstrip()


def sentences(text: str, most: int = MOST_PARTS) -> list[str]:
    """Take a text apart into at most so many parts, which tile it in order. An empty text has none."""
    code = [block.span() for block in _CODE.finditer(text)]
    ends = [_behind(text, end) for _, end in code] + [start for start, _ in code]
    ends += [
        _behind(text, found.end())
        for found in _END.finditer(text)
        if not any(start <= found.start() < end for start, end in code) and _ends_sentence(text, found)
    ]
    # White space in front belongs to the first part.
    bounds = [0, *sorted({end for end in ends if text[:end].strip() and end < len(text)}), len(text)]
    parts = [text[start:end] for start, end in pairwise(bounds) if start < end]
    size = -(-len(parts) // most) or 1
    return ["".join(parts[start : start + size]) for start in range(0, len(parts), size)]


def _behind(text: str, place: int) -> int:
    """Where the white space that begins at a place ends; the indentation of the line behind it stays with the line."""
    end = place + len(text[place:]) - len(text[place:].lstrip())
    line = text.rfind("\n", max(0, place - 1), end) + 1
    return max(line, place) if line and end < len(text) else end


def _ends_sentence(text: str, found: re.Match[str]) -> bool:
    following = text[found.end() :].lstrip()[:1]
    if found[0] == "\n":  # the continuation of a wrapped line begins in lower case
        return text[found.end() : found.end() + 1] == "\n" or not following.islower()
    if not found[0].startswith(".") or found[0].startswith(".."):
        return not (found[0][-1] in "\"'”’»" and following.islower())
    line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
    return not (_MARKER.match(line) or _SHORT.search(line))
