"""Contamination: which questions of a benchmark the training pairs have seen, exactly or nearly.

A question is seen where a training pair has its prompt, exactly (but for case and white space) or nearly: prompts whose
sets of five words in a row have a Jaccard similarity of at least 0.8. Sequences that more than a tenth of a set's
prompts share are its template and do not count; a prompt of which fewer than six others are left is compared exactly.
Candidates come from MinHash (datasketch), and each is then measured exactly, so no two prompts are called alike by an
accident of hashing. In scripts without spaces a character counts as a word.

Source:
    Lee et al. 2022, Deduplicating training data makes language models better, arXiv:2107.06499: 5-grams, 0.8.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasketch import MinHash, MinHashLSH

from rmcore.core.arrays import BoolArray
from rmcore.core.progress import Report, silent
from rmcore.data.splits import normalized_prompt
from rmcore.data.tokenized import Pairs
from rmcore.suites.question import Question

NEAR = 0.8
"""Least Jaccard similarity of near duplicates."""
WORDS_IN_A_ROW = 5
FEWEST_GRAMS = 6
"""Fewest sequences that tell prompts apart, as ten words have: short ones resemble one another."""
TEMPLATE_SHARE, FEWEST_OF_A_TEMPLATE = 0.1, 10
"""A sequence in more than this share of a set's prompts, and in so many, is a part of their template."""
CANDIDATES = 0.5
"""Similarity that MinHash looks for. With 128 hashes in 25 bands of 5 it misses one of 0.8 once in twenty thousand."""
NUM_HASHES = 128
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
"""Thai, Lao, Burmese, Khmer, kana and Han."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Overlap:
    """Questions of a set and training pairs that share a prompt."""

    exact: BoolArray
    """(Q,) questions whose prompt is that of a training pair."""
    near: BoolArray
    """(Q,) questions whose prompt only resembles one."""
    answers: BoolArray
    """(Q,) questions of either kind of which a training pair with such a prompt has an answer, too."""
    pairs: BoolArray
    """(P,) training pairs with such a prompt."""

    @property
    def seen(self) -> BoolArray:
        """(Q,) questions that were seen, either way."""
        return self.exact | self.near


def find_overlap(pairs: Pairs, questions: Sequence[Question], *, report: Report = silent) -> Overlap:
    """Compare the prompts of training pairs with those of a benchmark's questions; the pairs are read once."""
    prompts = _Prompts(questions)
    exact, near, answered = (np.zeros(len(questions), dtype=bool) for _ in range(3))
    shared = np.zeros(len(pairs), dtype=bool)
    known: dict[str, frozenset[int]] = {}
    for number, pair in enumerate(pairs):
        text = normalized_prompt(pair.prompt)
        if text not in known:  # pairs of one prompt ask once
            found = prompts.like(text)
            known[text] = frozenset(place for other in found for place in prompts.places[other])
            for other in found:
                (exact if other == text else near)[prompts.places[other]] = True
        if known[text]:
            shared[number] = True
            for answer in (pair.chosen, pair.rejected):
                answered[list(known[text] & prompts.of_answer.get(answer, frozenset()))] = True
        if number % _BATCH == 0:
            report(number, len(pairs), "comparing prompts with those of training")
    report(len(pairs), len(pairs), "comparing prompts with those of training")
    return Overlap(exact, near & ~exact, answered, shared)


class _Prompts:
    """The different prompts of a benchmark, to find those like another one."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.places: dict[str, list[int]] = {}
        """Questions of each prompt."""
        self.of_answer: dict[str, set[int]] = {}
        """Questions that have an answer."""
        for place, one in enumerate(questions):
            self.places.setdefault(normalized_prompt(one.prompt), []).append(place)
            for answer in one.answers:
                self.of_answer.setdefault(answer, set()).add(place)
        every = {text: _grams(text) for text in self.places}
        counted = Counter(gram for grams in every.values() for gram in grams)
        most = max(TEMPLATE_SHARE * len(every), FEWEST_OF_A_TEMPLATE)
        self.template = frozenset(gram for gram, count in counted.items() if count > most)
        self.grams = {text: own for text, grams in every.items() if (own := self._own(grams))}
        self.index = MinHashLSH(threshold=CANDIDATES, num_perm=NUM_HASHES)
        for text, grams in self.grams.items():
            self.index.insert(text, _hashed(grams))

    def _own(self, grams: frozenset[str]) -> frozenset[str]:
        """The sequences that are no template's; none where too few are left to tell prompts apart."""
        own = grams - self.template
        return own if len(own) >= FEWEST_GRAMS else frozenset()

    def like(self, text: str) -> set[str]:
        """Prompts that are this one or resemble it."""
        found = {text} & self.places.keys()
        if grams := self._own(_grams(text)):
            near = self.index.query(_hashed(grams))
            found |= {one for one in near if len(grams & self.grams[one]) >= NEAR * len(grams | self.grams[one])}
        return found


def _grams(text: str) -> frozenset[str]:
    """Every five words in a row of a normalized text."""
    words = _WORD.findall(text)
    return frozenset(" ".join(words[at : at + WORDS_IN_A_ROW]) for at in range(len(words) - WORDS_IN_A_ROW + 1))


def _hashed(grams: frozenset[str]) -> MinHash:
    hashed = MinHash(num_perm=NUM_HASHES)
    hashed.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
    return hashed
