"""What holds of the stage of any capability, whichever there are."""

import inspect
import json
import sys
from types import ModuleType

import pytest
from pydantic import create_model

from capability_samples import RECORDS, SECTIONS
from rmcore.cli.measurement import measuring_command
from rmcore.config.pipeline import PipelineConfig
from rmcore.core import capabilities
from rmcore.core.store import ArtifactRef
from rmcore.stages.measurement import Measurement
from rmcore.stages.order import pipeline_stages, stage_of
from rmcore.stages.stage import Stage, stage
from rmcore.stages.stages import OPTIONAL, STAGES
from tasks.run_record import headline


def test_each_has_settings_and_a_record_for_all_tests():
    assert set(OPTIONAL) == SECTIONS.keys() == RECORDS.keys()


@pytest.mark.parametrize("name", OPTIONAL)
def test_it_is_run_where_its_section_is_there_and_has_the_usual_settings_where_it_is_requested_without(name):
    assert name in pipeline_stages(PipelineConfig().model_copy(update={name: SECTIONS[name]}))
    assert name not in pipeline_stages(PipelineConfig())
    assert getattr(stage_of(name, PipelineConfig()), name) == type(SECTIONS[name])()


@pytest.mark.parametrize("name", OPTIONAL)
def test_its_record_is_plain_json_and_its_numbers_are_metrics_in_mlflow_where_it_says_so(name):
    assert json.loads(json.dumps(RECORDS[name]()))
    metrics, _ = headline([{"stage": name, "metric": "eval/a_number_of_its_own", "value": 1.0}])
    assert bool(metrics) == STAGES[name].in_mlflow


def test_one_that_runs_no_model_is_given_the_prepared_pairs_and_waits_for_no_training(monkeypatch):
    name = OPTIONAL[0]
    monkeypatch.setitem(STAGES, name, STAGES[name])  # what is declared here is forgotten after it
    fields = {"prepared": (ArtifactRef, ...), name: (type(SECTIONS[name]), ...)}
    stage(name, outcome=("record.json",))(create_model("Plain", __base__=Stage, **fields))
    plain = stage_of(name, PipelineConfig().model_copy(update={name: SECTIONS[name]}))
    assert plain.upstream.keys() == {"prepare"}
    assert plain.device_name is None


def test_a_folder_that_has_a_docstring_alone_has_one_command_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "rmcore.made_up", ModuleType("rmcore.made_up", "Count the\nwords.\n\nMore of it."))
    monkeypatch.setattr(capabilities, "NAMES", ("made_up",))
    found = capabilities.capabilities.__wrapped__()
    assert found == {"made_up": capabilities.Capability({"made_up": "Count the words."})}


MEASUREMENTS = [name for name in OPTIONAL if issubclass(STAGES[name], Measurement)]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_command_made_of_a_stage_has_an_option_for_each_of_its_settings(name):
    options = inspect.signature(measuring_command(name, "Measure it.")).parameters
    assert {"checkpoint", "data", "seed", "json_out", "out", *type(SECTIONS[name]).model_fields} <= options.keys()
