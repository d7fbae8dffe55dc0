"""Contradictions among the labels of a file, whatever a model's rewards are.

Texts count as the same where they are equal but for case and white space, as in `rmcore.data.audit`.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rmcore.core.arrays import BoolArray, IntArray
from rmcore.core.progress import Report, labelled, silent
from rmcore.data.pair import PreferencePair
from rmcore.data.splits import normalized_prompt, normalized_text
from rmcore.suites.overlap import find_overlap
from rmcore.suites.question import Question

Couple = tuple[str, str, str]
"""Prompt, chosen and rejected, normalized."""


def couples(pairs: Sequence[PreferencePair]) -> list[Couple]:
    """The normalized texts of each of P pairs."""
    return [(normalized_prompt(p.prompt), normalized_text(p.chosen), normalized_text(p.rejected)) for p in pairs]


def contradicted(texts: Sequence[Couple]) -> BoolArray:
    """Pairs whose two answers are preferred the other way round elsewhere in the file, (P,)."""
    there = set(texts)
    return np.array([(prompt, worse, better) in there and better != worse for prompt, better, worse in texts], bool)


def repeated(texts: Sequence[Couple]) -> BoolArray:
    """Pairs that are in the file more than once, with the same label, (P,)."""
    counts = Counter(texts)
    return np.array([counts[one] > 1 for one in texts], dtype=bool)


def answers_of(texts: Sequence[Couple]) -> tuple[IntArray, IntArray, int]:
    """Numbers of the better and the worse answer of each pair, (P,) each, and how many answers of prompts there are."""
    numbers: dict[tuple[str, str], int] = {}
    better = [numbers.setdefault((prompt, text), len(numbers)) for prompt, text, _ in texts]
    worse = [numbers.setdefault((prompt, text), len(numbers)) for prompt, _, text in texts]
    return np.array(better, dtype=np.int64), np.array(worse, dtype=np.int64), len(numbers)


def in_cycles(texts: Sequence[Couple]) -> BoolArray:
    """Pairs on a circle of three answers or more (a over b over c over a), (P,): one of its labels is wrong or a tie.

    Those are the pairs with both answers in one strongly connected component of a prompt's preferences. Two answers
    that are preferred both ways round are `contradicted`, and no circle.
    """
    better, worse, size = answers_of(texts)
    graph = coo_array((np.ones(len(texts)), (better, worse)), shape=(size, size)).tocsr()
    _, component = connected_components(graph, directed=True, connection="strong")
    answers = np.bincount(component, minlength=size)
    first, second = component[better], component[worse]
    return np.asarray((first == second) & (answers[first] >= 3))


def near_copies(pairs: Sequence[PreferencePair], folds: IntArray, *, report: Report = silent) -> BoolArray:
    """Pairs whose prompt nearly is one of another fold, (P,): their margin is of a model that saw a near copy.

    Near is what `rmcore.suites.overlap` calls so: 0.8 of all sequences of five words are shared.
    """
    found = np.zeros(len(pairs), dtype=bool)
    for fold in np.unique(folds):
        places: dict[str, list[int]] = defaultdict(list)
        for place in np.flatnonzero(folds == fold).tolist():
            places[normalized_prompt(pairs[place].prompt)].append(place)
        questions = [Question(pairs[same[0]].pair_id, pairs[same[0]].prompt, (), 0, "", "") for same in places.values()]
        others = [pairs[place] for place in np.flatnonzero(folds != fold).tolist()]
        seen = find_overlap(others, questions, report=labelled(report, "comparing prompts across folds")).seen
        for same, is_seen in zip(places.values(), seen, strict=True):
            found[same] = is_seen
    return found
