"""A text in the place of a list of texts is one row, or refused by name: never as many rows as it has characters."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rmcore
import small_policies
from judge_server import completion, judge_server
from rmcore.config.judging import JudgingConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError, RequestError, RmcoreError
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.judging.language_model import LanguageModelJudge
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.judge import GoldJudge, HookJudge, ModelJudge
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.best_of_n_sampler import BestOfNSampler
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.sampling import draw_samples
from rmcore.policy.stopping.pair_judges import OrderedPairJudge, PeopleJudge, ScoreJudge, WinJudge
from rmcore.serving.client import _cut
from rmcore.serving.reward_functions import reward_function
from rmcore.serving.types import ScoringRequest

PROMPT, ANSWER, OTHER = "Is it so?", "It is so.", "It isn't."  # of one length, which `zip` would take for rows


@pytest.fixture(scope="module")
def rm():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy.load(small_policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=small_policies.STOPS))


@pytest.fixture
def calls(rm, policy, tmp_path):
    """By function: what it makes of (prompts, first answers, second answers)."""
    members = [rm, BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=2, device=torch.device("cpu"))]
    ensemble = RewardModelEnsemble(members, uncertainty_threshold=0.5)
    hook = HookJudge("len", lambda prompt, response: len(prompt) + 2 * response.count("s"))
    scores, wins = ScoreJudge(hook), WinJudge(hook)
    scores.scale = 1.0
    settings = SamplingSettings(2, 0.8, 4, 0)
    sampler = BestOfNSampler(policy, rm, 2, max_new_tokens=4, engine="generate", device="cpu")

    def asked_people(p, a, b):
        with pytest.raises(JudgementsWantedError) as wanted:
            PeopleJudge(tmp_path / "people").compare("look", p, a, b)
        files = sorted((tmp_path / "people").rglob("*.csv"))
        return str(wanted.value), [file.read_text() for file in files]

    def drawn(p):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        return draw_samples(policy, p, settings, file, engine="generate", device="cpu").rows["response"].tolist()

    def tried(fn):
        def call(p, a, b):
            try:
                return fn(p, a, b)
            except (RequestError, RmcoreError) as error:
                return type(error)

        return call

    with judge_server(lambda asked: completion("4" if len(asked.texts) < 3 else "A")) as server:

        def judge(mode):
            return LanguageModelJudge(server.named, JudgingConfig(mode=mode), tmp_path / f"kept-{mode}")

        yield {
            "score": lambda p, a, b: rmcore.score(rm, p, a),
            "BradleyTerryRM.score": lambda p, a, b: rm.score(p, a),
            "BradleyTerryRM.tokenize": lambda p, a, b: rm.tokenize(p, a)["input_ids"].tolist(),
            "RewardModelEnsemble.individual_rewards": lambda p, a, b: ensemble.individual_rewards(p, a),
            "RewardModelEnsemble.predict": lambda p, a, b: ensemble.predict(p, a).mean_reward,
            "RewardModelEnsemble.score": lambda p, a, b: ensemble.score(p, a),
            "RewardModelEnsemble.detect_ood": lambda p, a, b: ensemble.detect_ood(p, a),
            "RewardModelEnsemble.calibrate": tried(lambda p, a, b: ensemble.calibrate(p, a).mean_reward),
            "GoldJudge.rewards": lambda p, a, b: GoldJudge().rewards(p, a),
            "HookJudge.rewards": lambda p, a, b: hook.rewards(p, a),
            "ModelJudge.rewards": lambda p, a, b: ModelJudge("rm", rm).rewards(p, a),
            "LanguageModelJudge.rewards": lambda p, a, b: judge("pairwise").rewards(p, a),
            "LanguageModelJudge.scores": lambda p, a, b: judge("pointwise").scores(p, a),
            "LanguageModelJudge.compare": lambda p, a, b: judge("pairwise").compare(p, a, b),
            "LanguageModelJudge.verdicts": lambda p, a, b: judge("pairwise").verdicts(p, a, b)[0],
            "ScoreJudge.compare": lambda p, a, b: scores.compare("look", p, a, b),
            "ScoreJudge.unit_of": lambda p, a, b: scores.unit_of(p, a, b)[0],
            "ScoreJudge.calibrate": scores.calibrate,
            "WinJudge.compare": lambda p, a, b: wins.compare("look", p, a, b),
            "OrderedPairJudge.compare": lambda p, a, b: OrderedPairJudge(judge("pairwise")).compare("look", p, a, b),
            "PeopleJudge.compare": asked_people,
            "PairJudge.calibrate": PeopleJudge(tmp_path).calibrate,
            "draw_samples": lambda p, a, b: drawn(p),
            "BestOfNSampler.sample": lambda p, a, b: [one.responses for one in sampler.sample(p)],
            "Policy.fitting_ids": lambda p, a, b: policy.fitting_ids(p, 4),
            "Policy.readable_ids": lambda p, a, b: policy.readable_ids(p, 4),
            "Policy.try_fitting_ids": lambda p, a, b: policy.try_fitting_ids(p, 4),
            "ScoringRequest.from_list": lambda p, a, b: ScoringRequest.from_list(a).inputs,
        }  # fmt: skip


@pytest.mark.slow
def test_one_text_is_one_row_everywhere(calls):
    for name, call in calls.items():
        many = call([PROMPT], [ANSWER], [OTHER])
        one = call(PROMPT, ANSWER, OTHER)
        if isinstance(many, np.ndarray):
            np.testing.assert_array_equal(one, many, err_msg=name)
        else:
            assert one == many, name


REFUSED = {
    "train": lambda text, rm, out: rmcore.train(text, "tiny", output_dir=out),
    "evaluate": lambda text, rm, out: rmcore.evaluate(rm, text),
    "RewardClient.score": lambda text, rm, out: _cut(text, 8, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_where_pairs_or_inputs_are_expected_is_refused_by_name(name, rm, tmp_path):
    with pytest.raises((ConfigError, RequestError), match=r"pairs is the text 'Is it so|inputs is one str"):
        REFUSED[name](PROMPT, rm, tmp_path / "out")


def test_one_pair_is_a_list_of_one(rm):
    pair = PreferencePair(PROMPT, ANSWER, OTHER)
    both = [rmcore.evaluate(rm, pair), rmcore.evaluate(rm, [pair])]
    assert both[0]["pairwise_accuracy"] == both[1]["pairwise_accuracy"]
    assert both[0]["loss"].value == pytest.approx(both[1]["loss"].value)


def test_a_trainer_that_hands_over_one_text_gets_one_reward():
    sent = []

    def score(inputs, over_length):
        sent.extend(inputs)
        return SimpleNamespace(rewards=(1.0,) * len(sent))

    assert reward_function(SimpleNamespace(score=score))(PROMPT, ANSWER) == [1.0]
    assert sent == [{"prompt": PROMPT, "response": ANSWER}]
