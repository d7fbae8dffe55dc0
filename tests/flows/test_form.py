"""What a flow's form asks for, without a server."""

import pytest
from coolname import generate

from experiments.presets import DESCRIBED, PRESETS
from flows.experiment import experiment
from flows.form import is_made_up
from flows.pipeline import pipeline
from flows.policy import best_of_n, confirm, readiness, rlhf
from rmcore.core.errors import ConfigError, ModelError

CONFIGURED = (pipeline, best_of_n, readiness, confirm, rlhf)


@pytest.mark.parametrize("flow", [*CONFIGURED, experiment], ids=lambda flow: flow.name)
def test_a_deployments_page_says_what_the_flow_does_and_draws_its_stages(flow):
    said = flow.description
    assert "──>" in said
    assert "Args:" not in said
    assert "Returns:" not in said


@pytest.mark.parametrize("flow", CONFIGURED, ids=lambda flow: flow.name)
def test_a_preset_comes_first_and_everything_else_last(flow):
    preset, *fields = flow.parameters.properties
    assert (preset, fields[-1]) == ("preset", "overrides")
    assert len(fields) <= 13
    assert not flow.parameters.definitions
    assert all("description" in field for field in flow.parameters.properties.values())
    assert flow.parameters.required == []
    meanings = flow.parameters.properties["preset"]
    assert all(DESCRIBED[name].purpose in meanings["description"] for name in meanings["enum"])


def test_a_field_has_the_bounds_and_the_help_of_its_setting_and_no_default():
    """A default of the form is what Prefect's page would send for an empty field; which preset depends on the data."""
    preset, rate = (pipeline.parameters.properties[name] for name in ("preset", "lr"))
    assert "default" not in preset
    assert (rate["exclusiveMinimum"], "default" in rate) == (0, False)
    assert "Peak learning rate" in rate["description"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"lr": -1}, r"train\.lr: Input should be greater than 0 \(given: -1\)"),
        ({"overrides": {"study": "a b"}}, "study: String should match"),
        ({"overrides": {"train.optimizer": "adamm"}}, r"train\.optimizer: Input should be 'adamw'"),
    ],
)
def test_a_bad_value_is_refused_in_the_words_of_the_command_line(parameters, said):
    with pytest.raises(ConfigError, match=said):
        pipeline.fn(**parameters)


@pytest.mark.parametrize("name", ["upsilon4-moria-nebula", "zeta367-asano", "beta-canis-majoris-cloud", "omega-rigel"])
def test_a_name_that_prefects_form_has_made_up_is_no_given_one(name):
    assert is_made_up(name)


def test_names_of_the_hub_are_asked_for_before_a_form_starts_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="owner/model"):
        pipeline.fn(preset="smoke", model="owner/model")
    assert not list(tmp_path.iterdir())


def test_a_name_that_prefects_server_has_made_up_is_no_given_one():
    assert all(is_made_up("-".join(generate(2))) for _ in range(200))


@pytest.mark.parametrize("name", ["My walk", "lr-sweep", "demo-seed0", "try 2", "beta-0.5", "mine", *PRESETS])
def test_a_given_name_stays(name):
    assert not is_made_up(name)
