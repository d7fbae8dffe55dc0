"""`rm-opt rlhf` as a user runs it: a few steps from preferences to a policy, with a real vLLM reward server, and a
second vLLM that draws the samples."""

import json
from pathlib import Path

import pytest

from rmcore.config.data import DataConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import ConfigError
from rmcore.stages.order import pipeline_stages

pytestmark = pytest.mark.services
COMMAND = ["rlhf", "--preset", "smoke"]
WHOLE = [*COMMAND, "--policy-steps", 4, "--set", "rlhf.rollouts=vllm"]


@pytest.fixture
def small(with_policy):
    training = RlhfConfig(measure_every=2, prompts_per_step=2, group_size=4, num_prompts=8, samples_per_prompt=2)
    return with_policy.model_copy(update={"study": "rlhf", "rlhf": training})


@pytest.mark.night
def test_a_policy_is_trained_and_it_is_said_whether_gold_rose_and_not_done_twice(vllm, command, small, drawn):
    command.services.environment["RM_OPT_VLLM"] = vllm
    outcome, said = command.outcome(*WHOLE, config=small)
    assert outcome["executed"] == ["grpo"]
    assert [stage["name"] for stage in outcome["results"]["stages"]] == [*pipeline_stages(small)]
    record = outcome["results"]["rlhf"]
    assert (record["rewards"], record["rollouts"]) == ("vllm", "vllm")
    assert record["parity"]["num_steps"] == 4
    assert record["parity"]["max_difference"] < 1e-3
    assert "samples: drawn by a vLLM that has each step" in said
    assert [point["step"] for point in record["curve"]] == [0, 2, 4]
    assert record["verdict"]["status"] in ("rose", "fell", "unclear", "refused")
    assert record["verdict"]["headline"] in said
    assert (outcome["results"]["verdict"]["rung"], outcome["results"]["next_rung"]) == (4, None)
    page = Path(outcome["report"]).read_text()
    assert record["verdict"]["headline"].replace("+", "&#43;") in page or record["verdict"]["headline"] in page
    assert "data:image/png" in page

    again, _ = command.outcome(*WHOLE, config=small)
    assert again["executed"] == []
    assert again["results"]["rlhf"] == record


def test_the_reward_model_alone_is_the_pipeline_and_shares_its_artifacts(command, small, smoke):
    outcome, said = command.outcome(*COMMAND, "--mode", "rm", config=small)
    assert outcome["executed"] == []
    assert outcome["results"].get("rlhf") is None
    assert outcome["results"]["verdict"]["rung"] == 1
    assert "level 1 of 4: labelled pairs" in said


def test_pairs_of_ones_own_without_a_judge_are_optimised_and_nothing_is_claimed(
    command, small, smoke, drawn, own_pairs
):
    """By the preset, whose watch wants a judge: without one nothing watches, and that is said."""
    assert "readiness_v2" not in pipeline_stages(small.model_copy(update={"data": DataConfig(source=str(own_pairs))}))
    policy = min(command.services.home.glob("store/policy/*/model"), key=lambda one: one.stat().st_mtime)
    arguments = ["--mode", "policy", "--checkpoint", smoke.artifacts["train"] / "best", "--policy-steps", 1]
    smaller = [
        "rlhf.rewards=local", "rlhf.prompts_per_step=2", "rlhf.group_size=4", "rlhf.num_prompts=4", "study=own",
        "policy.num_prompts=4", "policy.samples_per_prompt=4", "policy.max_new_tokens=16", "evaluate.num_resamples=100",
    ]  # fmt: skip
    settings = [word for setting in smaller for word in ("--set", setting)]
    given = ["--preference-data", own_pairs, "--policy-model", policy]
    summary = command.folder / "summary.json"
    done = command("rlhf", *arguments, *given, *settings, "--summary", summary, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(summary.read_text())
    assert "grpo" in outcome["executed"]
    assert "train" not in outcome["executed"]
    record = outcome["results"]
    assert (record["rewards"], record["verdict"]["status"]) == ("local", "unknown")
    assert record["verdict"]["headline"] in " ".join(done.stdout.split())
    assert Path(outcome["figures"]["rlhf"]).read_bytes().startswith(b"\x89PNG")
    assert "nothing watches this training" in done.stderr
    [tracked] = command.services.mlflow_runs("own")
    metrics = {metric["key"] for metric in tracked["data"]["metrics"]}
    assert {"policy/kl", "policy/reward_seed0", "policy/weight_version_seed0", "cost/rlhf_tokens_per_second"} <= metrics
    assert not [name for name in metrics if "_ci_" in name]


def test_what_the_options_contradict_is_refused(home):
    from flows.cli_policy import rlhf

    with pytest.raises(ConfigError, match="--checkpoint"):
        rlhf(mode="policy")
    with pytest.raises(ConfigError, match="--mode policy"):
        rlhf(checkpoint="somewhere")


def test_what_cannot_work_is_refused_before_anything_runs(home, small, own_pairs):
    from flows.policy import rlhf

    nobody = small.model_copy(update={"policy": small.policy.model_copy(update={"judge": "no_such_module:judge"})})
    with pytest.raises(ConfigError, match="no_such_module"):
        rlhf.fn(overrides=nobody.model_dump(mode="json"))
    watched = small.rlhf.model_copy(update={"watch": WatchConfig()})
    changed = small.model_copy(update={"rlhf": watched, "data": DataConfig(source=str(own_pairs))})
    with pytest.raises(ConfigError, match=r"policy\.judge"):
        rlhf.fn(overrides=changed.model_dump(mode="json"))
    with pytest.raises(ConfigError, match="mode policy"):
        rlhf.fn(overrides=small.model_dump(mode="json"), checkpoint="x")
    assert not list(home.glob("store/*/*"))
