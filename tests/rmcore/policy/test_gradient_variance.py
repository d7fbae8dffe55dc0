"""The variance of the policy gradient, against the covariance of gradients taken one sample at a time in float64."""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config

from rmcore.core.errors import DataError, ModelError
from rmcore.policy.grpo.gradient_variance import gradient_variance
from rmcore.policy.sft import Example

seeds = st.integers(0, 10_000)
VOCABULARY = 32


def new_model():
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@cache
def model():
    return new_model()


def draw(rng, num):
    """Samples of one prompt: token ids of differing lengths."""
    prompt = tuple(rng.integers(VOCABULARY, size=4).tolist())
    return [Example(prompt, tuple(rng.integers(VOCABULARY, size=int(rng.integers(1, 7))).tolist())) for _ in range(num)]


def gradients(examples):
    """(K, parameters) of log p(response | prompt), from the definition, one at a time."""
    rows = []
    for one in examples:
        logits = model()(input_ids=torch.tensor([one.prompt + one.response])).logits[0].double()
        logs = torch.log_softmax(logits, dim=1)
        start = len(one.prompt)
        total = sum(logs[start + place - 1, token] for place, token in enumerate(one.response))
        found = torch.autograd.grad(total, [*model().parameters()])
        rows.append(torch.cat([part.reshape(-1) for part in found]).numpy())
    return np.stack(rows)


def truth(examples, rewards):
    """Trace of the covariance of (r - mean r) grad log p."""
    advantages = rewards - rewards.mean()
    return float(np.var(advantages[:, None] * gradients(examples), axis=0, ddof=1).sum())


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=seeds, num=st.integers(3, 8))
def test_the_variance_is_the_trace_of_the_covariance(seed, num):
    rng = np.random.default_rng(seed)
    examples, rewards = draw(rng, num), rng.normal(size=num)
    found = gradient_variance(model(), [examples], [rewards])
    assert found.variance == pytest.approx(truth(examples, rewards), rel=1e-4)  # Qwen2 normalises in float32
    norms = (gradients(examples) ** 2).sum(axis=1)
    assert found.product == pytest.approx(np.var(rewards, ddof=1) * norms.mean(), rel=1e-4)


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=seeds, num=st.integers(3, 8), scale=st.floats(0.1, 10), level=st.floats(-5, 5))
def test_the_bound_holds_always_and_scales_as_the_variance_does(seed, num, scale, level):
    rng = np.random.default_rng(seed)
    examples, rewards = draw(rng, num), rng.standard_t(df=2, size=num)
    found = gradient_variance(model(), [examples], [rewards])
    assert found.variance <= found.bound
    moved = gradient_variance(model(), [examples], [scale * rewards + level])
    for name in ("variance", "bound", "product"):
        assert getattr(moved, name) == pytest.approx(scale**2 * getattr(found, name), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=seeds, half=st.integers(2, 4))
def test_where_all_advantages_have_one_size_the_product_is_the_bound(seed, half):
    """Reward and gradient cannot be dependent then, and the mean gradient is all that is between them."""
    rng = np.random.default_rng(seed)
    examples = draw(rng, 2 * half)
    rewards = rng.permutation(np.repeat([-1.0, 1.0], half))
    found = gradient_variance(model(), [examples], [rewards])
    assert found.product == pytest.approx(found.bound)
    mean = (rewards[:, None] * gradients(examples)).mean(axis=0)
    gap = (mean @ mean) * 2 * half / (2 * half - 1)
    assert found.bound - found.variance == pytest.approx(gap, rel=1e-4)
    assert found.num_violations == 0


def test_the_product_is_no_bound():
    """Where the samples of large gradients have the extreme rewards the variance exceeds it, and is counted."""
    rng = np.random.default_rng(0)
    examples = draw(rng, 10)
    order = np.argsort((gradients(examples) ** 2).sum(axis=1))
    rewards = np.zeros(10)
    rewards[order[-2:]] = -1.0, 1.0
    found = gradient_variance(model(), [examples, examples], [rewards, rng.permutation(np.repeat([-1.0, 1.0], 5))])
    assert found.num_violations == 1
    assert gradient_variance(model(), [examples], [rewards]).variance > np.var(rewards, ddof=1) * np.mean(
        (gradients(examples) ** 2).sum(axis=1)
    )


def test_prompts_are_averaged_and_counted():
    rng = np.random.default_rng(1)
    pools, rewards = [draw(rng, 3), draw(rng, 6)], [rng.normal(size=3), rng.normal(size=6)]
    seen = []
    both = gradient_variance(model(), pools, rewards, lambda done, total, _: seen.append((done, total)))
    each = [gradient_variance(model(), [pool], [given]) for pool, given in zip(pools, rewards, strict=True)]
    for name in ("variance", "bound", "product"):
        assert getattr(both, name) == pytest.approx(np.mean([getattr(one, name) for one in each]))
    assert (both.num_prompts, both.num_samples) == (2, 9)
    assert seen == [(1, 2), (2, 2)]
    assert json.loads(json.dumps(both.to_dict(), allow_nan=False)) == both.to_dict()


def test_equal_rewards_give_no_gradient_and_no_gradients_are_left_on_the_model():
    own = new_model()
    found = gradient_variance(own, [draw(np.random.default_rng(2), 4)], [np.full(4, 3.0)])
    assert (found.variance, found.bound, found.product, found.num_violations) == (0, 0, 0, 0)
    assert all(parameter.grad is None for parameter in own.parameters())


def test_frozen_parameters_have_no_part():
    rng = np.random.default_rng(3)
    examples, rewards = draw(rng, 5), rng.normal(size=5)
    own = new_model()
    for name, parameter in own.named_parameters():
        parameter.requires_grad = "norm" in name
    part = gradient_variance(own, [examples], [rewards])
    assert 0 < part.variance < gradient_variance(model(), [examples], [rewards]).variance


def test_what_cannot_be_estimated_is_refused():
    rng = np.random.default_rng(4)
    examples = draw(rng, 4)
    for pools, rewards in (
        ([], []),
        ([examples[:2]], [np.zeros(2)]),
        ([examples], [np.zeros(3)]),
        ([examples], [np.zeros(4), np.zeros(4)]),
    ):
        with pytest.raises(DataError, match="at least three scored samples"):
            gradient_variance(model(), pools, rewards)
    with pytest.raises(ModelError, match="not finite"):
        gradient_variance(model(), [examples], [np.array([0, 1, 2, math.nan])])
    broken = new_model()
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        gradient_variance(broken, [examples], [rng.normal(size=4)])
