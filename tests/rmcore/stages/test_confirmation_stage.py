"""Best-of-n served on fresh prompts, for real on the smallest chain: which prompts, who is chosen, what is refused."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

import policy_chain
from rmcore.core.errors import DataError, JudgementsWantedError
from rmcore.data.gold.world import gold_reward
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.confirmation import ENOUGH_TO_RISE
from single_stage import run_stage

pytestmark = pytest.mark.slow

FEW = policy_chain.changed(policy={"fresh_prompts": 30, "max_new_tokens": 16}, readiness={"planned_kl": 0.5})
COUNTED = (
    "from rmcore.data.gold.world import gold_reward\n\nasked, stop_at = [], []\n\n\n"
    "def judge(prompt, response):\n"
    "    if stop_at and len(asked) == stop_at[0]:\n"
    "        raise KeyboardInterrupt\n"
    "    asked.append((prompt, response))\n"
    "    return gold_reward(prompt, response)\n\n\n"
    "def shortest(prompt, response):\n"
    "    asked.append((prompt, response))\n"
    "    return -float(len(response))\n\n\n"
    "def passes(prompt, response):\n"
    "    return float(len(response) > 3)\n\n\n"
    "def constant(prompt, response):\n"
    "    return 1.0\n"
)


@pytest.fixture(scope="module")
def chain(chain_store):
    return policy_chain.Chain(chain_store, FEW)


@pytest.fixture(scope="module")
def served(chain):
    return pd.read_parquet(chain.folder("confirmation") / "served.parquet")


@pytest.fixture(scope="module")
def record(chain):
    return json.loads((chain.folder("confirmation") / "confirmation.json").read_text())


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A module of judges, which count what they are asked."""
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    import counted

    return counted


def run(chain, out, planned_kl=FEW.readiness.planned_kl, **policy):
    """The stage with some settings changed, in a folder of its own; its record."""
    config = policy_chain.changed(FEW, policy=policy, readiness={"planned_kl": planned_kl})
    run_stage("confirmation", config, {name: ref.folder for name, ref in chain.upstream("confirmation").items()}, out)
    return json.loads((out / "confirmation.json").read_text())


def test_prompts_are_ones_that_no_split_has(chain, served, record):
    prepared = chain.folder("prepare")
    known = {
        pair.prompt for name in ("train", "validation", "test") for pair in read_pairs(prepared / f"{name}.parquet")
    }
    assert served["prompt"].nunique() == len(served) == record["num_prompts"] <= record["num_allowed"] == 30
    assert not known & set(served["prompt"])


def test_the_chosen_one_is_the_best_of_n_and_the_other_is_none_of_them(chain, served, record):
    drawn = []
    for first in (0, 24):
        lines = [json.loads(line) for line in (chain.folder("confirmation") / f"drawn_{first}.jsonl").open()]
        found = {line["prompt_index"]: line["samples"] for line in lines if "samples" in line}
        drawn += [found[index] for index in sorted(found)]
    rm = BradleyTerryRM.from_pretrained(chain.folder("train") / "best", device="cpu")
    assert record["n"] == 4  # best-of-4 is 0.64 nats
    assert len(drawn) == 30
    assert drawn[0] != drawn[24]  # rounds have seeds of their own
    scale = json.loads((chain.folder("confirmation") / "unit.json").read_text())["scale"]
    for samples, row in zip(drawn, served.itertuples(), strict=False):
        responses = [one["response"] for one in samples]
        assert len(responses) == 5
        rewards = np.array(rm.score([row.prompt] * 5, responses))
        assert row.chosen == responses[int(rewards[:4].argmax())]
        assert row.other == responses[4]
        assert row.reward_chosen == pytest.approx(rewards[:4].max(), rel=1e-5)
        assert row.reward_other == pytest.approx(rewards[4], rel=1e-5)
        gold = [gold_reward(row.prompt, text) for text in (row.chosen, row.other)]
        apart = gold[0] - gold[1]  # this policy's answers are mostly as bad as one another: their wins are counted
        assert row.difference == pytest.approx(np.sign(apart) if scale is None else apart / scale)
    assert record["gold"]["gain"]["ci_low"] <= served["difference"].mean() <= record["gold"]["gain"]["ci_high"]
    assert record["num_labels"] == 2 * 24 + 2 * len(served)


def test_it_ends_where_it_is_decided_and_neither_draws_nor_asks_any_more(tmp_path, chain):
    """Judged by the very reward model that chooses, the gain is as large as it can be. The world's writer is quick."""
    own = str(chain.folder("train") / "best")
    record = run(chain, tmp_path, name="world", judge=own, fresh_prompts=400)
    assert record["verdict"]["status"] == "rose"
    assert record["is_decided"]
    assert record["num_prompts"] == ENOUGH_TO_RISE
    assert record["num_labels"] == 2 * 24 + 2 * record["num_prompts"]
    lines = sum(len(path.read_text().splitlines()) for path in tmp_path.glob("judged_*.jsonl"))
    assert lines == record["num_prompts"] == len(pd.read_parquet(tmp_path / "served.parquet"))
    rounds = [first for first in (0, 24, 48, 96, 192, 288, 384) if first < record["num_prompts"]]
    assert {path.name for path in tmp_path.glob("served_*")} == {f"served_{first}.json" for first in rounds}


def test_what_is_fresh_of_other_data_are_the_prompts_after_those_that_readiness_sees(
    tmp_path, counted, chain, gold_pairs
):
    """In an order of chance; where too few are left, that is said before anything is drawn."""
    source = tmp_path / "pairs.parquet"
    write_pairs(gold_pairs[:120], source)
    data = {"source": str(source), "test_fraction": 0.5}
    policy = {"judge": "counted:shortest", "num_prompts": 12, "name": str(chain.folder("policy") / "model")}
    other = chain.with_config(data=data, policy=policy)
    held_out = list(dict.fromkeys(pair.prompt for pair in read_pairs(other.folder("prepare") / "test.parquet")))
    table = pd.read_parquet(other.folder("confirmation") / "served.parquet")
    fresh = held_out[12:]
    assert set(table["prompt"]) <= set(fresh)
    assert table["prompt"].tolist() != fresh[: len(table)]  # what is seen by then stands for all
    seen = {prompt for prompt, _ in counted.asked} - set(table["prompt"])
    assert seen
    assert seen <= set(held_out[:12])  # those that give the unit
    record = json.loads((other.folder("confirmation") / "confirmation.json").read_text())
    assert len(counted.asked) == record["num_labels"] == 2 * 24 + 2 * len(table)  # 12 prompts, two pairs of each
    assert record["num_allowed"] == record["num_fresh"] == len(fresh)
    with pytest.raises(
        DataError, match=r"are fresh, and a gain over fewer than 10 says little. Lower policy.num_prompts"
    ):
        chain.with_config(data=data, policy=policy | {"num_prompts": 5000}).ref("confirmation")


def test_what_was_judged_before_an_interruption_is_not_asked_for_again(tmp_path, chain, counted, served):
    """Judgements cost most: the second call asks for those that the first had not stored, and ends like a whole one."""
    counted.stop_at.append(48 + 39)  # in the middle of the third turn
    with pytest.raises(KeyboardInterrupt):
        run(chain, tmp_path / "out", judge="counted:judge")
    counted.stop_at.clear()
    counted.asked.clear()
    record = run(chain, tmp_path / "out", judge="counted:judge")
    assert len(counted.asked) == record["num_labels"] - (48 + 32)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "served.parquet"), served)


def test_a_judge_of_constants_is_refused_and_one_of_passes_is_not(tmp_path, chain, counted):
    with pytest.raises(DataError, match="equally good on all of 1"):
        run(chain, tmp_path / "constant", name="world", judge="counted:constant", fresh_prompts=200, planned_kl=0.2)
    record = run(chain, tmp_path / "passes", name="world", judge="counted:passes", fresh_prompts=24, planned_kl=0.2)
    assert record["unit"] == "wins less losses a comparison"
    assert set(record["differences"]) <= {-1.0, 0.0, 1.0}


def test_people_judge_it_round_by_round_and_are_not_asked_more_than_it_takes(tmp_path, chain):
    """Each round is a file; the call ends there, and resumes when its column is filled in."""
    folder = tmp_path / "to_judge"
    given = {"name": "world", "people": str(folder), "planned_kl": 1.5}
    rm = BradleyTerryRM.from_pretrained(chain.folder("train") / "best", device="cpu")
    asked, record = 0, None
    while record is None:
        try:
            record = run(chain, tmp_path / "out", fresh_prompts=400, **given)
        except JudgementsWantedError:
            asked += 1
            file = max(folder.glob("*.csv"), key=lambda path: int(path.stem.rpartition("to")[2]))
            rows = pd.read_csv(file, keep_default_na=False, dtype=str)
            scores = [rm.score(rows["prompt"].tolist(), rows[f"response_{side}"].tolist()) for side in "ab"]
            rows["preferred"] = np.where(scores[0] > scores[1], "a", "b")
            rows.to_csv(file, index=False)
    assert record["verdict"]["status"] == "rose"
    assert record["unit"] == "wins less losses a comparison"
    assert 0 < record["useful_gain"] < 0.3
    assert record["num_prompts"] == sum((24, 24, 48)[:asked])
    table = pd.read_parquet(tmp_path / "out" / "served.parquet")
    assert record["num_labels"] == (table["chosen"] != table["other"]).sum()  # nobody is asked about equal ones
    assert record["judge"] == "people"
