"""The strictly ordered pairs of K answers, or so many of them, each as likely as any other.

Nothing here is done for each of the K (K - 1) / 2 pairs: thousands of answers are read as fast as a few.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, groupby

from rmcore.data.pair import Prompt, content_id, prompt_text


def strict_pairs(
    prompt: Prompt, texts: Sequence[str], strength: Sequence[float], most: int
) -> tuple[list[tuple[int, int]], int]:
    """Choose the pairs of answers of different texts of which one is strictly stronger.

    The choice depends on what is given alone, so it is the same anywhere in a file.

    Args:
        prompt: what was answered.
        texts: (K,) answers.
        strength: (K,) more is better.
        most: pairs that are wanted; of more a random choice is kept, in order.

    Returns:
        (place of the better, place of the worse) of each pair, in the order of the better ones, then of the worse; and
        how many are left out.
    """
    num_worse = _num_worse(strength, texts)
    ends = list(accumulate(num_worse))  # the pairs in order: those that the first answer wins, then the second's, ...
    numbers: Iterable[int] = range(ends[-1])
    if ends[-1] > most:
        identity = content_id(prompt_text(prompt), *texts, *map(repr, strength))
        numbers = sorted(random.Random(identity).sample(range(ends[-1]), most))  # noqa: S311 - data, not cryptography
    pairs = []
    for i, places in groupby(numbers, partial(bisect_right, ends)):
        worse = [j for j in range(len(texts)) if strength[j] < strength[i] and texts[j] != texts[i]]
        pairs += [(i, worse[place - ends[i] + num_worse[i]]) for place in places]
    return pairs, ends[-1] - len(pairs)


def _num_worse(strength: Sequence[float], texts: Sequence[str]) -> list[int]:
    """For each answer, how many others of another text it is strictly stronger than."""
    own: dict[str, list[float]] = {}
    for text, value in zip(texts, strength, strict=True):
        own.setdefault(text, []).append(value)
    everyone = sorted(strength)
    for values in own.values():
        values.sort()
    return [
        bisect_left(everyone, value) - bisect_left(own[text], value)
        for text, value in zip(texts, strength, strict=True)
    ]
