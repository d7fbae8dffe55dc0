"""The protocol of a sampler, which draws responses of a policy to prompts, one prompt at a time.

Two do it alike, `generate_sampler` and `vllm_sampler`: from the whole distribution at a temperature (no top-k, top-p
or penalty, whatever the policy's folder recommends), ended by the same tokens.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rmcore.core.errors import ConfigError, ModelError
from rmcore.policy.policy import Policy

LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is lower to this, silently."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response that was drawn."""

    prompt_index: int
    sample: int
    """Its number among the samples of its prompt, from 0."""
    response: str
    """Without special tokens; empty where the policy ended at once."""
    num_tokens: int
    """Tokens drawn, with the one that ended it."""
    finished: bool
    """Whether the policy ended it; else it was cut at max_new_tokens."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How many samples of each prompt, and how they are drawn.

    Raises:
        ConfigError: a number is out of its range.
    """

    num_samples: int
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ConfigError(
                f"num_samples={self.num_samples} and max_new_tokens={self.max_new_tokens}; both are at least 1."
            )
        if not (math.isfinite(self.temperature) and self.temperature >= LOWEST_TEMPERATURE):
            raise ConfigError(
                f"temperature={self.temperature:g}, from which nothing can be drawn; take {LOWEST_TEMPERATURE} or more."
            )


Keep = Callable[[Sequence[Sample]], None]
"""Called with all samples of one prompt, in their order, as soon as they are there."""


class Sampler(Protocol):
    """Draws samples in its own way."""

    name: str

    def draw(
        self, policy: Policy, prompt_ids: Mapping[int, Sequence[int]], settings: SamplingSettings, keep: Keep
    ) -> None:
        """Draw the samples of the prompts {index: token ids}, and hand each prompt's to `keep`, in any order.

        What is drawn for a prompt depends on its index and not on which others are requested.

        Raises:
            ModelError: the policy cannot be loaded, or its weights give no probabilities.
            ServingError: vLLM did not start, or died too often.
        """


def broken_weights(policy: Policy) -> ModelError:
    """The error where no probabilities can be made of a policy's logits."""
    return ModelError(
        f"the policy {policy.name} gave logits that are NaN or infinite: its weights are broken. Train it again or "
        "restore the folder."
    )


def prompt_seed(settings: SamplingSettings, prompt_index: int) -> int:
    """The seed of one prompt's samples, below 2^56 and far from that of other prompts."""
    digest = hashlib.sha256(f"samples {settings.seed} {prompt_index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def as_sample(policy: Policy, prompt_index: int, number: int, ids: Sequence[int]) -> Sample:
    """The sample of token ids as they were drawn; what follows a stop token does not count."""
    end = next((place for place, token in enumerate(ids) if token in policy.stop_ids), None)
    text = policy.decode(ids[:end])
    return Sample(prompt_index, number, text, len(ids) if end is None else end + 1, finished=end is not None)
