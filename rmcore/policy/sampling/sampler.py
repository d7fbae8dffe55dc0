"""Samplers draw responses of a policy to prompts, one prompt at a time: the protocol, and transformers' `generate`.

`GenerateSampler` and `vllm_sampler.VllmSampler` do it alike: from the whole distribution at a temperature (no top-k,
top-p or penalty, whatever the policy's folder recommends), ended by the same tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rmcore.core.errors import ConfigError, ModelError
from rmcore.policy.policy import Policy, load_weights

LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is lower to this, silently."""
TOKENS_AT_ONCE = 65_536
"""Prompt and response tokens of the samples drawn together: 8 GiB of keys and values at 8 B parameters (Llama 3)."""


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


class GenerateSampler:
    """Draws by transformers' `generate`, one prompt at a time, with the weights in this process; they stay loaded.

    Slower than vLLM and everywhere there. Each prompt has a seed of its own, so an interrupted call that continues with
    the missing prompts gives what an uninterrupted one gives, on the same device and number of threads.
    """

    name = "generate"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._loaded: tuple[Policy, Any] | None = None

    def draw(
        self, policy: Policy, prompt_ids: Mapping[int, Sequence[int]], settings: SamplingSettings, keep: Keep
    ) -> None:
        """See `Sampler.draw`. The caller's random states are left as they were."""
        if self._loaded is None or self._loaded[0] is not policy:
            self._loaded = None  # room for the next
            self._loaded = policy, _load(policy, self.device)
        for index, ids in prompt_ids.items():
            with _seeded(prompt_seed(settings, index), self.device):
                keep(_draw_prompt(self._loaded[1], policy, index, ids, settings))


def _load(policy: Policy, device: torch.device) -> Any:
    return load_weights(policy, getattr(torch, policy.compute_dtype(device.type))).to(device).eval()


def _draw_prompt(
    model: Any, policy: Policy, index: int, ids: Sequence[int], settings: SamplingSettings
) -> list[Sample]:
    """All samples of one prompt, in chunks that memory holds."""
    longest = len(ids) + settings.max_new_tokens
    at_once = max(1, TOKENS_AT_ONCE // longest)
    prompt = torch.tensor([list(ids)], device=model.device)
    samples: list[Sample] = []
    while len(samples) < settings.num_samples:
        drawn = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=whole_distribution(
                policy,
                settings.temperature,
                settings.max_new_tokens,
                num_return_sequences=min(at_once, settings.num_samples - len(samples)),
            ),
            logits_processor=LogitsProcessorList([_RefuseBroken(policy)]),
        )
        for row in drawn[:, len(ids) :].tolist():
            samples.append(as_sample(policy, index, len(samples), row))
    return samples


def whole_distribution(policy: Policy, temperature: float, max_new_tokens: int, **others: Any) -> GenerationConfig:
    """Sampling from all tokens at a temperature, until one that ends a response."""
    return GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(policy.stop_ids) or None,
        pad_token_id=policy.stop_ids[0] if policy.stop_ids else None,  # fills up what ended earlier
        **others,
    )


class _RefuseBroken(LogitsProcessor):
    """Stops where no probabilities can be made of the logits: CUDA would lose the process, other places say little."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Pass (rows, vocabulary) logits on."""
        if not torch.isfinite(scores.amax(dim=-1)).all():  # NaN anywhere, or infinity; -inf only rules a token out
            raise broken_weights(self.policy)
        return scores


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw under `seed`; afterwards the random states of the CPU and of `device` are as they were."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
