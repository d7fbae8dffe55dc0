"""A run that was stopped is known by its name, and `rm-opt run --resume` has its settings."""

import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from experiments.presets import PRESETS
from flows import cli, cli_run
from flows.settings import load_config
from flows.unfinished import FOLDER, read_unfinished, recorded_config, unfinished
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.processes import this_process
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
    newest = next(run for run in read_unfinished() if run.name == name)
    assert not newest.is_running
    change(name, newest.file, owner=this_process() | {"pid": str(process.pid)})


def change(name, file=None, **changed):
    if file is None:
        [file] = (read_home() / FOLDER).glob(f"{name}.*.json")
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


@pytest.mark.slow
def test_equal_runs_at_once_keep_a_record_each_and_remove_their_own_alone(reports):
    """Four at once in rounds, equal and unequal in study and seed: each sees itself until it ends."""
    script = (
        "import sys; from experiments.presets import PRESETS\n"
        "from flows.unfinished import read_unfinished, unfinished\n"
        "for turn in range(25):\n"
        "    name = f'mine-seed{turn % 2}'\n"
        "    config = PRESETS['smoke'].model_copy(update={'seed': turn % 3})\n"
        "    with unfinished(name, config):\n"
        "        assert any(run.is_running and run.name == name for run in read_unfinished()), turn\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    with unfinished("mine-seed0", CONFIG):
        assert [run.wait() for run in runs] == [0, 0, 0, 0]
        [own] = read_unfinished()
        assert (own.name, own.resume, own.config) == ("mine-seed0", "mine-seed0", CONFIG.model_dump(mode="json"))
    assert read_unfinished() == []
    assert list((reports / FOLDER).iterdir()) == []


def test_stopped_runs_of_one_name_are_told_apart_by_their_settings_and_replaced_by_their_repetition(reports):
    for config in (CONFIG, CONFIG, PRESETS["smoke"]):
        stopped("mine-seed3", config)
    newer, older = read_unfinished()
    assert newer.resume != older.resume
    with pytest.raises(ConfigError, match=f"'mine-seed3' may be {newer.resume}, {older.resume}"):
        recorded_config("mine-seed3", [])
    assert [recorded_config(run.resume, []) for run in (newer, older)] == [PRESETS["smoke"], CONFIG]
    with unfinished("mine-seed3", CONFIG):
        assert recorded_config("mine-seed3", []) == PRESETS["smoke"]
    assert [run.config["study"] for run in read_unfinished()] == [PRESETS["smoke"].study]


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


def test_what_is_no_record_hides_no_other_and_settings_that_there_are_not_are_named(reports):
    stopped("a-seed0", PRESETS["smoke"])
    stopped("b-seed0", PRESETS["smoke"])
    change("b-seed0", config={"study": "b", "no_such_setting": 1})
    damaged = reports / FOLDER / "broken.json"
    kinds = ['{"pid"', "[1]", '{"a":' + "[" * 100_000, '{"name": "a", "started": "0001-01-01T00:00:00+14:00"}']
    kinds += [
        json.dumps({"started": "2026-01-01T00:00:00", "name": name, "owner": owner, "config": {}})
        for name, owner in ((3, None), ("\ud800", None), ("a\x1b[2J", None), ("a", "me"), ("a", [1]))
    ]
    for text in (*kinds, None):
        damaged.unlink(missing_ok=True)
        damaged.write_text(text) if text is not None else damaged.mkdir()
        assert sorted(run.name for run in read_unfinished() if run.problem is None) == ["a-seed0", "b-seed0"], text
        assert [run.name for run in read_unfinished() if run.problem is not None] == ["broken"], text
        assert f"unreadable  {damaged}: " in typed("runs")
    with pytest.raises(ConfigError, match=r"broken\.json cannot be read"):
        recorded_config("broken", [])
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
        cli_run, "run_configured", lambda flow, preset, given, **more: started.append((preset, given, more))
    )
    stopped("mine-seed3", CONFIG)
    assert "mine-seed3  begun " in typed("runs")
    assert "unfinished: rm-opt run --from mine-seed3" in typed("runs")
    (reports.parent / "rm-opt.yaml").write_text("preset: smoke\n")
    assert "settings    of the run mine-seed3" in typed("run", "--from", "mine", "--set", "seed=4")
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
