"""Which prompts of a policy are independent evidence: near-copies of one another, and those of one topic, are one unit.

Two prompts are near-copies where their sets of five words in a row have a Jaccard similarity of one half or more: long
before one could stand for another they are no independent evidence. Sequences in more than a tenth of the prompts are
a template of all and do not count; prompts with fewer than six others are compared exactly, as short ones resemble one
another. In scripts without spaces a character counts as a word. A chain of near-copies is one unit.

All C² couples are compared at once, as a product of sparse matrices; only those that share a sequence cost anything.

Source:
    Lee et al. 2022, Deduplicating training data makes language models better, arXiv:2107.06499: 5-grams.
"""

import re
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from rmcore.data.splits import normalized_text

NEAR = 0.5
WORDS_IN_A_ROW = 5
FEWEST_GRAMS = 6
TEMPLATE_SHARE, FEWEST_OF_A_TEMPLATE = 0.1, 10
"""A sequence in more than this share of the prompts, and in so many, is a part of their template."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
"""Thai, Lao, Burmese, Khmer, kana and Han."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def independent_units(prompts: Sequence[str], topics: Sequence[Hashable | None]) -> list[int]:
    """Number the groups of C prompts that are near-copies of one another or share a topic: (C,), from 0.

    Args:
        prompts: C texts.
        topics: (C,) of the prompts; None where a prompt has none, and then its text alone counts.
    """
    texts = [normalized_text(prompt) for prompt in prompts]
    named: list[Hashable] = [None if topic is None else ("topic", topic) for topic in topics]
    joined = _near(texts) + _same(texts) + _same(named)
    _, component = connected_components(joined, directed=False)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(int(one), len(numbers)) for one in component]


def _same(keys: Sequence[Hashable]) -> sparse.csr_matrix:
    """(C, C) which place has the first equal key; None is equal to nothing."""
    first: dict[Hashable, int] = {}
    edges = [(place, first.setdefault(key, place)) for place, key in enumerate(keys) if key is not None]
    rows, columns = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return sparse.csr_matrix((np.ones(len(edges)), (rows, columns)), shape=(len(keys), len(keys)))


def _near(texts: Sequence[str]) -> sparse.csr_matrix:
    """(C, C) which texts are near-copies of one another."""
    number_of: dict[str, int] = {}
    grams = [[number_of.setdefault(gram, len(number_of)) for gram in _grams(text)] for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(one) for one in grams])
    columns = np.concatenate([np.zeros(0, np.int64), *(np.array(one, np.int64) for one in grams)])
    held = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(texts), len(number_of)))  # (C, G)
    is_own = held.getnnz(axis=0) <= max(TEMPLATE_SHARE * len(texts), FEWEST_OF_A_TEMPLATE)
    held = held[:, is_own]
    sizes = held.getnnz(axis=1)
    held = sparse.diags((sizes >= FEWEST_GRAMS).astype(float)) @ held
    shared = (held @ held.T).tocoo()  # (C, C) sequences in common
    is_near = shared.data >= NEAR * (sizes[shared.row] + sizes[shared.col] - shared.data)
    edges = (shared.row[is_near], shared.col[is_near])
    return sparse.csr_matrix((np.ones(int(is_near.sum())), edges), shape=(len(texts), len(texts)))


def _grams(text: str) -> set[str]:
    words = _WORD.findall(text)
    return {" ".join(words[at : at + WORDS_IN_A_ROW]) for at in range(len(words) - WORDS_IN_A_ROW + 1)}
