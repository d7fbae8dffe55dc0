"""Supervised fine-tuning of a small policy: next-token prediction of the response, given the prompt.

Not a trainer to move to: it makes the start policy of a study in a minute on a laptop. A policy of your own is named as
a folder instead.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmcore.config.train import TrainConfig
from rmcore.core.errors import DataError, TrainingError
from rmcore.models.precision import precision_context
from rmcore.training.optimizers import OptimizerSet, make_optimizer, set_learning_rate

TOKEN_BUDGET = 8192
"""Padded tokens of one step: some 120 examples of the synthetic benchmark."""
POOL_STEPS = 8
"""Steps whose examples are sorted by length together, so that little is padded."""
WARMUP_STEPS = 20
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt and of the response after it, which ends with the end-of-turn token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt) + len(self.response)


def fine_tune(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    epochs: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, int, float], None],
) -> float:
    """Train a causal model in place, dropout off; the loss is the mean over the response tokens of a step.

    By Muon, which came to the loss of AdamW in two thirds of the steps on the tiny policy, with a cosine schedule.

    Args:
        model: a Hugging Face causal model, in float32 on its device; autocast to bf16 on a GPU.
        examples: what it is trained on.
        epochs: passes over them.
        lr: peak learning rate.
        seed: of the order.
        on_step: called with the steps done, the steps in all and the loss of the step, in nats a token.

    Returns:
        The mean loss of the last pass, in nats a response token.

    Raises:
        DataError: no examples, or one longer than a step's budget.
        TrainingError: the loss is not finite.
    """
    longest = max((example.num_tokens for example in examples), default=0)
    if not 0 < longest <= TOKEN_BUDGET:
        raise DataError(
            f"fine-tuning got {len(examples)} examples of at most {longest} tokens, and a step holds {TOKEN_BUDGET}; "
            "pass at least one, and none longer than that."
        )
    rng = random.Random(f"sft {seed}")  # noqa: S311 - an order, not cryptography
    passes = [list(_batches(examples, rng)) for _ in range(epochs)]
    num_steps = sum(len(batches) for batches in passes)
    settings = TrainConfig(optimizer="muon", lr=lr, warmup_steps=WARMUP_STEPS)
    optimizer = make_optimizer(model, settings)
    model.eval()  # no dropout
    done, mean_loss = 0, 0.0
    for batches in passes:
        total, num_tokens = 0.0, 0
        for batch in batches:
            set_learning_rate(optimizer, settings, done, num_steps)
            count = sum(len(examples[index].response) for index in batch)
            loss = _step(model, optimizer, [examples[index] for index in batch], count)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the policy's loss is {loss} at step {done} of fine-tuning at the learning rate {lr:g}: the "
                    "weights of policy.base are broken, or that is too fast for them. Name another base, or a policy "
                    "that you fine-tuned yourself as policy.name."
                )
            done += 1
            total, num_tokens = total + loss * count, num_tokens + count
            on_step(done, num_steps, loss)
        mean_loss = total / num_tokens
    return mean_loss


def _step(model: nn.Module, optimizer: OptimizerSet, examples: Sequence[Example], num_tokens: int) -> float:
    """One update; its loss in nats a response token. Nothing is updated where that is not finite."""
    device = next(model.parameters()).device
    with precision_context("bf16" if device.type == "cuda" else "fp32", device):
        loss = -response_log_probs(model, examples).sum() / num_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    value = float(loss.detach())
    if math.isfinite(value):
        optimizer.step()
    return value


def _batches(examples: Sequence[Example], rng: random.Random) -> Iterator[list[int]]:
    """Indices of each step: shuffled, sorted by length within pools of some steps, cut at the budget, shuffled."""
    order = list(range(len(examples)))
    rng.shuffle(order)
    mean = sum(example.num_tokens for example in examples) / len(examples)
    pool = max(1, int(POOL_STEPS * TOKEN_BUDGET / mean))
    for start in range(0, len(order), pool):
        ranked = sorted(order[start : start + pool], key=lambda index: examples[index].num_tokens)
        batches: list[list[int]] = [[]]
        for index in ranked:
            if (len(batches[-1]) + 1) * examples[index].num_tokens > TOKEN_BUDGET:
                batches.append([])
            batches[-1].append(index)
        rng.shuffle(batches)
        yield from batches


def response_log_probs(model: nn.Module, examples: Sequence[Example], temperature: float = 1.0) -> Tensor:
    """Give log p(response | prompt) of E examples at a temperature, in nats: (E,), with its graph."""
    ids, real, is_response = padded_examples(examples, next(model.parameters()).device)
    logits = model(input_ids=ids, attention_mask=real).logits[:, :-1].float() / temperature
    chosen = torch.gather(logits, 2, ids[:, 1:, None]).squeeze(2) - torch.logsumexp(logits, dim=2)
    return (chosen * is_response[:, 1:]).sum(dim=1)


def longest_first(examples: Sequence[Example], tokens_at_once: int) -> Iterator[list[int]]:
    """Places of examples of about one length, as many as are padded to `tokens_at_once` together, or one alone."""
    order = sorted(range(len(examples)), key=lambda index: examples[index].num_tokens)
    while order:
        longest = examples[order[-1]].num_tokens
        yield [order.pop() for _ in range(min(len(order), max(1, tokens_at_once // longest)))]


def padded_examples(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, which of them are real and which are of the response: (E, L) each, padded behind with zeros."""
    longest = max(example.num_tokens for example in examples)
    ids = torch.zeros((len(examples), longest), dtype=torch.long)
    is_response = torch.zeros_like(ids, dtype=torch.bool)
    real = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : example.num_tokens] = torch.tensor(example.prompt + example.response)
        is_response[row, len(example.prompt) : example.num_tokens] = True
        real[row, : example.num_tokens] = 1
    return ids.to(device), real.to(device), is_response.to(device)
