"""A run that was stopped is known by its name, and `rm-opt run --resume` has its settings."""

import json
import os
import subprocess

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from experiments.presets import PRESETS
from flows import cli, cli_run
from flows.settings import load_config
from flows.unfinished import FOLDER, read_unfinished, recorded_config, unfinished
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.reporting.runs import read_runs

CONFIG = PRESETS["rlhf"].model_copy(update={"seed": 3, "study": "mine"})


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reports"


def stopped(name, config):
    """A run whose process has ended without a word."""
    with pytest.raises(TrainingError), unfinished(name, config):
        raise TrainingError("no memory")
    process = subprocess.Popen(["true"])
    process.wait()
    change(name, pid=process.pid)


def change(name, **changed):
    [file] = (read_home() / FOLDER).glob(f"{name}.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def read_home():
    from tasks.home import home

    return home() / "reports"


def test_a_run_is_unfinished_until_it_ends_well(reports):
    assert read_unfinished() == []
    with unfinished("mine-seed3", CONFIG):
        [run] = read_unfinished()
        assert (run.name, run.is_running) == ("mine-seed3", True)
        with pytest.raises(ConfigError, match="mine-seed3 is running"):
            recorded_config("mine", [])
    assert read_unfinished() == []
    stopped("mine-seed3", CONFIG)
    [run] = read_unfinished()
    assert not run.is_running


@pytest.mark.parametrize("preset", PRESETS)
def test_the_settings_are_exactly_those_it_was_begun_with(reports, preset):
    stopped("mine-seed3", PRESETS[preset])
    recorded = recorded_config("mine", [])
    assert recorded == PRESETS[preset]
    assert load_config(None, None, [], recorded) == PRESETS[preset]
    assert load_config(None, None, ["seed=9"], recorded).seed == 9


def test_a_finished_run_has_its_settings_too_and_an_unfinished_one_comes_first(reports):
    for name, record in (("mine-seed3-0123456789ab", {"config": CONFIG.model_dump(mode="json")}), ("drawn", {"a": 1})):
        (reports / name).mkdir(parents=True)
        (reports / name / "summary.json").write_text(json.dumps(record))
    assert recorded_config("mine-seed3", read_runs(reports)) == CONFIG
    stopped("mine-seed3", PRESETS["smoke"])
    assert recorded_config("mine-seed3", read_runs(reports)) == PRESETS["smoke"]
    with pytest.raises(ConfigError, match="drawn is not a run of the pipeline"):
        recorded_config("drawn", read_runs(reports))
    with pytest.raises(ConfigError, match=r"no run 'none'.*no unfinished run is called so"):
        recorded_config("none", read_runs(reports))


def test_what_is_no_record_hides_no_other_and_another_version_s_settings_are_named(reports):
    stopped("a-seed0", PRESETS["smoke"])
    stopped("b-seed0", PRESETS["smoke"])
    change("b-seed0", config={"study": "b", "no_such_setting": 1})
    (reports / FOLDER / "broken.json").write_text('{"pid"')
    assert sorted(run.name for run in read_unfinished()) == ["a-seed0", "b-seed0"]
    with pytest.raises(ValidationError, match="no_such_setting"):
        recorded_config("b", [])


def typed(*words):
    outcome = CliRunner().invoke(cli.app, list(words), prog_name="rm-opt", catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_the_command_runs_with_the_settings_of_the_run(reports, monkeypatch):
    started = []
    monkeypatch.setattr(cli_run, "print_reported", lambda outcome: None)
    monkeypatch.setattr(
        cli_run, "run_configured", lambda load, preset, given, **more: started.append((preset, given, more))
    )
    stopped("mine-seed3", CONFIG)
    assert "mine-seed3  begun " in typed("runs")
    assert "unfinished: rm-opt run --resume mine-seed3" in typed("runs")
    (reports.parent / "rm-opt.yaml").write_text("preset: smoke\n")
    assert "settings    of the run mine-seed3" in typed("run", "--resume", "mine", "--set", "seed=4")
    [(preset, given, more)] = started
    assert (preset, given.config, given.set_, more["recorded"]) == (None, None, ["seed=4"], CONFIG)
    with pytest.raises(ConfigError, match="leave out --preset and --config"):
        typed("run", "--resume", "mine", "--preset", "smoke")


def test_only_the_owner_reads_the_settings(reports):
    before = os.umask(0)
    try:
        stopped("mine-seed3", CONFIG)
    finally:
        os.umask(before)
    assert not (reports / FOLDER).stat().st_mode & 0o077
