"""Pieces of text that several rules look at: sentences, lists, code, words."""

import re

SENTENCE_END = re.compile(r"(?<=[.!?])[ \n]+(?=\S)")
_MARKUP = re.compile(r"(?m)^\s*(?:[-*+•]|\d+[.)])\s|^#{1,6}\s|^\||\*\*")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b")
"""A capitalised word that begins no sentence."""


def sentences(text: str) -> list[str]:
    """Cut a text behind each full stop, exclamation and question mark that white space follows."""
    return SENTENCE_END.split(text.strip())


def has_code(text: str) -> bool:
    """Whether a text has a block of code, in which white space and marks mean something."""
    return "```" in text


def has_markup(text: str) -> bool:
    """Whether a text has lists, headings, tables or bold already."""
    return _MARKUP.search(text) is not None


def names(text: str) -> list[str]:
    """The different capitalised words inside sentences, in their order: names, in English."""
    return list(dict.fromkeys(_NAME.findall(text)))


def is_english(text: str) -> bool:
    """Whether a text has common English words and hardly another alphabet: what the built-in phrases are made for."""
    words = re.findall(r"[a-z']+", text.lower())
    common = sum(word in _COMMON for word in words)
    return bool(words) and common >= 1 and sum(map(str.isascii, text)) >= 0.95 * len(text)


_COMMON = frozenset(
    {"the", "of", "and", "to", "in", "is", "that", "it", "for", "on", "with", "as", "are", "this", "be", "at", "by"}
    | {"from", "or", "have", "an", "not", "you", "can", "which", "if", "how", "what", "a", "do", "i"}
)
