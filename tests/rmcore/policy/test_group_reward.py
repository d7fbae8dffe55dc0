"""The rewards of a GRPO step: scored by one version, waited for, each of several normalised before they are summed."""

import math
import shutil
import statistics
from types import SimpleNamespace

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
from rmcore.policy.grpo.group_reward import REWARDS_KEY, GroupReward
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.rlhf_requirements import further_rewards
from rmcore.policy.judge import HookJudge
from rmcore.policy.policy import Policy
from tests.support.turn_fields import TOOLS_TURN

PROMPTS = ["What is 2 + 2?", "What is 2 + 3?", "What is 7 + 3?"]
SMALL = RlhfConfig(steps=2, prompts_per_step=3, group_size=4, measure_every=1, learning_rate=1e-3)


def function(of_response):
    return HookJudge("other/best", lambda prompt, response: float(of_response(response)))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=policies.STOPS))


@pytest.fixture
def rewarded(policy):
    """The credits of a step of four responses to two prompts, and what of it was recorded."""

    def rewarded(scorer, wait_seconds=60.0, further=()):
        seen = []
        reward = GroupReward(
            policy,
            PROMPTS[:2],
            scorer,
            RewardModelCreditAssigner(),
            wait_seconds=wait_seconds,
            further=further,
            record=lambda step, rollouts, credits: seen.extend(rollouts),
        )
        [letter] = policy.tokenizer("a")["input_ids"]  # which ends no response
        ids = [[letter] * length for length in (1, 2, 3, 0)]
        options = {"trainer_state": SimpleNamespace(global_step=0), "log_metric": lambda name, value: None}
        return reward(completion_ids=ids, place=[0, 0, 1, 1], **options), seen

    return rewarded


def test_a_scorer_that_comes_back_is_waited_for(rewarded):
    away = policies.AwayScorer({0, 1}, comes_back=True)
    credits, seen = rewarded(away)
    assert credits == [1.0, 2.0, 3.0, 0.0]
    assert [rollout.steps[0].completion for rollout in seen] == ["a", "aa", "aaa", ""]
    assert away.waits == 2


def test_a_scorer_that_is_ready_and_fails_is_asked_ever_more_rarely_and_not_called_away(rewarded):
    scorer = policies.AwayScorer(range(10**9), comes_back=True)
    with pytest.raises(TrainingError, match=r"failed \d+ times within 1 s, .* was ready: restarting .*same command"):
        rewarded(scorer, wait_seconds=1.0)
    assert 2 <= scorer.calls <= 6  # pauses of 0.1, 0.2, 0.4 s and what is left; a busy machine leaves less


def test_a_scorer_that_stays_away_is_called_so(rewarded):
    with pytest.raises(TrainingError, match="away for 60 s in the middle of a step: no server"):
        rewarded(policies.AwayScorer(range(10**9), comes_back=False))


def test_a_step_that_two_versions_scored_is_refused(rewarded):
    with pytest.raises(TrainingError, match=r"versions \[1, 2\]"):
        rewarded(policies.TextScorer(len, versions=lambda index: 1 + index % 2))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_with_whose_it_is(rewarded, reward):
    with pytest.raises(TrainingError, match=rf"the reward of 'aaa' as an answer to .* is {reward}"):
        rewarded(policies.TextScorer(lambda text: reward if text == "aaa" else 0.0))

    class Broken:
        name = "other/best"

        def rewards(self, prompts, responses):
            return np.full(len(prompts), reward)

    with pytest.raises(TrainingError, match=rf"other/best's reward of .* is {reward}"):
        rewarded(policies.TextScorer(len), further=(Broken(),))


def by_hand(rewards, size, weights):
    """Advantages of (K, N) rewards, group by group in Python's own numbers."""
    sums = [0.0] * rewards.shape[1]
    for row, weight in zip(rewards.tolist(), weights, strict=True):
        for first in range(0, len(row), size):
            group = row[first : first + size]
            mean, spread = statistics.fmean(group), statistics.stdev(group) + 1e-4
            for place, reward in enumerate(group, first):
                sums[place] += weight * (reward - mean) / spread
    return np.array(sums) / (statistics.stdev(sums) + 1e-4)


@pytest.mark.slow
def test_what_trl_trains_on_is_gdpo_and_the_price_of_length_is_part_of_the_own_reward(policy, tmp_path):
    """The advantages of each step as TRL has them."""
    advantages, seen = [], []
    judge = function(lambda text: text.count("a"))
    trainer = make_grpo_with_rm(
        policy,
        PROMPTS,
        policies.TextScorer(len),
        out=tmp_path,
        settings=SMALL.model_copy(update={"more_rewards": {judge.name: -0.7}}),
        further=(judge,),
        credit=RewardModelCreditAssigner(LengthCredit(0.5), mode="add"),
        record=lambda step, rollouts, credits: seen.append(rollouts),
        max_new_tokens=12,
        device="cpu",
    )
    whole = trainer._generate_and_score_completions

    def watched(inputs):
        output = whole(inputs)
        advantages.append(output["advantages"].double().numpy())
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    assert len(advantages) == SMALL.steps
    for given, rollouts in zip(advantages, seen, strict=True):
        texts = [rollout.steps[0].completion for rollout in rollouts]
        rewards = np.array([rollout.meta[REWARDS_KEY] for rollout in rollouts]).T
        prices = [0.5 * rollout.meta["num_tokens"] for rollout in rollouts]
        assert rewards[0].tolist() == [len(text) - price for text, price in zip(texts, prices, strict=True)]
        assert rewards[1].tolist() == [text.count("a") for text in texts]
        np.testing.assert_allclose(given, by_hand(rewards, SMALL.group_size, [1.0, -0.7]), atol=1e-5)


# --- further rewards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, math.nan, True, "much"])
def test_a_weight_that_says_nothing_is_refused(weight):
    with pytest.raises(ValidationError, match="more_rewards"):
        RlhfConfig(more_rewards={"other/best": weight})


@pytest.mark.parametrize("named", ["not/there", "openai:judge@http://127.0.0.1:1", "not_there:reward"])
def test_a_reward_that_is_not_there_is_refused_by_its_setting(named):
    with pytest.raises(ConfigError, match=r"rlhf\.more_rewards"):
        further_rewards({named: 1.0}, PROMPTS, "cpu")


@pytest.mark.slow
def test_each_reward_model_reads_by_its_own_template_or_is_refused_before_a_step(tiny_folder, tmp_path):
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(other)
    responses = ["a", "b", "c"]
    loaded = further_rewards({str(tiny_folder): 1.0, str(other): 2.0}, PROMPTS, "cpu")
    rewards = [judge.rewards(PROMPTS, responses).tolist() for judge in loaded]
    models = [BradleyTerryRM.from_pretrained(folder, device="cpu") for folder in (tiny_folder, other)]
    assert rewards == [rm.score(PROMPTS, responses).tolist() for rm in models]
    assert rewards[0] != rewards[1]
    asked = [PROMPTS[0], (TOOLS_TURN, Message("user", PROMPTS[1]))]
    with pytest.raises(DataError, match="cannot read 1 of the 2 prompts"):
        further_rewards({str(tiny_folder): 1.0}, asked, "cpu")
