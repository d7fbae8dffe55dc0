"""What was removed answers with one sentence, wherever it is still named."""

import json

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from every_command import EVERY
from experiments.presets import PRESETS
from flows.cli import app
from flows.settings import form_config, load_config
from rmcore.cli.guard import describe_validation, guard
from rmcore.config import gone
from rmcore.config.changes import change_config
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError

INVENTED = {"sail": "the wind does it.", "active sail": "the wind does it."}
INVENTED_SETTINGS = {"train.sails": "the wind sets them.", "harbour": "ships stay at sea."}


@pytest.fixture(autouse=True)
def _invented(monkeypatch):
    for words, sentence in INVENTED.items():
        monkeypatch.setitem(gone.COMMANDS, words, sentence)
    for name, sentence in INVENTED_SETTINGS.items():
        monkeypatch.setitem(gone.SETTINGS, name, sentence)


@pytest.mark.parametrize("words", [*gone.COMMANDS, *INVENTED])
def test_a_removed_command_says_what_replaced_it(words, capsys):
    assert tuple(words.split()) not in EVERY
    status = guard(lambda: app([*words.split(), "--preset", "demo"], standalone_mode=False))
    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith("error: `")
    assert f"{words}` was removed: {gone.COMMANDS[words]}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("given", gone.OPTIONS)
def test_a_removed_option_or_value_of_one_says_what_replaced_it(given, capsys):
    commands = {"--runner": ["experiment", "ablation"], "--acquisition": ["data", "propose"], "--optimizer": ["train"]}
    command = commands.get(given.split()[0], ["up"])
    assert guard(lambda: app([*command, *given.split()], standalone_mode=False)) == 2
    assert f"{given} was removed: {gone.OPTIONS[given]}" in capsys.readouterr().err
    assert guard(lambda: app(["experiment", "ablation", "--runner", "sail"], standalone_mode=False)) == 2
    assert "removed" not in capsys.readouterr().err


def test_the_page_lists_no_removed_command():
    page = CliRunner().invoke(app, ["--help"], prog_name="rm-opt").output
    assert "sail" not in page


@pytest.mark.parametrize("name", [*gone.SETTINGS, *INVENTED_SETTINGS])
def test_a_removed_setting_says_what_happened(name, tmp_path):
    sentence = gone.SETTINGS[name]
    tree = 7
    for part in reversed(name.split(".")):
        tree = {part: tree}
    file = tmp_path / "rm-opt.yaml"
    file.write_text(f"{tree}\n")  # JSON is YAML
    for load in (
        lambda: load_config("demo", file, []),
        lambda: load_config("demo", None, [f"{name}=7"]),
        lambda: form_config("demo", {}, {name: 7}),
        lambda: change_config(PipelineConfig(), {name: 7}),
    ):
        with pytest.raises(ValueError, match="was removed") as refused:
            load()
        assert sentence in str(refused.value)
    with pytest.raises(ValidationError) as recorded:  # as of a run that a version before recorded
        PipelineConfig.model_validate(tree)
    assert sentence in describe_validation(recorded.value)


def test_a_removed_value_of_a_setting_says_what_happened():
    with pytest.raises(ValidationError) as refused:
        load_config("demo", None, ["train.optimizer=lion"])
    assert gone.removed_value("train.optimizer", "lion") in describe_validation(refused.value)


def test_a_settings_file_of_an_earlier_version_with_defaults_of_removed_settings_is_read(tmp_path):
    file = tmp_path / "rm-opt.yaml"
    before = {}
    for name, value in gone.DEFAULTS.items():
        *groups, last = name.split(".")
        inside = before
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[last] = value
    for section in ("policy", "rlhf"):  # groups that the preset has not
        before.pop(section)
    file.write_text(json.dumps({"preset": "smoke"} | before, indent=1))
    assert load_config(None, file, []) == PRESETS["smoke"]
    file.write_text("preset: smoke\nskip: [landscape]\n")
    with pytest.raises(ConfigError, match=r"line 2: the setting skip was removed: .* Remove it"):
        load_config(None, file, [])


def test_settings_inside_a_removed_group_are_removed():
    with pytest.raises(ConfigError, match="the setting harbour was removed: ships stay at sea"):
        load_config("demo", None, ["harbour.depth=3"])
    assert gone.removed_setting("harbours") is None
    assert gone.removed_setting("train.lr") is None


@pytest.mark.parametrize("name", gone.PRESETS)
def test_a_removed_preset_says_what_happened(name, tmp_path):
    file = tmp_path / "rm-opt.yaml"
    file.write_text(f"preset: {name}\n")
    for load in (lambda: load_config(name, None, []), lambda: load_config(None, file, [])):
        with pytest.raises(ConfigError) as refused:
            load()
        assert gone.PRESETS[name] in str(refused.value)
