"""Pairs of one prompt side by side in the order of a training, so that what they share is computed once.

A step over many prompts computes each prompt anew. Where prompts have many pairs, and answers stand in several of
them, steps of groups compute fewer tokens for as many pairs; pairs of a group say less than as many of different
prompts, so whether that pays has to be measured (benchmarks/group_prompts.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import IntArray
from rmcore.data.rendering import TokenizedPair
from rmcore.models.batching import StepOrder


@dataclass(frozen=True)
class PromptGroups:
    """Pairs by what they share, and how many of a prompt are drawn together.

    prompts: (P,) a number for the prompt of each pair.
    answers: (P,) a number for its chosen answer.
    size: pairs of a group, at most.
    """

    prompts: IntArray
    answers: IntArray
    size: int


def find_prompt_groups(pairs: Sequence[TokenizedPair], size: int) -> PromptGroups:
    """Number the prompts and chosen answers of P pairs.

    Args:
        pairs: with their prompts' digests; without, each is of a prompt of its own.
        size: pairs of a group, at most.
    """
    numbers = np.empty((2, len(pairs)), dtype=np.int64)
    for place, pair in enumerate(pairs):  # eight bytes each: there may be ten million
        prompt = (pair.prompt_id or f"alone {place}").encode()
        answer = np.asarray(pair.chosen.ids, dtype=np.int32).tobytes()
        numbers[:, place] = _number(prompt), _number(prompt + b" " + answer)
    prompts, answers = (np.unique(row, return_inverse=True)[1] for row in numbers)
    return PromptGroups(prompts, answers, size)


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


class GroupedOrder(StepOrder):
    """Epochs of all pairs in which groups of one prompt stand together, in an order that is drawn.

    Within a prompt, pairs with the same chosen answer come one after the other, so that a group has few answers.
    """

    def __init__(self, groups: PromptGroups, pairs_per_step: int, num_steps: int, seed: int) -> None:
        super().__init__(len(groups.prompts), pairs_per_step, num_steps, seed)
        self._groups = groups

    def _drawn(self, rng: np.random.Generator) -> IntArray:
        prompts, answers, size = self._groups.prompts, self._groups.answers, self._groups.size
        drawn = rng.permutation(len(prompts))
        turns = rng.permutation(int(answers.max()) + 1)  # of the answers of a prompt
        drawn = drawn[np.lexsort((turns[answers[drawn]], prompts[drawn]))]  # stable: by prompt, then by answer
        begins = np.flatnonzero(np.diff(prompts[drawn], prepend=-1))  # of each prompt
        counts = np.diff(begins, append=len(drawn))
        place = np.arange(len(drawn)) - np.repeat(begins, counts)  # within the prompt
        group = np.cumsum(place % size == 0) - 1
        turn = rng.permutation(int(group[-1]) + 1)
        return drawn[np.argsort(turn[group], kind="stable")]
