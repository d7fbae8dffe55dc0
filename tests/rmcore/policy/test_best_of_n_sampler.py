"""The sampler's answer is the best of what it drew, whatever gives the rewards."""

import numpy as np
import pytest
import torch

import small_policies as policies
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import Message
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.policy.sampling.best_of_n_sampler import BestOfNSampler

PROMPTS = ["What is 2 + 2?", (Message("user", "Hi"), Message("assistant", "?"), Message("user", "A")), "Why?"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=policies.STOPS))


class Rewards:
    """A reward for each response by a rule."""

    def __init__(self, rule):
        self.rule = rule

    def score(self, prompts, responses):
        assert len(prompts) == len(responses)
        return np.array([self.rule(response) for response in responses])


def sampler(policy, rewards, n=6, **options):
    return BestOfNSampler(policy, rewards, n, max_new_tokens=8, engine="generate", device="cpu", **options)


@pytest.mark.slow
def test_the_answer_is_the_best_of_n_by_the_models_own_rewards(policy):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=3, device=torch.device("cpu"))
    found = sampler(policy, rm).sample(PROMPTS)
    assert [one.prompt for one in found] == PROMPTS
    for one in found:
        assert len(one.responses) == len(one.rewards) == 6
        assert one.rewards == pytest.approx(rm.score([one.prompt] * 6, one.responses), abs=1e-5)
        assert one.reward == one.rewards.max() == one.rewards[one.responses.index(one.response)]
        assert 0 <= one.kl <= nominal_kl(6) + 1e-12
        assert one.all_equal == (len(set(one.responses)) == 1)


@pytest.mark.slow
def test_the_same_call_draws_the_same_and_another_seed_others(policy):
    length = Rewards(len)
    first, again = sampler(policy, length), sampler(policy, length)
    draws = [one.responses for one in first.sample(PROMPTS)]
    assert [one.responses for one in again.sample(PROMPTS)] == draws
    assert [one.responses for one in first.sample(PROMPTS)] == draws
    assert [one.responses for one in sampler(policy, length, seed=1).sample(PROMPTS)] != draws


def test_where_nothing_can_be_chosen_the_first_is_taken_and_that_is_told(policy):
    for one in sampler(policy, Rewards(lambda response: 1.5)).sample(PROMPTS):
        assert one.all_equal
        assert one.response == one.responses[0]
        assert one.kl == pytest.approx(0)
    [alone] = sampler(policy, Rewards(len), n=1).sample(PROMPTS[:1])
    assert (alone.kl, alone.reward) == (pytest.approx(0), len(alone.response))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_named(policy, broken):
    [target] = sampler(policy, Rewards(len), n=1).sample(PROMPTS[:1])
    rewards = Rewards(lambda response: broken if response == target.response else 0.0)
    with pytest.raises(ModelError) as caught:
        sampler(policy, rewards, n=1).sample(PROMPTS[:1])
    said = str(caught.value)
    assert f"gave {broken} for the response {target.response[:60]!r}"[:-1] in said
    assert "'What is 2 + 2?'" in said


def test_edges(policy):
    assert sampler(policy, Rewards(len)).sample([]) == []
    with pytest.raises(DataError, match="too long"):
        sampler(policy, Rewards(len)).sample(["long " * 1100])
    with pytest.raises(ConfigError, match="num_samples=0"):
        sampler(policy, Rewards(len), n=0)
