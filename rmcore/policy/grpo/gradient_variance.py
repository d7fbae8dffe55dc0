"""How noisy the policy gradient would be: its variance by sample, beside two numbers that are used in its place.

REINFORCE with a baseline estimates the gradient by g = (r - b) grad log pi(y), averaged over samples (Williams 1992).
The noise of one sample is trace Cov(g) = E|g|^2 - |E g|^2, which E|g|^2 = E[(r - b)^2 |grad log pi|^2] bounds from
above, always. The product Var(r) E|grad log pi|^2 takes reward and gradient for independent: a heuristic, and no bound.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, silent
from rmcore.policy.sft import Example, response_log_probs


@dataclass(frozen=True, slots=True)
class GradientVariance:
    """Means over prompts of traces, in (reward unit)^2 / (parameter unit)^2; only their ratios mean something.

    Attributes:
        variance: trace of the covariance of one sample's gradient.
        bound: E[(r - b)^2 |grad log pi|^2], with b the mean reward of the prompt's samples; never below the variance.
        product: Var(r) E|grad log pi|^2.
        num_violations: prompts whose variance exceeds the product, which therefore bounds nothing.
        num_prompts, num_samples: what it is over.
    """

    variance: float
    bound: float
    product: float
    num_violations: int
    num_prompts: int
    num_samples: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def gradient_variance(
    model: nn.Module,
    examples: Sequence[Sequence[Example]],
    rewards: Sequence[FloatArray],
    report: Report = silent,
) -> GradientVariance:
    """Estimate it on samples of C prompts, by one backward pass a sample.

    Args:
        model: the policy, a causal model; its gradients are cleared.
        examples: token ids of the samples of each prompt, at least three.
        rewards: of the same samples, in logits.
        report: told of the prompts done.

    Raises:
        DataError: a prompt has fewer than three samples, or the lists do not fit.
        ModelError: a gradient is not finite.
    """
    if min(map(len, examples), default=0) < 3 or [*map(len, examples)] != [*map(len, rewards)]:
        raise DataError("the variance of a gradient needs at least three scored samples of each prompt; draw more.")
    found = []
    for index, (pool, given) in enumerate(zip(examples, rewards, strict=True)):
        found.append(_of_prompt(model, pool, given))
        report(index + 1, len(examples), "prompts")
    model.zero_grad(set_to_none=True)
    variance, bound, product = (sum(column) / len(found) for column in zip(*found, strict=True))
    return GradientVariance(
        variance,
        bound,
        product,
        num_violations=sum(variance > product for variance, _, product in found),
        num_prompts=len(found),
        num_samples=sum(len(pool) for pool in examples),
    )


def _of_prompt(model: nn.Module, examples: Sequence[Example], rewards: FloatArray) -> tuple[float, float, float]:
    """Variance, bound and product of one prompt."""
    num = len(examples)
    advantages = rewards - rewards.mean()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
    squares = []
    for example, advantage in zip(examples, advantages, strict=True):
        model.zero_grad(set_to_none=True)
        response_log_probs(model, [example]).sum().backward()
        square = 0.0
        for parameter, kept in zip(trained, total, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.double()
                square += float(gradient.square().sum())
                kept.add_(gradient, alpha=float(advantage))
        squares.append(square)
    norms = torch.tensor(squares, dtype=torch.float64)
    weighted = torch.as_tensor(advantages, dtype=torch.float64).square() * norms
    if not torch.isfinite(weighted).all():
        raise ModelError("a gradient of the policy is not finite; its weights or a reward are broken.")
    # Over num - 1, as in any sample variance whose mean was estimated: here of the rewards, and of the gradients.
    bound = float(weighted.sum()) / (num - 1)
    length_of_mean = sum(float(kept.square().sum()) for kept in total) / num**2
    variance = bound - length_of_mean * num / (num - 1)
    return variance, bound, float(rewards.var(ddof=1)) * float(norms.mean())
