"""Best-of-n served on fresh prompts, for real on the smallest chain: which prompts, who is chosen, what is refused."""

import json

import numpy as np
import pandas as pd
import pytest

import policy_chain
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.store import Store
from rmcore.data.gold.world import gold_reward
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.registry import STAGES
from rmcore.stages.run import run_stage

pytestmark = pytest.mark.slow

FEW = policy_chain.changed(policy={"fresh_prompts": 12}, readiness={"planned_kl": 0.5})


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return policy_chain.Chain(Store(tmp_path_factory.mktemp("store")), FEW)


@pytest.fixture(scope="module")
def served(chain):
    return pd.read_parquet(chain.folder("confirmation") / "served.parquet")


@pytest.fixture(scope="module")
def record(chain):
    return json.loads((chain.folder("confirmation") / "confirmation.json").read_text())


def test_prompts_are_ones_that_no_split_has(chain, served):
    prepared = chain.folder("prepare")
    known = {
        pair.prompt for name in ("train", "validation", "test") for pair in read_pairs(prepared / f"{name}.parquet")
    }
    assert served["prompt"].nunique() == 12
    assert not known & set(served["prompt"])


def test_the_chosen_one_is_the_best_of_n_and_the_others_are_none_of_them(chain, served, record):
    lines = [json.loads(line) for line in (chain.folder("confirmation") / "drawn.jsonl").open()]
    drawn = {line["prompt_index"]: line["samples"] for line in lines if "samples" in line}
    rm = BradleyTerryRM.from_pretrained(chain.folder("train") / "best", device="cpu")
    assert (record["n"], record["num_prompts"], record["num_judged"]) == (4, 12, 60)  # best-of-4 is 0.64 nats
    for index, (_, rows) in enumerate(served.groupby("prompt_id", sort=False)):
        prompt = rows["prompt"].iloc[0]
        responses = [one["response"] for one in drawn[index]]
        assert len(responses) == 8
        rewards = np.array(rm.score([prompt] * 4, responses[:4]))
        assert rows["response"].iloc[0] == responses[int(rewards.argmax())]
        assert rows["chosen"].tolist() == [True, False, False, False, False]
        assert rows["response"].tolist()[1:] == responses[4:]
        assert rows["gold"].tolist() == [gold_reward(prompt, response) for response in rows["response"]]


def test_what_is_fresh_of_other_data_are_the_prompts_after_those_that_readiness_sees(
    tmp_path, monkeypatch, chain, gold_pairs
):
    """Where too few are left, that is said before anything is drawn; what a constant judge says is no gain."""
    (tmp_path / "of_mine.py").write_text("def constant(prompt, response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "pairs.parquet"
    write_pairs(gold_pairs[:120], source)
    data = {"source": str(source), "test_fraction": 0.5}
    policy = {
        "judge": "of_mine:constant",
        "num_prompts": 5,
        "name": str(chain.folder("policy") / "model"),
    }
    other = chain.with_config(data=data, policy=policy)
    with pytest.raises(DataError, match="one and the same reward"):
        other.ref("confirmation")
    with pytest.raises(
        DataError, match=r"are fresh, and a gain over fewer than 10 says little. Lower policy.num_prompts"
    ):
        chain.with_config(data=data, policy=policy | {"num_prompts": 5000}).ref("confirmation")


def test_what_was_judged_before_an_interruption_is_not_asked_for_again(tmp_path, monkeypatch, chain, served):
    """Judgements cost most: the second call asks for those that the first had not stored, and ends like a whole one."""
    (tmp_path / "counted.py").write_text(
        "from rmcore.data.gold.world import gold_reward\n\nasked, stop_at = [], []\n\n\n"
        "def judge(prompt, response):\n"
        "    if stop_at and len(asked) == stop_at[0]:\n"
        "        raise KeyboardInterrupt\n"
        "    asked.append((prompt, response))\n"
        "    return gold_reward(prompt, response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import counted

    settings = STAGES["confirmation"].settings.of(FEW).model_copy(update={"judge": "counted:judge"})
    upstream = {name: chain.folder(name) for name in STAGES["confirmation"].upstream}
    counted.stop_at.append(17)  # in the middle of the fourth prompt
    with pytest.raises(KeyboardInterrupt):
        run_stage("confirmation", settings, upstream, tmp_path / "out")
    counted.stop_at.clear()
    counted.asked.clear()
    run_stage("confirmation", settings, upstream, tmp_path / "out")
    assert len(counted.asked) == 60 - 15
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "served.parquet"), served)


def test_without_a_judge_it_is_refused(tmp_path, chain):
    settings = STAGES["confirmation"].settings.of(FEW).model_copy(update={"is_gold": False})
    upstream = {name: chain.folder(name) for name in STAGES["confirmation"].upstream}
    with pytest.raises(ConfigError, match=r"policy\.judge"):
        run_stage("confirmation", settings, upstream, tmp_path)
