"""Kinds of mistakes: held-out pairs that a model ranks the wrong way round, grouped by what it sees of them.

What a model sees of a pair is the difference of the features under its reward head. Along the head itself all mistakes
lie alike, so that direction is taken out, and what is left is scaled to length one: a kind is a direction in which the
model is misled, however far. Mistakes on one prompt are alike for that reason alone, so groups are looked for among the
first one of each prompt, and the others go to the nearest group. k-means gives 2 to `MOST_KINDS` groups; the number
with the largest silhouette is taken, and only if none of `NUM_SIMULATED` clouds has one as large, which are drawn from
one Gaussian of the same mean and covariance and scaled alike: groups that chance finds in one cloud, too
(p = 1 / (NUM_SIMULATED + 1)) are one.

A group is described by words. Of each word it is counted in how many prompts only the answer that the model prefers
has it, and in how many only the one that is labelled better, an exact sign test over prompts; and how many of the
group's prompts have it against the other held-out ones, Fisher's exact test. Words that pass Bonferroni's correction
at `LEVEL` are named. The groups were found on the same pairs, so this describes them and proves nothing of others.

Sources: Lloyd 1982 (k-means); Arthur and Vassilvitskii 2007 (k-means++); Rousseeuw 1987 (silhouettes); Liu, Hayes,
Nobel and Marron 2008, JASA 103 (SigClust: one Gaussian as what groups have to beat).
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, hypergeom

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.extras import require_extra
from rmcore.data.pair import PreferencePair, prompt_text

require_extra("sklearn", "explain", "rm-opt explain")
from sklearn.cluster import KMeans  # noqa: E402
from sklearn.metrics import silhouette_score  # noqa: E402

MOST_KINDS = 5
NUM_SIMULATED = 19
LEVEL = 0.05
STARTS = 3
"""Runs of k-means, of which the best is taken."""
FEWEST_MISTAKES = 12
"""Fewer are not grouped: a group would be of two or three."""
MOST_DIRECTIONS = 32
"""Principal components that are grouped by: the others hold what single pairs differ in."""
MOST_WORDS = 8
"""Words of each list, the surest first."""
FEWEST_PROMPTS = 5
"""A word in fewer prompts cannot pass an exact test over them."""
_WORD = re.compile(r"[^\W\d_][\w'’-]*")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a description, and the prompts that speak for it."""

    word: str
    num: int
    """Prompts of the kind that have it: for answers, on that side alone."""
    against: int
    """For answers, prompts that have it on the other side alone; for prompts, others of the held-out ones."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One group of mistakes, described."""

    members: tuple[int, ...]
    """Places among the mistakes, in their order."""
    num_prompts: int
    model_words: tuple[Word, ...]
    """Words of the answers that the model prefers."""
    label_words: tuple[Word, ...]
    """Words of the answers that are labelled better."""
    prompt_words: tuple[Word, ...]
    longer: float
    """Share of the pairs in which the model prefers the longer answer."""
    subsets: tuple[tuple[str, int], ...]
    """Subsets of the data by number of pairs, most first; none where the data name none."""


def kinds_of_mistakes(
    mistakes: Sequence[PreferencePair],
    differences: FloatArray,
    head: FloatArray,
    held_out: Sequence[PreferencePair],
    *,
    seed: int,
) -> list[Kind]:
    """Group M mistakes and describe each group, the largest first.

    Args:
        mistakes: M pairs whose rejected answer has the higher reward, the worst first.
        differences: (M, D) features of the chosen side minus those of the rejected side.
        head: (D,) reward head.
        held_out: all held-out pairs, the mistakes among them: what the prompts of a kind are compared with.
        seed: of k-means and the simulated clouds.

    Returns:
        One kind where no groups stand out, or of fewer than `FEWEST_MISTAKES` prompts; none without mistakes.
    """
    if not mistakes:
        return []
    points = directions(differences, head)
    group = _of_prompts(points, [pair.prompt_id for pair in mistakes], seed=seed)
    sizes = Counter(group.tolist())
    return [
        _described(np.flatnonzero(group == number), mistakes, held_out)
        for number, _ in sorted(sizes.items(), key=lambda one: (-one[1], one[0]))
    ]


def _of_prompts(points: FloatArray, prompts: Sequence[str], *, seed: int) -> IntArray:
    """The group of each of M points, (M,), found among the first point of each prompt."""
    _, first = np.unique(np.asarray(prompts), return_index=True)
    found = group_of_each(points[np.sort(first)], seed=seed)
    centres = np.stack([points[np.sort(first)][found == number].mean(axis=0) for number in np.unique(found)])
    nearest = ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    nearest[np.sort(first)] = found
    return np.asarray(nearest)


def directions(differences: FloatArray, head: FloatArray) -> FloatArray:
    """The differences across the head in their first principal directions, each of length one: (M, C) float64."""
    unit = head / np.linalg.norm(head)
    across = _of_length_one(differences - np.outer(differences @ unit, unit))
    u, s, _ = np.linalg.svd(across, full_matrices=False)
    kept = min(MOST_DIRECTIONS, int((s > 1e-9).sum()))
    return _of_length_one(u[:, :kept] * s[:kept])


def _of_length_one(rows: FloatArray) -> FloatArray:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, length, out=np.zeros_like(rows), where=length > 0))


def group_of_each(points: FloatArray, *, seed: int) -> IntArray:
    """The group of each of M points of length one, (M,): all 0 where one cloud may have groups as distinct."""
    none = np.zeros(len(points), dtype=np.int64)
    if len(points) < FEWEST_MISTAKES or points.shape[1] == 0:
        return none
    rng = np.random.default_rng(seed)
    groups, best = _grouped(points, rng)
    mean, covariance = points.mean(axis=0), np.cov(points, rowvar=False).reshape(points.shape[1], -1)
    for _ in range(NUM_SIMULATED):
        cloud = _of_length_one(rng.multivariate_normal(mean, covariance, size=len(points)))
        if _grouped(cloud, rng)[1] >= best:
            return none
    return groups


def _grouped(points: FloatArray, rng: np.random.Generator) -> tuple[IntArray, float]:
    """Groups of the number with the largest silhouette, and that."""
    found = [(np.zeros(len(points), dtype=np.int64), -1.0)]
    for number in range(2, MOST_KINDS + 1):
        means = KMeans(number, n_init=STARTS, random_state=int(rng.integers(2**31)))
        groups = means.fit_predict(points).astype(np.int64)
        if len(np.unique(groups)) == number:  # equal points may leave some empty
            found.append((groups, float(silhouette_score(points, groups))))
    return max(found, key=lambda one: one[1])


def _described(members: IntArray, mistakes: Sequence[PreferencePair], held_out: Sequence[PreferencePair]) -> Kind:
    pairs = [mistakes[place] for place in members]
    prompts = {pair.prompt_id for pair in pairs}
    model, label = _answer_words(pairs)
    subsets = Counter(str(pair.metadata["subset"]) for pair in pairs if pair.metadata.get("subset"))
    return Kind(
        members=tuple(members.tolist()),
        num_prompts=len(prompts),
        model_words=model,
        label_words=label,
        prompt_words=_prompt_words(prompts, held_out),
        longer=sum(len(pair.rejected) > len(pair.chosen) for pair in pairs) / len(pairs),
        subsets=tuple(subsets.most_common()),
    )


def _answer_words(pairs: Sequence[PreferencePair]) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """Words that the answers preferred by the model have and those labelled better lack, and the reverse.

    A prompt counts once a word, for the side that has it alone in more of its pairs.
    """
    votes: dict[str, Counter[str]] = {}
    for pair in pairs:
        model, label = words_of(pair.rejected), words_of(pair.chosen)
        for word in model ^ label:
            votes.setdefault(word, Counter())[pair.prompt_id] += 1 if word in model else -1
    counts = {
        word: (sum(vote > 0 for vote in by_prompt.values()), sum(vote < 0 for vote in by_prompt.values()))
        for word, by_prompt in votes.items()
    }
    tested = {word: both for word, both in counts.items() if sum(both) >= FEWEST_PROMPTS}
    model_side = _surest(tested, lambda num, against: float(binom.sf(num - 1, num + against, 0.5)))
    turned = {word: (against, num) for word, (num, against) in tested.items()}
    return model_side, _surest(turned, lambda num, against: float(binom.sf(num - 1, num + against, 0.5)))


def _prompt_words(prompts: set[str], held_out: Sequence[PreferencePair]) -> tuple[Word, ...]:
    """Words that more of the kind's prompts have than of the other held-out ones."""
    texts: dict[str, set[str]] = {}
    for pair in held_out:  # of a conversation all its turns
        texts.setdefault(pair.prompt_id, set()).update(words_of(prompt_text(pair.prompt)))
    every = Counter(word for words in texts.values() for word in words)
    here = Counter(word for prompt in prompts for word in texts[prompt])
    tested = {word: (here[word], num - here[word]) for word, num in every.items() if num >= FEWEST_PROMPTS}
    return _surest(tested, lambda num, against: float(hypergeom.sf(num - 1, len(texts), num + against, len(prompts))))


def _surest(counts: dict[str, tuple[int, int]], p_value: Callable[[int, int], float]) -> tuple[Word, ...]:
    """The words that pass Bonferroni's correction over all that were tested, the surest first."""
    found = sorted((p_value(*both), word) for word, both in counts.items())
    passed = [word for p, word in found if 2 * p * len(counts) <= LEVEL]  # two sides of a test, or two lists
    return tuple(Word(word, *counts[word]) for word in passed[:MOST_WORDS])


def words_of(text: str) -> set[str]:
    """The different words of a text, in lower case; numbers are none."""
    return {found.lower() for found in _WORD.findall(text)}
