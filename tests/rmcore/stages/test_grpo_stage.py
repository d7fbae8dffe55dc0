"""The stage grpo on the smallest chain: what it writes, what moves its key, what it refuses, and how it continues."""

import json
import shutil
import sys

import numpy as np
import pandas as pd
import pytest

import policy_chain
from label_sheets import fill, rows_of
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError
from rmcore.core.tracking import METRICS_FILE
from rmcore.data.gold.world import gold_reward
from rmcore.data.table import read_pairs
from rmcore.policy.grpo.policy_meter import QUANTITIES
from rmcore.policy.grpo.rlhf_requirements import require_rlhf
from rmcore.policy.policy import Policy
from rmcore.stages.order import stage_of
from single_stage import run_stage
from tasks.run_record import headline, parse_metric_lines, read_numbers

changed = policy_chain.changed
RLHF = RlhfConfig(
    steps=4, num_seeds=2, prompts_per_step=2, group_size=4, learning_rate=1e-3, rewards="local",
    measure_every=2, num_prompts=6, samples_per_prompt=2,
)  # fmt: skip
CONFIG = policy_chain.CONFIG.model_copy(update={"rlhf": RLHF})


@pytest.fixture(scope="module")
def chain(chain_store):
    return policy_chain.Chain(chain_store, CONFIG)


@pytest.fixture(scope="module")
def folder(chain):
    return chain.folder("grpo")


@pytest.fixture(scope="module")
def record(folder):
    return json.loads((folder / "rlhf.json").read_text())


def run_alone(chain, out, config):
    """The stage in this process, beside what the chain has."""
    out.mkdir(parents=True, exist_ok=True)
    run_stage("grpo", config, {name: ref.folder for name, ref in chain.upstream("grpo").items()}, out)
    return json.loads((out / "rlhf.json").read_text())


@pytest.mark.slow
def test_the_record_is_that_of_the_rows(folder, record):
    progress = pd.read_parquet(folder / "progress.parquet")
    assert sorted(progress["seed"].unique()) == [0, 1]
    assert [point["step"] for point in record["curve"]] == [0, 2, 4]
    last = progress[progress["step"] == 4]
    for name in QUANTITIES:
        assert record["curve"][-1][name]["value"] == pytest.approx(last.groupby("seed")[name].mean().mean())
        for number, one in enumerate(record["seeds"]):
            mean = last[last["seed"] == number][name].mean()
            assert one["points"][-1][name]["value"] == pytest.approx(mean)
    assert record["curve"][0]["kl"]["value"] == 0
    assert record["judge"] == "the synthetic benchmark"
    assert record["rewards"] == "local"
    assert (record["rollouts"], record["parity"]) == ("generate", None)
    assert (folder / "figures" / "rlhf.png").is_file()
    assert not list(folder.glob("seed_*"))


def test_mlflow_has_the_true_reward_as_a_curve_and_what_was_gained_as_a_number(folder):
    path = folder / METRICS_FILE
    rows = parse_metric_lines(path.read_bytes().splitlines(), source=path)
    assert {"policy/kl", "policy/proxy", "policy/gold"} <= {name for _, values in rows for name in values}
    assert {"policy/trained_gold", "policy/trained_kl"} <= headline(read_numbers(folder, "grpo"))[0].keys()


def test_gold_is_the_gold_worlds_and_prompts_are_held_out(chain, folder):
    samples = pd.read_parquet(folder / "samples.parquet")
    prompts = list(dict.fromkeys(pd.read_parquet(chain.folder("samples") / "samples.parquet")["prompt"]))
    judged = [gold_reward(prompts[row.prompt], row.response) for row in samples.itertuples()]
    np.testing.assert_allclose(samples["gold"], judged)
    rollouts = pd.read_parquet(folder / "rollouts.parquet")
    held_out = {pair.prompt for pair in read_pairs(chain.folder("prepare") / "test.parquet")}
    assert not held_out & set(rollouts["prompt"])
    assert rollouts.groupby(["seed", "step"])["weight_version"].nunique().max() == 1
    assert set(rollouts["step"]) == {1, 2, 3, 4}
    sizes = rollouts.groupby(["seed", "step", "prompt"]).size()
    assert (sizes % 4 == 0).all()


@pytest.mark.slow
def test_several_rewards_are_said_each_with_how_it_moved_and_a_judge_of_ones_own_judges(chain, tmp_path, monkeypatch):
    (tmp_path / "brief.py").write_text("def reward(prompt, response):\n    return -1000.0 * len(response)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "brief", raising=False)
    other = shutil.copytree(chain.folder("train") / "best", tmp_path / "other")
    more = {str(other): 0.5, "brief:reward": 2.0}
    config = changed(CONFIG, policy={"judge": "brief:reward"}, rlhf={"more_rewards": more, "num_seeds": 1})
    record = run_alone(chain, tmp_path / "out", config)
    assert record["judge"] == "brief:reward"
    samples = pd.read_parquet(tmp_path / "out" / "samples.parquet")
    assert (samples["gold"] == -1000 * samples["response"].str.len()).all()
    several = record["several"]
    assert several["names"] == ["own", *more]
    assert several["weights"] == [1.0, 0.5, 2.0]
    rows = pd.read_parquet(tmp_path / "out" / "rollouts.parquet")
    rewards = np.array(rows["rewards"].tolist())
    np.testing.assert_array_equal(rewards[:, 0], rows["reward"])
    np.testing.assert_allclose(rewards[:, 1], rewards[:, 0], atol=1e-4)  # a copy of the own reward model
    assert (rewards[:, 2] == -1000 * rows["response"].str.len()).all()
    assert [one["step"] for one in several["steps"]] == [1, 2, 3, 4]
    for one in several["steps"]:
        np.testing.assert_allclose(one["means"], rewards[rows["step"] == one["step"]].mean(axis=0))

    refs = chain.upstream("grpo")

    def key(rewards):
        return stage_of("grpo", changed(CONFIG, rlhf={"more_rewards": rewards}), refs).key

    moved = shutil.copytree(other, tmp_path / "moved")
    assert key({str(other): 0.5}) == key({str(moved): 0.5})
    assert len({key(None), key({str(other): 0.5}), key({str(other): 1.0}), key({"brief:reward": 0.5})}) == 4


def answered(folder):
    """People prefer the first response of every open row; whether there was one."""
    files = list(folder.glob("*.csv"))
    is_open = any(not row["preferred"] for file in files for row in rows_of(file))
    for file in files:
        fill(file, lambda row: row["preferred"] or "a")
    return is_open


@pytest.mark.slow
def test_people_judge_between_calls_and_no_step_is_trained_twice(chain, tmp_path):
    watch = WatchConfig(labels=40, final_labels=12, people=str(tmp_path / "to_judge"))
    config = changed(CONFIG, rlhf={"watch": watch, "num_seeds": 1})
    waits = 0
    while True:
        try:
            record = run_alone(chain, tmp_path / "out", config)
            break
        except JudgementsWantedError:
            waits += 1
            assert answered(tmp_path / "to_judge")
    assert waits in (2, 3)  # two looks, and what is kept unless that is the start
    rollouts = pd.read_parquet(tmp_path / "out" / "rollouts.parquet")
    assert sorted(rollouts["step"].unique()) == [1, 2, 3, 4][: record["seeds"][0]["watch"]["looks"][-1]["step"]]
    assert rollouts.groupby("step").size().nunique() == 1
    assert record["judge"] == "people"
    assert (tmp_path / "out" / "figures" / "watch.png").is_file()
    assert Policy.load(tmp_path / "out" / "model").stop_ids


def test_a_watch_without_a_judge_is_refused_before_anything_runs():
    rlhf = RLHF.model_copy(update={"watch": WatchConfig()})
    with pytest.raises(ConfigError, match=r"rlhf\.watch wants a judge"):
        require_rlhf(rlhf, None, None, is_gold=False)
    with pytest.raises(ConfigError, match="fewer than 4 pairs a look"):
        require_rlhf(rlhf.model_copy(update={"steps": 4000}), None, None, is_gold=True)
    with pytest.raises(ValueError, match=r"further away than readiness is judged at"):
        PipelineConfig.model_validate(
            changed(CONFIG, rlhf={"kl_target": 50.0, "kl_beta": 0.1, "watch": WatchConfig()}).model_dump(
                exclude_defaults=True
            )
        )
    with pytest.raises(ValueError, match="steers the KL penalty"):
        RlhfConfig(kl_target=1.0, watch=WatchConfig())
    with pytest.raises(ValueError, match="kept to by the watch"):
        RlhfConfig(kl_target=1.0, kl_beta=0.1)


@pytest.mark.slow
def test_an_attempt_that_was_cut_off_after_a_seed_does_not_train_it_again(chain, folder, tmp_path, monkeypatch):
    from rmcore.stages import grpo

    trained = []
    whole = grpo.train_policy

    def counted(plan, place, *, seed, **options):
        if len(trained) == 1:
            raise KeyboardInterrupt
        whole(plan, place, seed=seed, **options)
        trained.append(seed)

    monkeypatch.setattr(grpo, "train_policy", counted)
    with pytest.raises(KeyboardInterrupt):
        run_alone(chain, tmp_path, CONFIG)
    monkeypatch.setattr(grpo, "train_policy", whole)
    record = run_alone(chain, tmp_path, CONFIG)
    theirs = json.loads((folder / "rlhf.json").read_text())
    assert record["curve"] == theirs["curve"]
    assert record["seeds"] == theirs["seeds"]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"rlhf": None}, "preset rlhf"), ({"policy": {"judge": "no_such_module:judge"}}, "no_such_module")],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(chain, tmp_path, change, word):
    with pytest.raises(ConfigError, match=word):
        run_alone(chain, tmp_path, changed(CONFIG, **change))
    assert not list(tmp_path.glob("seed_*"))


@pytest.mark.parametrize(
    "settings", [{"policy": None}, {"policy": {"samples": "some.parquet"}}], ids=["no policy", "given samples"]
)
def test_a_training_needs_a_policy(settings):
    tree = changed(CONFIG, **settings).model_dump()
    with pytest.raises(ValueError, match=r"policy\.name"):
        type(CONFIG).model_validate(tree)
