"""Contamination: which questions of a benchmark the training pairs have seen, exactly or nearly.

A question is seen where a training pair has its prompt, exactly (but for case and white space) or nearly: prompts whose
sets of five words in a row have a Jaccard similarity of at least 0.8. Candidates come from MinHash (datasketch), and
each is then measured exactly, so no pair is called alike by an accident of hashing. A prompt of fewer than ten words is
compared exactly alone: short questions resemble one another.

Source:
    Lee et al. 2022, Deduplicating training data makes language models better, arXiv:2107.06499: 5-grams, 0.8.
"""

import re
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
FEWEST_WORDS = 10
CANDIDATES = 0.5
"""Similarity that MinHash looks for. With 128 hashes in 25 bands of 5 it misses one of 0.8 once in twenty thousand."""
NUM_HASHES = 128
_WORD = re.compile(r"\w+")
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
    for number, pair in enumerate(pairs):
        text = normalized_prompt(pair.prompt)
        for other in prompts.like(text):
            shared[number] = True
            for place in prompts.places[other]:
                (exact if other == text else near)[place] = True
                answered[place] |= not {pair.chosen, pair.rejected}.isdisjoint(questions[place].answers)
        if number % _BATCH == 0:
            report(number, len(pairs), "comparing prompts with those of training")
    report(len(pairs), len(pairs), "comparing prompts with those of training")
    return Overlap(exact, near & ~exact, answered, shared)


class _Prompts:
    """The different prompts of a benchmark, to find those like another one."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.places: dict[str, list[int]] = {}
        """Questions of each prompt."""
        for place, one in enumerate(questions):
            self.places.setdefault(normalized_prompt(one.prompt), []).append(place)
        self.grams = {text: grams for text in self.places if (grams := _grams(text))}
        self.index = MinHashLSH(threshold=CANDIDATES, num_perm=NUM_HASHES)
        for text, grams in self.grams.items():
            self.index.insert(text, _hashed(grams))
        self.known: dict[str, tuple[str, ...]] = {}

    def like(self, text: str) -> tuple[str, ...]:
        """Prompts that are this one or resemble it; pairs of one prompt ask once."""
        if text not in self.known:
            found = {text} & self.places.keys()
            if grams := _grams(text):
                near = self.index.query(_hashed(grams))
                found |= {one for one in near if len(grams & self.grams[one]) >= NEAR * len(grams | self.grams[one])}
            self.known[text] = tuple(sorted(found))
        return self.known[text]


def _grams(text: str) -> frozenset[str]:
    """Every five words in a row of a normalized text; none of a short one."""
    words = _WORD.findall(text)
    if len(words) < FEWEST_WORDS:
        return frozenset()
    return frozenset(" ".join(words[at : at + WORDS_IN_A_ROW]) for at in range(len(words) - WORDS_IN_A_ROW + 1))


def _hashed(grams: frozenset[str]) -> MinHash:
    hashed = MinHash(num_perm=NUM_HASHES)
    hashed.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
    return hashed
