"""Best-of-n, over-optimisation and the readiness study, started as from their forms: figures and records in MLflow."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments.presets import PRESETS
from rmcore.config import PolicyConfig, ReadinessConfig, RlhfConfig
from tasks.mlflow_client import connect

pytestmark = pytest.mark.services

SMALL = PRESETS["smoke"].model_copy(
    update={
        "policy": PolicyConfig(
            sft_examples=300, sft_epochs=1, num_prompts=8, samples_per_prompt=8, max_new_tokens=64, gradient_prompts=2
        ),
        "readiness": ReadinessConfig(planned_kl=1.0),
    }
)


def files(services, study, folder):
    """Files in a folder of the one MLflow run of a study."""
    [run] = services.mlflow_runs(study)
    assert run["info"]["status"] == "FINISHED"
    return {file.path for file in connect(services.tracking).list_artifacts(run["info"]["run_id"], folder)}


def test_best_of_n_and_readiness_share_their_samples_and_show_in_mlflow(services):
    config = SMALL.model_copy(update={"study": "chosen"}).model_dump(mode="json")
    started = services.trigger({"config": config}, "best-of-n").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    found = files(services, "chosen", "optimize/figures")
    assert found == {"optimize/figures/overoptimization.png", "optimize/figures/ensemble_disagreement.png"}
    [told] = [text for text in services.artifacts(run["id"]) if "Best-of-n" in text]
    assert "samples of 8 prompts" in told

    before = set(services.home.glob("store/samples/*/MANIFEST.json"))
    config["study"] = "judged"
    started = services.trigger({"config": config}, "readiness").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    assert set(services.home.glob("store/samples/*/MANIFEST.json")) == before
    [told] = [text for text in services.artifacts(run["id"]) if "readiness v2" in text]
    assert "FAIL" in told  # six steps of training are not enough for any policy


def test_readiness_without_a_judge_is_refused_before_anything_runs(services, tmp_path):
    pairs = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = SMALL.data.model_copy(update={"source": str(tmp_path / "pairs.jsonl")})
    config = SMALL.model_copy(update={"study": "nobody", "data": data}).model_dump(mode="json")
    started = services.trigger({"config": config}, "readiness").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "FAILED"
    assert "policy.samples" in run["state"]["message"]
    assert services.mlflow_runs("nobody") == []


def test_overoptimize_draws_a_curve_for_each_proxy_of_a_file(services, tmp_path):
    rng = np.random.default_rng(0)
    gold = rng.normal(size=400)
    rows = {"prompt": np.repeat(np.arange(20), 20), "judge": gold, "good": gold + rng.normal(size=400), "bad": -gold}
    pd.DataFrame(rows).to_parquet(tmp_path / "samples.parquet")
    parameters = {
        "samples": str(tmp_path / "samples.parquet"),
        "proxies": ["good", "bad"],
        "max_n": 16,
        "study": "file",
    }
    run = services.wait(services.trigger(parameters, "overoptimize").raise_for_status().json()["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    found = files(services, "file", "figures")
    assert found == {"figures/overoptimization_good.png", "figures/overoptimization_bad.png"}
    [told] = [text for text in services.artifacts(run["id"]) if "Over-optimisation" in text]
    assert "falls from the start" in next(line for line in told.splitlines() if "bad, best-of-n" in line)


def test_a_policy_is_trained_from_the_form_and_its_curves_are_in_mlflow(services):
    training = RlhfConfig(
        steps=2, prompts_per_step=2, group_size=4, measure_every=1, num_prompts=4, samples_per_prompt=2, rewards="local"
    )
    config = SMALL.model_copy(update={"study": "trained", "rlhf": training}).model_dump(mode="json")
    started = services.trigger({"config": config}, "rlhf").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    assert files(services, "trained", "grpo/figures") == {"grpo/figures/rlhf.png"}
    [tracked] = services.mlflow_runs("trained")
    metrics = {metric["key"]: metric["value"] for metric in tracked["data"]["metrics"]}
    assert {"policy/kl", "policy/gold", "policy/reward_seed0", "policy/weight_version_seed0"} <= metrics.keys()
    assert {"policy/trained_gold_ci_low", "cost/rlhf_tokens_per_second"} <= metrics.keys()
    [told] = [text for text in services.artifacts(run["id"]) if "win rate" in text and "GRPO" in text]
    assert "the gold world" in told


def test_a_form_that_names_a_checkpoint_for_the_wrong_mode_is_refused(services):
    config = SMALL.model_copy(update={"study": "wrong", "rlhf": RlhfConfig()}).model_dump(mode="json")
    started = services.trigger({"config": config, "checkpoint": "x"}, "rlhf").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "FAILED"
    assert "mode policy" in run["state"]["message"]
