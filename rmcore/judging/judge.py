"""The interface of all judges: people's scores, functions, reward models and language models."""

from collections.abc import Sequence
from typing import Protocol

from rmcore.core.arrays import FloatArray
from rmcore.data.pair import Prompt


class Judge(Protocol):
    """A judge of single responses, whose scores count as the true reward."""

    @property
    def name(self) -> str:
        """As people read it."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """The true reward of N responses, (N,), finite; NaN where a language model's reply could not be read.

        Raises:
            DataError: there is none for a response.
        """
