"""The stages of a policy run for real on the smallest chain: what they write, what moves them, what they refuse."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

import policy_chain
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.data.gold.world import gold_reward, written_responses
from rmcore.data.table import read_pairs
from rmcore.models.seal import write_seal
from rmcore.stages.order import pipeline_stages, stage_of
from rmcore.stages.overoptimization import ALL_JUDGED
from single_stage import run_stage

CONFIG, changed = policy_chain.CONFIG, policy_chain.changed


@pytest.fixture(scope="module")
def chain(chain_store):
    chain = policy_chain.Chain(chain_store)
    chain.all()
    return chain


@pytest.fixture(scope="module")
def samples(chain):
    return pd.read_parquet(chain.folder("samples") / "samples.parquet")


@pytest.fixture(scope="module")
def optimized(chain):
    return json.loads((chain.folder("overoptimization") / "overoptimization.json").read_text())


def upstream_of(chain, name):
    return {needed: ref.folder for needed, ref in chain.upstream(name).items()}


def run_alone(name, chain, out, config=CONFIG, **upstream):
    """Run one stage into `out` beside what the chain has, with other folders for some of its upstream."""
    out.mkdir(parents=True, exist_ok=True)
    run_stage(name, config, upstream_of(chain, name) | upstream, out)
    return out


def test_samples_are_of_held_out_prompts_and_judged_by_their_text_alone(chain, samples):
    test = read_pairs(chain.folder("prepare") / "test.parquet")
    prompts = list(dict.fromkeys(pair.prompt for pair in test))[:8]
    assert list(samples["prompt"]) == list(np.repeat(prompts, 8))
    assert set(samples["prompt_id"]) <= {pair.prompt_id for pair in test}
    assert samples["gold"].tolist() == [gold_reward(*row) for row in zip(samples.prompt, samples.response, strict=True)]
    assert samples["num_tokens"].between(1, CONFIG.policy.max_new_tokens).all()
    assert (samples["finished"] | (samples["num_tokens"] == CONFIG.policy.max_new_tokens)).all()
    summary = json.loads((chain.folder("samples") / "sampling.json").read_text())
    assert (summary["num_prompts"], summary["num_samples"], summary["num_judged"]) == (8, 64, 64)


def test_what_was_found_is_whole(chain, optimized):
    assert optimized["judge"] == "the synthetic benchmark"
    assert {"on_policy_accuracy", "win_rate_7", "hard_accuracy"} <= optimized["parts"].keys()
    assert [curve["method"] for curve in optimized["curves"]] == ["best_of_n", "kl_optimum"]
    assert all(curve["plan"]["kl"] == 0.4 for curve in optimized["curves"])
    figure = chain.folder("overoptimization") / "figures" / "overoptimization.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    judged = json.loads((chain.folder("readiness_v2") / "readiness.json").read_text())
    assert judged["readiness"]["version"] == "v2"
    assert judged["readiness"]["parts"]["on_policy_accuracy"] == optimized["parts"]["on_policy_accuracy"]
    on_labels = json.loads((chain.folder("readiness") / "readiness.json").read_text())["gate"]
    assert not {check["name"] for check in on_labels} & {check["name"] for check in judged["gate"]}


@pytest.mark.slow
def test_names_that_are_built_in_are_no_folders_of_whoever_stands_beside_them(chain, tmp_path, monkeypatch):
    before = {name: chain.key(name) for name in ("policy", "samples", "overoptimization")}
    for name in ("sft", "tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert {name: chain.key(name) for name in before} == before


@pytest.fixture(scope="module")
def by_the_world(chain):
    """The same run with the world's own writer for a policy."""
    return chain.with_config(policy={"name": "world", "samples_per_prompt": 18}, readiness={"planned_kl": 1.0})


@pytest.mark.slow
def test_the_worlds_writer_is_a_policy_that_costs_no_model(by_the_world):
    assert by_the_world.all() == ["policy", "samples", "overoptimization", "readiness_v2"]
    assert not (by_the_world.folder("policy") / "model").exists()
    found = pd.read_parquet(by_the_world.folder("samples") / "samples.parquet")
    assert found.groupby("prompt_id").size().eq(18).all()
    gold = [gold_reward(prompt, response) for prompt, response in zip(found["prompt"], found["response"], strict=True)]
    assert found["gold"].tolist() == gold
    judged = json.loads((by_the_world.folder("readiness_v2") / "readiness.json").read_text())
    assert judged["verdict"]["rung"] == 3
    assert judged["readiness"]["parts"]["planned_gain"]["low_if_no_disaster"] is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": {"source": "pairs.parquet"}}, "answers none of the prompts of pairs.parquet"),
        ({"rlhf": {}}, "has no weights"),
    ],
)
def test_the_worlds_writer_is_refused_where_it_cannot_be_a_policy(settings, words):
    with pytest.raises(ValidationError, match=words):
        PipelineConfig(policy={"name": "world"}, **settings)


def trained_with(chain, folder, name, change):
    """A copy of the training of whose weights `change` has been at one."""
    shutil.copytree(chain.folder("train") / "best", folder / "best")
    tensors = load_file(folder / "best" / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "best" / "model.safetensors", metadata={"format": "pt"})
    write_seal(folder / "best")
    return folder


def test_a_reward_model_whose_weights_overflow_is_refused_with_the_first_sample(chain, tmp_path):
    trained = trained_with(chain, tmp_path / "train", "model.norm.weight", lambda weight: weight.fill_(3e38))
    with pytest.raises(ModelError, match=r"64 of 64 samples got a reward that is not finite; the first answers '"):
        run_alone("overoptimization", chain, tmp_path / "out", train=trained)


def test_without_a_policy_its_stages_say_so(chain, tmp_path):
    for name in ("policy", "samples", "overoptimization"):
        with pytest.raises(ConfigError, match="there is no policy in this config, so nothing would be sampled"):
            run_alone(name, chain, tmp_path / name, config=CONFIG.model_copy(update={"policy": None}))


@pytest.mark.slow
def test_a_reward_model_starts_from_the_policy_that_was_fine_tuned(chain):
    """One step at a rate that moves nothing: what was trained is the policy, with a head of its own."""
    one_step = {"steps": 1, "lr": 1e-12, "eval_every": 1}
    started = chain.with_config(model={"name": "policy"}, train=one_step)
    assert pipeline_stages(started.config)[:3] == ("prepare", "policy", "train")
    policy = load_file(started.folder("policy") / "model" / "model.safetensors")
    trained = load_file(started.folder("train") / "best" / "model.safetensors")
    shared = [name for name in policy if name in trained]
    assert len(shared) > 20
    assert all(torch.allclose(policy[name], trained[name], atol=1e-6) for name in shared)
    other = started.with_config(policy={"sft_examples": 30})
    assert other.key("train") != started.key("train")
    plain = chain.with_config(train=one_step)
    assert plain.with_config(policy={"sft_examples": 30}).key("train") == plain.key("train")


def test_a_policy_that_is_a_folder_is_named_as_what_the_reward_model_starts_from(chain):
    folder = str(chain.folder("policy") / "model")
    config = changed(CONFIG, model={"name": "policy"}, policy={"name": folder})
    assert stage_of("train", config).model.name == folder
    assert [*stage_of("train", config).upstream] == ["prepare"]
    assert pipeline_stages(config)[:2] == ("prepare", "train")


@pytest.mark.parametrize("policy", [None, {"name": "world"}, {"samples": "judged.parquet"}])
def test_a_reward_model_cannot_start_from_a_policy_without_weights(policy):
    with pytest.raises(ValidationError, match="there are none"):
        PipelineConfig(model={"name": "policy"}, policy=policy)


@pytest.mark.slow
def test_samples_of_prompts_that_were_trained_on_are_set_aside_however_they_are_written(chain, tmp_path):
    """On these a model remembers: left in, 20 % of such prompts made ready of 72 % of the models that gain nothing."""
    prompts = {
        name: list(dict.fromkeys(str(pair.prompt) for pair in read_pairs(chain.folder("prepare") / f"{name}.parquet")))
        for name in ("train", "validation", "test")
    }
    one, two, chosen_by = prompts["train"][0], prompts["train"][1], prompts["validation"][0]
    written = {one: f"  {one.upper()}", two: f"{two} ?!"}
    rows = [
        (written.get(prompt, prompt), response, float(place))
        for prompt in [one, two, chosen_by, *prompts["test"][:5]]
        for place, response in enumerate(written_responses(prompt, 8, "none", seed=0))
    ]
    pd.DataFrame(rows, columns=["prompt", "response", "judge"]).to_csv(tmp_path / "judged.csv", index=False)
    judged = {"samples": str(tmp_path / "judged.csv"), "judge_column": "judge"}
    other = chain.with_config(policy=judged, readiness={"planned_kl": 0.4})
    used = pd.read_parquet(other.folder("overoptimization") / "rewards.parquet")
    assert used["prompt_id"].nunique() == 5
    said, all_judged = json.loads((other.folder("overoptimization") / "overoptimization.json").read_text())["left_out"]
    assert said.startswith("3 of 8 prompts")
    verdict = json.loads((other.folder("readiness_v2") / "readiness.json").read_text())["verdict"]
    assert {said, all_judged} <= {*verdict["reasons"]}
    assert all_judged == ALL_JUDGED
    assert verdict["status"] == "unclear"
