"""Several rewards in one GRPO training: each normalised within its groups, whatever its unit, and what each adds."""

import math
import shutil
import statistics

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoTokenizer

import small_policies as policies
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError, DataError, TrainingError
from rmcore.data.pair import Message
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.policy.grpo.group_reward import PARTS_KEY, REWARDS_KEY
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.several_rewards import (
    FUNCTION_ROUNDING,
    FurtherReward,
    further_rewards,
    normalized,
    shares,
    summed,
    weighted_parts,
)
from rmcore.policy.judge import HookJudge, ModelJudge
from rmcore.policy.policy import Policy
from tests.support.turn_fields import TOOLS_TURN

WHOLE = st.integers(-1000, 1000)
"""Rewards whose differences are either nothing or far from rounding."""
PROMPTS = ["What is 2 + 2?", "What is 2 + 3?", "What is 7 + 3?"]
SMALL = RlhfConfig(steps=2, prompts_per_step=3, group_size=4, measure_every=1, learning_rate=1e-3)


@st.composite
def steps(draw):
    """(K, N) rewards of a step, the size of its groups, and K weights."""
    size, groups, kinds = draw(st.integers(2, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    one = st.lists(WHOLE, min_size=size * groups, max_size=size * groups)
    rewards = np.array(draw(st.lists(one, min_size=kinds, max_size=kinds)), dtype=np.float64)
    return rewards, size, draw(st.lists(st.sampled_from([-2.0, -0.3, 0.1, 1.0, 7.5]), min_size=kinds, max_size=kinds))


def by_hand(rewards, size, weights):
    """The sums, group by group in Python's own numbers."""
    found = []
    for first in range(0, rewards.shape[1], size):
        for place in range(first, first + size):
            total = 0.0
            for row, weight in zip(rewards, weights, strict=True):
                group = row[first : first + size].tolist()
                spread = statistics.stdev(group)
                total += weight * (row[place] - statistics.fmean(group)) / spread if spread else 0.0
            found.append(total)
    return found


def parts_of(rewards, weights, size):
    """What rewards of functions add."""
    return weighted_parts(rewards, weights, size, [FUNCTION_ROUNDING] * len(rewards))


@pytest.mark.slow
@given(steps())
def test_sums_are_those_by_hand(step):
    rewards, size, weights = step
    np.testing.assert_allclose(summed(parts_of(rewards, weights, size)), by_hand(*step), atol=1e-10)


@given(steps(), st.sampled_from([1e-30, 1e-3, 1000.0, 1e30, 1e300]))
def test_the_unit_of_a_reward_changes_nothing(step, scale):
    rewards, size, weights = step
    other = rewards.copy()
    other[0] *= scale
    np.testing.assert_allclose(parts_of(other, weights, size), parts_of(rewards, weights, size), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_rewards_and_of_groups_changes_no_bit(step, random):
    rewards, size, weights = step
    before = np.array(summed(parts_of(rewards, weights, size)))
    order = random.sample(range(len(weights)), len(weights))
    assert summed(parts_of(rewards[order], [weights[one] for one in order], size)) == before.tolist()
    groups = random.sample(range(rewards.shape[1] // size), rewards.shape[1] // size)
    places = [group * size + one for group in groups for one in range(size)]
    assert summed(parts_of(rewards[:, places], weights, size)) == before[places].tolist()


@given(steps())
def test_shares_are_whole_and_groups_are_centred(step):
    rewards, size, weights = step
    parts = parts_of(rewards, weights, size)
    assert np.isfinite(parts).all()
    np.testing.assert_allclose(parts.reshape(len(parts), -1, size).sum(axis=2), 0, atol=1e-9)
    found = shares(parts)
    if found is None:
        assert not np.any(summed(parts))
    else:
        total = np.array(summed(parts))
        assert sum(found) == pytest.approx(1, abs=1e-6 * max(1.0, np.abs(parts).max() ** 2 / (total @ total)))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e6 / 3, 1e300, 5e-324])
def test_a_group_of_equal_rewards_adds_nothing(size, value):
    assert not normalized(np.full((1, 2 * size), value), size, [FUNCTION_ROUNDING]).any()


def test_rounding_of_float32_is_no_difference():
    close = np.nextafter(np.float32(2.7), np.float32(3))
    rewards = np.array([[2.7, 2.7, close, 2.7]], dtype=np.float32).astype(np.float64)
    assert not normalized(rewards, 4, [FurtherReward(ModelJudge("other", None), 1.0).rounding]).any()


@given(steps(), st.sampled_from([0.0, 1e3, -1e6, 2.0**30]))
@example((np.array([[0.0, 0.5, 0.9, 0.2]]), 4, [1.0]), 1e6)
def test_what_a_function_adds_to_all_of_its_rewards_changes_nothing(step, offset):
    rewards, size, weights = step
    roundings = [one.rounding for one in further(len) * len(weights)]
    found = weighted_parts(rewards + offset, weights, size, roundings)
    np.testing.assert_allclose(found, weighted_parts(rewards, weights, size, roundings), atol=1e-5)


# --- trainings -------------------------------------------------------------------------------------------------------


class Lengths:
    """The own reward: the response's length."""

    def score(self, rollouts):
        rewards = [float(len(rollout.steps[0].completion)) for rollout in rollouts]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.meta.update(rm_score=reward, rm_score_version=1)
        return rewards

    def wait_ready(self, timeout_s):
        """Always there."""


def further(function, weight=0.5):
    return (FurtherReward(HookJudge("mine:one", lambda prompt, response: float(function(response))), weight),)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=policies.STOPS))


def trained(policy, out, more, settings=SMALL, **options):
    """The advantages of each step as TRL has them, the records, and the weights in the end."""
    advantages, seen = [], []
    options |= {"record": lambda step, rollouts, credits: seen.append((rollouts, credits))}
    one = make_grpo_with_rm(
        policy, PROMPTS, Lengths(), out=out, settings=settings, further=more, max_new_tokens=12, device="cpu", **options
    )
    whole = one._generate_and_score_completions

    def watched(inputs):
        found = whole(inputs)
        advantages.append(found["advantages"].double().numpy())
        return found

    one._generate_and_score_completions = watched
    one.train()
    return advantages, seen, torch.cat([value.flatten() for value in one.model.state_dict().values()])


@pytest.mark.slow
def test_what_trl_trains_on_is_gdpo(policy, tmp_path):
    advantages, seen, _ = trained(policy, tmp_path, further(lambda text: text.count("a"), -0.7))
    assert len(advantages) == SMALL.steps
    for found, (rollouts, credits) in zip(advantages, seen, strict=True):
        rewards = np.array([rollout.meta[REWARDS_KEY] for rollout in rollouts]).T
        assert rewards[0].tolist() == [len(rollout.steps[0].completion) for rollout in rollouts]
        assert rewards[1].tolist() == [rollout.steps[0].completion.count("a") for rollout in rollouts]
        sums = by_hand(rewards, SMALL.group_size, [1.0, -0.7])
        np.testing.assert_allclose(credits, sums, atol=1e-10)
        assert [sum(rollout.meta[PARTS_KEY]) for rollout in rollouts] == pytest.approx(credits)
        np.testing.assert_allclose(found, np.array(sums) / (statistics.stdev(sums) + 1e-4), atol=1e-5)


@pytest.mark.slow
def test_the_price_of_length_is_part_of_the_own_reward(policy, tmp_path):
    credit = RewardModelCreditAssigner(LengthCredit(0.5), mode="add")
    settings = SMALL.model_copy(update={"steps": 1})
    _, seen, _ = trained(policy, tmp_path, further(len), settings, credit=credit)
    for rollout in seen[0][0]:
        own, other = rollout.meta[REWARDS_KEY]
        assert own == pytest.approx(other - 0.5 * rollout.meta["num_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("reward", [math.nan])
def test_a_further_reward_that_is_no_number_stops_before_the_step(policy, tmp_path, reward):
    class Broken:
        name = "other/best"

        def rewards(self, prompts, responses):
            return np.full(len(prompts), reward)

    with pytest.raises(TrainingError, match=r"other/best's reward of .* is (nan|inf)"):
        trained(policy, tmp_path, (FurtherReward(Broken(), 1.0),))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf, True, "much"])
def test_a_weight_that_says_nothing_is_refused(weight):
    with pytest.raises(ValidationError, match="more_rewards"):
        RlhfConfig(more_rewards={"other/best": weight})


@pytest.mark.parametrize("named", ["not/there", "openai:judge@http://127.0.0.1:1", "not_there:reward"])
def test_a_reward_that_is_not_there_is_refused_by_its_setting(named):
    with pytest.raises(ConfigError, match=r"rlhf\.more_rewards"):
        further_rewards({named: 1.0}, PROMPTS, "cpu")


@pytest.mark.slow
def test_each_reward_model_reads_by_its_own_template(tiny_folder, tmp_path):
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(other)
    responses = ["a", "b", "c"]
    found = further_rewards({str(tiny_folder): 1.0, str(other): 2.0}, PROMPTS, "cpu")
    rewards = [one.judge.rewards(PROMPTS, responses).tolist() for one in found]
    alone = [
        BradleyTerryRM.from_pretrained(folder, device="cpu").score(PROMPTS, responses)
        for folder in (tiny_folder, other)
    ]
    assert rewards == [one.tolist() for one in alone]
    assert rewards[0] != rewards[1]


def test_a_reward_model_that_cannot_read_the_prompts_is_refused_before_a_step(tiny_folder):
    asked = [PROMPTS[0], (TOOLS_TURN, Message("user", PROMPTS[1]))]
    with pytest.raises(DataError, match="cannot read 1 of the 2 prompts"):
        further_rewards({str(tiny_folder): 1.0}, asked, "cpu")
