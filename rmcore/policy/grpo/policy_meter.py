"""Measures a policy in training on held-out prompts: KL, proxy and true reward, win rate, length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import GenerationConfig

from rmcore.core.arrays import FloatArray
from rmcore.data.pair import Prompt
from rmcore.judging.judge import Judge
from rmcore.policy.grpo.group_reward import LocalReward
from rmcore.policy.judge import readable_rewards
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.best_of_n import pooled_deviation
from rmcore.policy.sampling.sampler import whole_distribution
from rmcore.policy.sft import Example, longest_first, padded_examples

ROWS_AT_ONCE = 256
"""Responses drawn together."""
TOKENS_AT_ONCE = 8192
"""Padded tokens of one pass; each holds two rows of the vocabulary."""
QUANTITIES = ("kl", "proxy", "gold", "win_rate", "num_tokens")
"""Columns of a measurement."""


@dataclass(frozen=True)
class StartPools:
    """Samples of the start policy for C held-out prompts, drawn before the training.

    prompts: (C,)
    responses: one list a prompt, of two samples or more.
    gold: (K,) of each prompt, by the judge; None where nobody judges.
    """

    prompts: Sequence[Prompt]
    responses: Sequence[Sequence[str]]
    gold: Sequence[FloatArray] | None


class PolicyMeter:
    """Measures a policy in memory. Gains are over the start policy's samples of the same prompt, in their pooled
    standard deviation within prompts, which is the unit of best-of-n's curves.

    Args:
        policy: what prompts and responses mean in token ids.
        reference: the start policy's weights, in evaluation mode; KL is from it.
        start: its samples.
        reward: the reward model in use; when it changes, the next measurement uses it, for the start samples too.
        judge: who judges; None: the true reward and win rate are NaN.
        num_samples: of each prompt, at each measurement.
        temperature, max_new_tokens: of the sampling.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Any,
        start: StartPools,
        reward: LocalReward,
        judge: Judge | None,
        *,
        num_samples: int,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.policy, self.reference, self.start, self.reward, self.judge = policy, reference, start, reward, judge
        self.num_samples, self.temperature, self.max_new_tokens = num_samples, temperature, max_new_tokens
        self.prompt_ids = policy.fitting_ids(start.prompts, max_new_tokens)
        self.sampling = whole_distribution(policy, temperature, max_new_tokens)
        self._start_rewards: list[FloatArray] | None = None

    def measure(self, model: Any, *, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Sample from `model` and judge; its mode and all random states stay as they were.

        Returns:
            One row a prompt with `QUANTITIES`, the means over its samples; and the samples, one row each: prompt,
            response, reward, gold, num_tokens, kl.
        """
        prompts = [index for index in range(len(self.prompt_ids)) for _ in range(self.num_samples)]
        drawn = draw(model, self.policy, [self.prompt_ids[index] for index in prompts], self.sampling, seed)
        examples = [
            Example(tuple(self.prompt_ids[index]), tuple(ids)) for index, ids in zip(prompts, drawn, strict=True)
        ]
        texts = [self.policy.response_text(ids) for ids in drawn]
        asked = [self.start.prompts[index] for index in prompts]
        samples = pd.DataFrame(
            {
                "prompt": prompts,
                "response": texts,
                "reward": self.reward(asked, texts),
                "gold": np.nan if self.judge is None else self.judge.rewards(asked, texts),
                "num_tokens": [len(ids) for ids in drawn],
                "kl": sequence_kl(model, self.reference, examples, self.temperature),
            }
        )
        return self._by_prompt(samples), samples

    def _by_prompt(self, samples: pd.DataFrame) -> pd.DataFrame:
        proxy = self.start_rewards()
        # Units of the start samples, not of these: a policy that collapses would shrink its own unit.
        scale = pooled_deviation(proxy)
        gold = self.start.gold
        gold_scale = pooled_deviation(gold) if gold is not None else 1.0
        rows = []
        for key, group in samples.groupby("prompt", sort=True):
            prompt = int(key)
            row = {
                "prompt": prompt,
                "kl": group["kl"].mean(),
                "proxy": (group["reward"].mean() - proxy[prompt].mean()) / scale,
                "gold": np.nan,
                "win_rate": np.nan,
                "num_tokens": group["num_tokens"].mean(),
            }
            if gold is not None:
                judged = readable_rewards(group["gold"].to_numpy(), "the judge")
                row["gold"] = (judged.mean() - gold[prompt].mean()) / gold_scale
                row["win_rate"] = win_rate(judged, gold[prompt])
            rows.append(row)
        return pd.DataFrame(rows)

    def start_rewards(self) -> list[FloatArray]:
        """Rewards of the start samples by the reward model in use: (K,) of each prompt."""
        if self._start_rewards is None:
            counts = [len(pool) for pool in self.start.responses]
            prompts = [prompt for prompt, count in zip(self.start.prompts, counts, strict=True) for _ in range(count)]
            rewards = self.reward(prompts, [text for pool in self.start.responses for text in pool])
            self._start_rewards = np.split(rewards, np.cumsum(counts)[:-1])
        return self._start_rewards


def win_rate(ours: FloatArray, theirs: FloatArray) -> float:
    """Share of pairs (one of ours, one of theirs) in which ours is judged higher; a tie is half a win."""
    difference = ours[:, None] - theirs[None, :]  # (N, M)
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def draw(
    model: Any, policy: Policy, prompts: Sequence[Sequence[int]], config: GenerationConfig, seed: int
) -> list[list[int]]:
    """One response to each of N prompts from a model in memory, as token ids up to the one that ended it.

    Prompts are padded in front and drawn `ROWS_AT_ONCE` together; random states are left as they were.
    """
    was_training = model.training
    model.eval()
    device = model.device
    pad = policy.stop_ids[0] if policy.stop_ids else 0
    drawn: list[list[int]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            chunk = prompts[first : first + ROWS_AT_ONCE]
            longest = max(map(len, chunk))
            # In front, so that every row continues from its own last token and what is new starts at one place.
            ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in chunk])  # (N, L)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in chunk])
            rows = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config)
            for row in rows[:, longest:].tolist():
                end = next((at for at, token in enumerate(row) if token in policy.stop_ids), None)
                drawn.append(row if end is None else row[: end + 1])
    model.train(was_training)
    return drawn


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
    kl = torch.zeros(len(examples), dtype=torch.float64)
    modes = policy.training, reference.training
    policy.eval()
    reference.eval()
    for taken in longest_first(examples, TOKENS_AT_ONCE):
        ids, real, is_response = padded_examples([examples[index] for index in taken], policy.device)
        first, second = (
            torch.log_softmax(model(input_ids=ids, attention_mask=real).logits[:, :-1].double() / temperature, dim=-1)
            for model in (policy, reference)
        )
        # Logits at place l are about token l + 1: (E, L - 1, V) against the mask of tokens 1 to L - 1.
        kl[taken] = (_kl(first, second) * is_response[:, 1:]).sum(dim=1).cpu()
    policy.train(modes[0])
    reference.train(modes[1])
    return kl.numpy()


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Sum the exact KL over a vocabulary's log-probabilities (..., V); a token that the first excludes adds nothing."""
    # 0 log 0 is 0 here, and -inf - -inf in floating point is NaN.
    return torch.where(first > -torch.inf, first.exp() * (first - second), 0.0).sum(dim=-1)
