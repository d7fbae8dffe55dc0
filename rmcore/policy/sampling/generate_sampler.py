"""Samples by transformers' `generate`: one prompt at a time, in this process, the same on every run.

Slower than vLLM and everywhere there. Each prompt has a seed of its own, so an interrupted call that continues with the
missing prompts gives what an uninterrupted one gives, on the same device and number of threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rmcore.policy.policy import Policy
from rmcore.policy.policy_weights import load_weights
from rmcore.policy.sampling.sampler import Keep, Sample, SamplingSettings, as_sample, broken_weights, prompt_seed

TOKENS_AT_ONCE = 65_536
"""Prompt and response tokens of the samples drawn together: 8 GiB of keys and values at 8 B parameters (Llama 3)."""


class GenerateSampler:
    """Draws with the weights in this process, which stay loaded for the next call with the same policy.

    Args:
        device: where it computes.
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
