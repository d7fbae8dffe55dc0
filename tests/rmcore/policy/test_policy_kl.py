"""The KL estimate against the truth: over all responses of a tiny vocabulary its expectation is the KL itself."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rmcore.policy.grpo import policy_meter
from rmcore.policy.grpo.policy_meter import sequence_kl
from rmcore.policy.sft import Example

VOCABULARY, STOP, LONGEST = 5, 0, 3
PROMPT = (1, 2, 3)


def new_model(seed, scale=1.0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def responses():
    """Every response: ended by the stop token, or cut at the longest."""
    others = [token for token in range(VOCABULARY) if token != STOP]
    for length in range(LONGEST):
        yield from ((*words, STOP) for words in itertools.product(others, repeat=length))
    yield from itertools.product(others, repeat=LONGEST)


@torch.no_grad()
def log_probability(model, response, temperature):
    logits = model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1].double() / temperature
    return float(torch.log_softmax(logits, -1)[torch.arange(len(response)), list(response)].sum())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_expectation_is_the_kl(temperature):
    policy, reference = new_model(0), new_model(1)
    every = list(responses())
    ours = np.array([log_probability(policy, response, temperature) for response in every])
    theirs = np.array([log_probability(reference, response, temperature) for response in every])
    assert math.isclose(np.exp(ours).sum(), 1, abs_tol=1e-6)
    truth = np.exp(ours) @ (ours - theirs)
    found = sequence_kl(policy, reference, [Example(PROMPT, response) for response in every], temperature)
    assert truth > 0.1
    assert np.exp(ours) @ found == pytest.approx(truth, rel=1e-5)
    spread = np.exp(ours) @ (found - truth) ** 2
    assert spread < np.exp(ours) @ (ours - theirs - truth) ** 2  # than that of log p - log q


def test_it_is_zero_for_the_same_model_and_never_negative():
    policy, sharp = new_model(0), new_model(0, scale=9.0)
    examples = [Example(PROMPT, response) for response in responses()]
    assert np.array_equal(sequence_kl(policy, policy, examples), np.zeros(len(examples)))
    assert (sequence_kl(sharp, policy, examples) >= 0).all()
    first = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()  # rules a token out, which adds nothing
    second = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log()
    assert float(policy_meter._kl(first, second)) == pytest.approx(0.5 * math.log(2))
