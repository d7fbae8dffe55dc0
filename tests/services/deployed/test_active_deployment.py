"""The saving study, from its form and as a command: registered first, run once, shown in MLflow and in a report."""

import html
import json
from pathlib import Path

import pytest

from experiments.presets import PRESETS
from rmcore.config.active import ActiveConfig
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.core.errors import ConfigError
from tasks.mlflow_client import connect

pytestmark = pytest.mark.services
CONFIG = PRESETS["active-smoke"].model_copy(
    update={
        "study": "labels",
        "data": DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=2)),
        "active": ActiveConfig(num_seeds=2, noise=(0.0,), seed_pairs=8, validation_pairs=6, growth=2.0, num_members=2),
    }
)


@pytest.fixture(scope="module")
def run(services):
    """The flow run that was started from the form."""
    config = CONFIG.model_dump(mode="json")
    return services.wait(services.trigger({"overrides": config}, "active-learning").raise_for_status().json()["id"])


def test_the_form_has_bounds_and_help(services):
    fields = services.deployment("active-learning")["parameter_openapi_schema"]["properties"]
    assert "Paired repetitions" in fields["num_seeds"]["description"]
    assert (fields["num_seeds"]["type"], fields["num_seeds"]["minimum"], fields["num_seeds"]["maximum"]) == (
        "integer", 1, 200,
    )  # fmt: skip


def test_the_study_runs_from_its_form_and_shows_in_mlflow(services, run):
    assert run["state_type"] == "COMPLETED", run["state"]
    [tracked] = services.mlflow_runs("labels")
    run_id, client = tracked["info"]["run_id"], connect(services.tracking)
    assert tracked["info"]["status"] == "FINISHED"
    tags = {tag["key"]: tag["value"] for tag in tracked["data"]["tags"]}
    assert tags["rm.cache"] in ("none", "prepare")
    figures = {file.path for file in client.list_artifacts(run_id, "active/figures")}
    assert figures == {"active/figures/label_efficiency.png", "active/figures/label_savings.png"}
    assert [file.path for file in client.list_artifacts(run_id, "report")] == ["report/report.html"]
    by_labels = [(point.step, point.value) for point in client.get_metric_history(run_id, "eval/accuracy_d_optimal")]
    assert len(by_labels) > 2
    assert all(0 <= value <= 1 for _, value in by_labels)
    [told] = [text for text in services.artifacts(run["id"]) if "paired seeds" in text]
    assert "Registration 1" in told
    assert "What was claimed, and what came of it" in services.report(run["id"])
    assert services.edges(run["id"]) == {
        "prepare": set(), "features": {"prepare"}, "active": {"features"}, "report": {"active"},
    }  # fmt: skip
    assert "report/report.html" in tags["mlflow.note.content"]
    [registered] = (services.home / "registrations" / "active-labels").glob("0001-*.json")
    claims = json.loads(registered.read_text())["frozen"]["claims"]
    assert "d-optimal > 40%" in [claim["name"] for claim in claims]


def test_the_command_finds_it_done_and_says_what_was_saved(services, run, command):
    outcome, said = command.outcome("active", "study", "--preset", "active-smoke", config=CONFIG)
    found = outcome["results"]
    assert outcome["executed"] == []
    assert "every stage was cached" in said
    assert found["headline"] in said
    assert "d-optimal > 40%" in said
    assert "inconclusive" in said  # two seeds claim nothing
    assert found["registration"]["number"] == 1
    assert len(list((services.home / "registrations" / "active-labels").glob("*.json"))) == 1
    report = Path(outcome["report"])
    assert report.parent == Path(outcome["folder"])
    page = html.unescape(report.read_text())
    assert all(claim["text"] in page for claim in found["claims"])
    assert "report " in said
    assert "paired seeds" in report.with_name("summary.md").read_text()
    assert set(outcome["figures"]) == {"label_efficiency", "label_savings"}


def test_a_study_without_random_choice_is_refused(command):
    settings = ["--set", "active.acquisitions=[bald]"]
    done = command("active", "study", "--preset", "active-smoke", *settings, check=False)
    assert done.returncode == 2
    assert "add random" in " ".join(done.stderr.split())


def test_a_form_without_a_study_is_refused_before_anything_runs(home):
    from flows.active_learning import active_learning

    with pytest.raises(ConfigError, match="preset active"):
        active_learning.fn(overrides={"active": None})
    assert not list((home / "registrations").iterdir())
