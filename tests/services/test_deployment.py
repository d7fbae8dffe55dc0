"""The project's own deployment between `rm-opt up` and `rm-opt down`: triggered as the UI does, seen in a browser."""

import csv
import json
from datetime import UTC, datetime, timedelta

import pytest

from experiments.presets import PRESETS

pytestmark = pytest.mark.services
FLOWS = (
    "pipeline", "trajectory", "experiment", "score", "best-of-n", "overoptimize", "readiness", "readiness-validation",
    "active-learning", "rlhf",
)  # fmt: skip
MATRIX = {"experiment": "baseline", "size": "smoke", "seeds": 2}


@pytest.fixture(scope="module")
def finished(services):
    config = PRESETS["smoke"].model_copy(update={"study": "from-ui"}).model_dump(mode="json")
    config["evaluate"]["num_resamples"] = 100
    answer = services.trigger({"config": config})
    return services.wait(answer.raise_for_status().json()["id"])


def test_up_prints_both_addresses_and_status_agrees(services):
    for address in (services.ui, services.mlflow):
        assert address in services.printed
        assert address in services.rm_opt("status")


def test_the_form_has_choices_bounds_and_help(services):
    schema = services.deployment()["parameter_openapi_schema"]
    train = schema["definitions"]["TrainConfig"]["properties"]
    assert train["optimizer"]["enum"] == ["adamw", "adam", "sgd", "muon", "lion", "sam"]
    assert train["lr"]["exclusiveMinimum"] == 0
    assert "Peak learning rate" in train["lr"]["description"]
    assert "config" in schema["properties"]


def test_a_run_triggered_through_the_api_is_complete_in_mlflow_and_described_in_prefect(services, finished):
    assert finished["state_type"] == "COMPLETED", finished["state"]
    [run] = services.mlflow_runs("from-ui")
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert run["info"]["status"] == "FINISHED"
    assert tags["prefect.flow_run_id"] == finished["id"]
    artifacts = services.artifacts(finished["id"])
    assert "eady" in next(text for text in artifacts if "accuracy" in text)
    assert any(run["info"]["run_id"] in text for text in artifacts)


@pytest.mark.parametrize(
    ("field", "value"), [("lr", -1), ("optimizer", "adamm"), ("learning_rate", 0.1)], ids=["bound", "choice", "unknown"]
)
def test_a_bad_parameter_is_refused_naming_the_field(services, field, value):
    answer = services.trigger({"config": {"train": {field: value}}})
    assert answer.status_code == 409
    assert field in answer.text


def test_the_form_and_the_run_show_in_a_browser(browse, services, finished):
    forms = {name: f"{services.ui}/deployments/deployment/{services.deployment(name)['id']}/run" for name in FLOWS}
    pages = {
        forms["pipeline"]: ["Peak learning rate", "eval/pairwise_accuracy", "Submit"],
        forms["trajectory"]: [
            "train.save_every keeps",
            "steps between kept",
            "which checkpoint of the training",
            "Submit",
        ],
        forms["experiment"]: ["which question: baseline, ablation", "replicates of every arm", "Submit"],
        forms["score"]: ["a version in MLflow's registry", "longer than the model was trained to read", "Submit"],
        forms["best-of-n"]: ["in place of a training", "samples of each prompt", "Submit"],
        forms["overoptimize"]: ["column of the reward that counts", "largest n of best-of-n", "Submit"],
        forms["readiness"]: ["nats that the policy will be moved by", "Submit"],
        forms["readiness-validation"]: ["quickly trained backbones", "Submit"],
        forms["rlhf"]: ["Samples of each prompt, whose rewards are compared", "a checkpoint folder", "Submit"],
        forms["active-learning"]: ["paired repetitions", "Submit"],
        f"{services.ui}/runs/flow-run/{finished['id']}": ["from-ui-seed0", "Completed"],
    }
    for address, expected in pages.items():
        page = browse(address, "1400,3000").lower()
        missing = [text for text in expected if text.lower() not in page]
        assert not missing, f"{missing} not on {address}"


MEASURED = (
    "hessian/test_lambda_max", "hessian/test_lambda_max_residual", "hessian/test_lambda_min",
    "hessian/test_trace_estimate", "hessian/test_trace_standard_error", "hessian/test_margin_scale",
    "hessian/test_lambda_max_normalized",
)  # fmt: skip
STEPS = [4, 8, 10]


def small_trajectory(study):
    """Ten steps, of which 4, 8 and the last are kept: in another order than their names'."""
    preset = PRESETS["smoke"]
    changes = {"steps": STEPS[-1], "save_every": STEPS[0], "eval_every": STEPS[-1]}
    landscape = preset.landscape.model_copy(update={"parts": ("normalized",)})
    update = {"study": study, "seed": 1, "train": preset.train.model_copy(update=changes), "landscape": landscape}
    return preset.model_copy(update=update).model_dump(mode="json")


def test_a_trajectory_triggered_through_the_api_has_each_step_in_mlflow_and_runs_once(services, tmp_path):
    config = small_trajectory("along")
    started = services.trigger({"config": config}, "trajectory").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["name"] == "along-seed1-trajectory"
    [tracked] = services.mlflow_runs("along")
    tags = {tag["key"]: tag["value"] for tag in tracked["data"]["tags"]}
    assert tracked["info"]["status"] == "FINISHED"
    assert (tags["rm.kind"], tags["rm.cache"], tags["prefect.flow_run_id"]) == ("trajectory", "none", run["id"])
    for name in MEASURED:
        question = {"run_id": tracked["info"]["run_id"], "metric_key": name}
        answer = services.http.get(f"{services.mlflow}/api/2.0/mlflow/metrics/get-history", params=question).json()
        assert [int(point["step"]) for point in answer["metrics"]] == STEPS, name
    [description] = [text for text in services.artifacts(run["id"]) if "margins of 1" in text]
    assert "falls merely because margins grow" in description

    before = {path: path.read_bytes() for path in services.home.glob("store/[!.]*/*/MANIFEST.json")}
    (tmp_path / "same.yaml").write_text(json.dumps(config))
    arguments = ["--preset", "smoke", "--config", tmp_path / "same.yaml", "--summary", tmp_path / "summary.json"]
    said = services.rm_opt("trajectory", *arguments)
    outcome = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["executed"] == []
    assert {path: path.read_bytes() for path in services.home.glob("store/[!.]*/*/MANIFEST.json")} == before
    assert [row["step"] for row in outcome["results"]["checkpoints"]] == STEPS
    assert outcome["figure"] in said
    with open(outcome["table"], newline="") as file:
        table = list(csv.DictReader(file))
    for row, shown in zip(outcome["results"]["checkpoints"], table, strict=True):
        assert float(shown["lambda_max"]) == row["metrics"]["hessian/lambda_max"]


def test_a_trajectory_without_checkpoints_is_refused_before_training(services):
    before = trained(services)
    config = small_trajectory("nowhere")
    config["train"]["save_every"] = None
    started = services.trigger({"config": config}, "trajectory").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "FAILED"
    assert "train.save_every is not set" in run["state"]["message"]
    assert trained(services) == before
    assert services.mlflow_runs("nowhere") == []


@pytest.fixture(scope="module")
def matrix(services):
    """A matrix started as the UI does it."""
    answer = services.trigger(MATRIX, "experiment").raise_for_status().json()
    return services.wait(answer["id"], timeout_s=500)


def trained(services):
    return {path: path.read_bytes() for path in services.home.glob("store/train/*/MANIFEST.json")}


def test_a_matrix_started_in_the_ui_a_command_and_a_schedule_share_their_cells(services, matrix, tmp_path):
    assert matrix["state_type"] == "COMPLETED", matrix["state"]
    before = trained(services)
    assert len(before) >= 4
    services.rm_opt("experiment", "baseline", "--seeds", 2, "--summary", tmp_path / "summary.json")
    outcome = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["computed"] == []
    assert outcome["results"]["cost"]["num_cached"] == 4
    deployment = services.deployment("experiment")
    # The server looks for schedules once a minute; asked for it, it plans at once, and the first run is not yet past.
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    schedule = {"schedule": {"interval": 3600, "anchor_date": soon}, "active": True, "parameters": MATRIX}
    place = f"{services.api}/deployments/{deployment['id']}"
    [created] = services.http.post(f"{place}/schedules", json=[schedule]).raise_for_status().json()
    services.http.post(f"{place}/schedule", json={}).raise_for_status()
    planned = services.flow_runs(tags={"all_": ["auto-scheduled"]})
    run = min(planned, key=lambda one: one["expected_start_time"])
    assert run["auto_scheduled"]
    assert services.wait(run["id"])["state_type"] == "COMPLETED"
    services.http.delete(f"{place}/schedules/{created['id']}").raise_for_status()
    assert trained(services) == before


def test_the_schedules_that_are_shipped_are_paused(services):
    for name, cron in (("nightly-ablation", "0 2 * * *"), ("weekly-optimizers", "0 3 * * 0")):
        [schedule] = services.deployment("experiment", name)["schedules"]
        assert schedule["schedule"]["cron"] == cron
        assert not schedule["active"]


@pytest.mark.parametrize(
    ("field", "value"), [("size", "huge"), ("experiment", "abblation"), ("seeds", 0)], ids=["choice", "name", "bound"]
)
def test_a_bad_matrix_is_refused_by_the_form_naming_the_field(services, field, value):
    answer = services.trigger(MATRIX | {field: value}, "experiment")
    assert answer.status_code == 409
    assert field in answer.text
