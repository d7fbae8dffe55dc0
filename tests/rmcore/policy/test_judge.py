"""Another reward model as the judge: its rewards, its labels, and what is refused."""

import random

import numpy as np
import pytest

from rmcore.config.data import GoldConfig
from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.judge import GoldJudge, judge_of, require_named_judge

RNG = random.Random(0)  # noqa: S311 - nothing is drawn


@pytest.fixture(scope="module")
def judge(tiny_folder):
    return judge_of(str(tiny_folder), GoldConfig(), "cpu")


def test_its_rewards_are_those_of_the_model_and_its_labels_follow_them(judge, tiny_folder, gold_pairs):
    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu")
    prompts, texts = [pair.prompt for pair in gold_pairs[:8]], [pair.chosen for pair in gold_pairs[:8]]
    found = judge.rewards(prompts, texts)
    assert found.dtype == np.float64
    assert found.tolist() == rm.score(prompts, texts).astype(np.float64).tolist()
    for pair in gold_pairs[:8]:
        labelled = judge.label(pair.prompt, pair.chosen, pair.rejected, RNG)
        difference = rm.score_pair(pair.prompt, pair.chosen, pair.rejected)
        assert (labelled.chosen == pair.chosen) == (difference > 0)
    assert judge.label("Why?", "same", "same", RNG) is None
    assert judge.name == f"the reward model {tiny_folder.name}"


def test_who_is_named_comes_before_the_gold_world_and_nobody_is_nobody(judge):
    assert not isinstance(judge, GoldJudge)
    assert isinstance(judge_of(None, GoldConfig()), GoldJudge)
    assert judge_of(None, None) is None


@pytest.mark.parametrize("named", ["no/such/folder", "judge.py", "mine.judge"])
def test_a_folder_that_is_no_reward_models_is_refused(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("")
    with pytest.raises(ConfigError, match="neither module:function nor the folder of a reward model"):
        require_named_judge(PolicyConfig(judge=named).judge)


def test_a_function_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match="nowhere"):
        require_named_judge("nowhere:judge")
    with pytest.raises(ValueError, match="pattern"):
        PolicyConfig(judge="a:b:c")
