"""How far a trained policy has moved: KL from the policy that it started as, in nats a response."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmcore.core.arrays import FloatArray
from rmcore.policy.sft import Example, padded_examples

TOKENS_AT_ONCE = 8192
"""Padded tokens of one pass; each holds two rows of the vocabulary."""


@torch.no_grad()
def sequence_kl(policy: Any, reference: Any, examples: Sequence[Example], temperature: float = 1.0) -> FloatArray:
    """Estimates of KL(policy || reference), one from each response drawn from the policy: (E,) float64, in nats.

    Each is the sum over the response's tokens of the exact KL between the two next-token distributions there. Its mean
    is unbiased like that of log p - log q, never negative, and varies less.

    Args:
        policy: causal model that drew the responses.
        reference: what the distance is from; of the same vocabulary.
        examples: E prompts with responses.
        temperature: that the responses were drawn at; both distributions are taken at it.

    Source:
        Amini, Vieira and Cotterell 2025, Better estimation of the KL divergence between language models,
        arXiv:2504.10637, eq. 9 (Rao-Blackwellised Monte Carlo).
    """
    found = torch.zeros(len(examples), dtype=torch.float64)
    order = sorted(range(len(examples)), key=lambda index: examples[index].num_tokens)
    modes = policy.training, reference.training
    policy.eval()
    reference.eval()
    while order:
        longest = examples[order[-1]].num_tokens
        taken = [order.pop() for _ in range(min(len(order), max(1, TOKENS_AT_ONCE // longest)))]
        ids, real, is_response = padded_examples([examples[index] for index in taken], policy.device)
        first, second = (
            torch.log_softmax(model(input_ids=ids, attention_mask=real).logits[:, :-1].double() / temperature, dim=-1)
            for model in (policy, reference)
        )
        found[taken] = (_kl(first, second) * is_response[:, 1:]).sum(dim=1).cpu()
    policy.train(modes[0])
    reference.train(modes[1])
    return found.numpy()


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Of log-probabilities (..., V); a token that the first rules out adds nothing."""
    return torch.where(first > -torch.inf, first.exp() * (first - second), 0.0).sum(dim=-1)
