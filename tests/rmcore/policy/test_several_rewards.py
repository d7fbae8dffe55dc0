"""Several rewards in one GRPO training: each is normalised within its groups before they are summed."""

import math
import shutil
import statistics

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

import small_policies as policies
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError, DataError, TrainingError
from rmcore.data.pair import Message
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.policy.grpo.group_reward import REWARDS_KEY
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.several_rewards import further_rewards
from rmcore.policy.judge import HookJudge
from rmcore.policy.policy import Policy
from tests.support.turn_fields import TOOLS_TURN

PROMPTS = ["What is 2 + 2?", "What is 2 + 3?", "What is 7 + 3?"]
SMALL = RlhfConfig(steps=2, prompts_per_step=3, group_size=4, measure_every=1, learning_rate=1e-3)


def function(of_response):
    return HookJudge("mine:one", lambda prompt, response: float(of_response(response)))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=policies.STOPS))


def trained(policy, out, judge, weight=0.5, **options):
    """The advantages of each step as TRL has them, and its samples."""
    advantages, seen = [], []
    options |= {"record": lambda step, rollouts, credits: seen.append(rollouts)}
    settings = SMALL.model_copy(update={"more_rewards": {judge.name: weight}})
    options |= {"settings": settings, "further": (judge,), "max_new_tokens": 12, "device": "cpu"}
    one = make_grpo_with_rm(policy, PROMPTS, policies.TextScorer(len), out=out, **options)
    whole = one._generate_and_score_completions

    def watched(inputs):
        found = whole(inputs)
        advantages.append(found["advantages"].double().numpy())
        return found

    one._generate_and_score_completions = watched
    one.train()
    return advantages, seen


def by_hand(rewards, size, weights):
    """Advantages of (K, N) rewards, group by group in Python's own numbers."""
    sums = [0.0] * rewards.shape[1]
    for row, weight in zip(rewards.tolist(), weights, strict=True):
        for first in range(0, len(row), size):
            group = row[first : first + size]
            mean, spread = statistics.fmean(group), statistics.stdev(group) + 1e-4
            for place, one in enumerate(group, first):
                sums[place] += weight * (one - mean) / spread
    return np.array(sums) / (statistics.stdev(sums) + 1e-4)


@pytest.mark.slow
def test_what_trl_trains_on_is_gdpo(policy, tmp_path):
    advantages, seen = trained(policy, tmp_path, function(lambda text: text.count("a")), -0.7)
    assert len(advantages) == SMALL.steps
    for found, rollouts in zip(advantages, seen, strict=True):
        texts = [rollout.steps[0].completion for rollout in rollouts]
        rewards = np.array([rollout.meta[REWARDS_KEY] for rollout in rollouts]).T
        assert rewards.tolist() == [[len(text) for text in texts], [text.count("a") for text in texts]]
        np.testing.assert_allclose(found, by_hand(rewards, SMALL.group_size, [1.0, -0.7]), atol=1e-5)


@pytest.mark.slow
def test_the_price_of_length_is_part_of_the_own_reward(policy, tmp_path):
    credit = RewardModelCreditAssigner(LengthCredit(0.5), mode="add")
    _, seen = trained(policy, tmp_path, function(len), credit=credit)
    for rollout in seen[0]:
        own, other = rollout.meta[REWARDS_KEY]
        assert own == pytest.approx(other - 0.5 * rollout.meta["num_tokens"])


@pytest.mark.slow
def test_a_further_reward_that_is_no_number_stops_before_the_step(policy, tmp_path):
    class Broken:
        name = "other/best"

        def rewards(self, prompts, responses):
            return np.full(len(prompts), math.nan)

    with pytest.raises(TrainingError, match=r"other/best's reward of .* is nan"):
        trained(policy, tmp_path, Broken())


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
    rewards = [one.rewards(PROMPTS, responses).tolist() for one in found]
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
