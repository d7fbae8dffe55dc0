"""Contamination: which questions of a benchmark the training pairs have seen, exactly or nearly.

A question is seen where a training pair has its prompt, exactly (but for case and white space) or nearly: prompts whose
sets of five words in a row have a Jaccard similarity of at least 0.8. Sequences that more than a tenth of a set's
prompts share are its template and do not count; a prompt of which fewer than six others are left is compared exactly.
Candidates come from MinHash (datasketch), and each is then measured exactly, so no two prompts are called alike by an
accident of hashing. In scripts without spaces a character counts as a word.

Near-copies among the prompts of a policy's samples are found in the same way, from half of the sequences on: they are
no independent evidence long before one could stand for another.

Source:
    Lee et al. 2022, Deduplicating training data makes language models better, arXiv:2107.06499: 5-grams, 0.8.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
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
    prompts, index = _Prompts(questions), _Texts(normalized_prompt(one.prompt) for one in questions)
    exact, near, answered = (np.zeros(len(questions), dtype=bool) for _ in range(3))
    shared = np.zeros(len(pairs), dtype=bool)
    known: dict[str, frozenset[int]] = {}
    for number, pair in enumerate(pairs):
        text = normalized_prompt(pair.prompt)
        if text not in known:  # pairs of one prompt ask once
            found = index.like(text, NEAR)
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


def independent_units(prompts: Sequence[str], topics: Sequence[Hashable | None]) -> list[int]:
    """Number the groups of prompts that are near-copies of one another or share a topic: (C,), from 0.

    A chain of near-copies is one group.

    Args:
        prompts: C texts.
        topics: (C,) of the prompts; None where a prompt has none, and then its text alone counts.
    """
    texts = [normalized_prompt(prompt) for prompt in prompts]
    index, parent = _Texts(texts), list(range(len(prompts)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    first: dict[tuple[str, Hashable], int] = {}
    for place, (text, topic) in enumerate(zip(texts, topics, strict=True)):
        same = [("topic", topic)] if topic is not None else []
        for key in [("text", text), *same]:
            parent[root(place)] = root(first.setdefault(key, place))
    for text in index.texts:
        for other in index.like(text, CANDIDATES):
            parent[root(first["text", text])] = root(first["text", other])
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(place), len(numbers)) for place in range(len(prompts))]


class _Prompts:
    """Where the prompts and the answers of a benchmark's questions are."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.places: dict[str, list[int]] = {}
        """Questions of each prompt."""
        self.of_answer: dict[str, set[int]] = {}
        """Questions that have an answer."""
        for place, one in enumerate(questions):
            self.places.setdefault(normalized_prompt(one.prompt), []).append(place)
            for answer in one.answers:
                self.of_answer.setdefault(answer, set()).add(place)


class _Texts:
    """Normalized texts, to find those like another one."""

    def __init__(self, texts: Iterable[str]) -> None:
        every = {text: _grams(text) for text in texts}
        self.texts = frozenset(every)
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

    def like(self, text: str, least: float) -> set[str]:
        """Texts that are this one or resemble it, with a Jaccard similarity of `least` (`CANDIDATES` or more)."""
        found = {text} & self.texts
        if grams := self._own(_grams(text)):
            near = self.index.query(_hashed(grams))
            found |= {one for one in near if len(grams & self.grams[one]) >= least * len(grams | self.grams[one])}
        return found


def _grams(text: str) -> frozenset[str]:
    """Every five words in a row of a normalized text."""
    words = _WORD.findall(text)
    return frozenset(" ".join(words[at : at + WORDS_IN_A_ROW]) for at in range(len(words) - WORDS_IN_A_ROW + 1))


def _hashed(grams: frozenset[str]) -> MinHash:
    hashed = MinHash(num_perm=NUM_HASHES)
    hashed.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
    return hashed
