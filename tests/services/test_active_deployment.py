"""The saving study started as from its form: registered first, curves by acquisition function in MLflow."""

import json

import pytest

from experiments.presets import PRESETS
from rmcore.config import ActiveConfig, DataConfig, GoldConfig
from tasks.mlflow_client import connect

pytestmark = pytest.mark.services
CONFIG = PRESETS["active-smoke"].model_copy(
    update={
        "study": "labels",
        "data": DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=2)),
        "active": ActiveConfig(num_seeds=2, noise=(0.0,), seed_pairs=8, validation_pairs=6, growth=2.0, num_members=2),
    }
)


def test_the_study_runs_from_its_form_and_shows_in_mlflow(services):
    schema = services.deployment("active-learning")["parameter_openapi_schema"]
    assert "Paired repetitions" in schema["definitions"]["ActiveConfig"]["properties"]["num_seeds"]["description"]
    started = services.trigger({"config": CONFIG.model_dump(mode="json")}, "active-learning").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    [tracked] = services.mlflow_runs("labels")
    run_id, client = tracked["info"]["run_id"], connect(services.tracking)
    assert tracked["info"]["status"] == "FINISHED"
    figures = {file.path for file in client.list_artifacts(run_id, "active/figures")}
    assert figures == {"active/figures/label_efficiency.png", "active/figures/label_savings.png"}
    assert [file.path for file in client.list_artifacts(run_id, "report")] == ["report/report.html"]
    by_labels = [(point.step, point.value) for point in client.get_metric_history(run_id, "eval/accuracy_d_optimal")]
    assert len(by_labels) > 2
    assert all(0 <= value <= 1 for _, value in by_labels)
    [told] = [text for text in services.artifacts(run["id"]) if "paired seeds" in text]
    assert "Registration 1" in told
    [registered] = (services.home / "registrations" / "active-labels").glob("0001-*.json")
    claims = json.loads(registered.read_text())["frozen"]["claims"]
    assert "d-optimal > 40%" in [claim["name"] for claim in claims]


def test_a_form_without_a_study_is_refused_before_anything_runs(services):
    config = CONFIG.model_copy(update={"active": None, "study": "nothing"}).model_dump(mode="json")
    started = services.trigger({"config": config}, "active-learning").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "FAILED"
    assert "preset active" in run["state"]["message"]
    assert services.mlflow_runs("nothing") == []
