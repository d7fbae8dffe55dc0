"""Who says what really counts, of single responses and of pairs: the gold world, or a function of the user's."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rmcore.config.data import GoldConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.named_function import call_named, load_function
from rmcore.data.gold.world import gold_reward, label_pair
from rmcore.data.pair import PreferencePair, Prompt, prompt_text

JUDGE_SETTING = "policy.judge"
JUDGE_MEANING = "a function of (prompt, response) that returns a number"


class Judge(Protocol):
    """Gives the gold reward, and labels."""

    @property
    def name(self) -> str:
        """As people read it."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """The gold reward of N responses, (N,), finite.

        Raises:
            DataError: there is none for a response.
        """

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """Which of two different responses is preferred; None where neither is.

        Raises:
            DataError: a response has no reward.
        """


@dataclass(frozen=True, slots=True)
class GoldJudge:
    """The gold world: its reward judges, and its annotator, who errs as in the training pairs, labels."""

    config: GoldConfig
    name: str = "the gold world"

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        both = zip(prompts, responses, strict=True)
        return np.array([gold_reward(prompt_text(prompt), response) for prompt, response in both], dtype=np.float64)

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """See `Judge`."""
        return label_pair(prompt_text(prompt), first, second, self.config, rng, "refresh")


@dataclass(frozen=True, slots=True)
class HookJudge:
    """A function of (prompt, response) -> number; the prompt as it is in the data, text or turns."""

    name: str
    function: Callable[[Prompt, str], Any]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        found = [self._reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return np.array(found, dtype=np.float64)

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """See `Judge`: the higher reward is preferred."""
        a, b = self._reward(prompt, first), self._reward(prompt, second)
        if a == b:
            return None
        chosen, rejected = (first, second) if a > b else (second, first)
        return PreferencePair(prompt=prompt, chosen=chosen, rejected=rejected)

    def _reward(self, prompt: Prompt, response: str) -> float:
        value = call_named(JUDGE_SETTING, self.name, self.function, prompt, response)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(
                f"{JUDGE_SETTING}={self.name} gave {value!r} for the response {response[:60]!r}; a finite number is "
                "expected for every response, empty ones included."
            )
        return float(value)


def judge_of(named: str | None, gold: GoldConfig | None) -> Judge | None:
    """The judge of a run: the named function, else the gold world on its own data, else nobody.

    Args:
        named: `policy.judge`.
        gold: the gold world, where the pairs are its own.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if named is not None:
        return HookJudge(named, load_function(JUDGE_SETTING, named, JUDGE_MEANING))
    return None if gold is None else GoldJudge(gold)
