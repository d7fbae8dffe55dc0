"""`rm-opt run --presets` and `rm-opt init`, and that `rm-opt run` finds what was written."""

from typing import get_args

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from experiments.presets import DESCRIBED, PRESETS
from flows import cli, cli_run
from flows.cli_run import COMMON, FILE, settings_text, write_settings
from flows.pipeline import FORM
from flows.settings import DEFAULT_PRESET, OWN_DATA_PRESET, load_config, named_changes, require_names
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_written_is_exactly_the_preset(preset, tmp_path):
    file = tmp_path / "mine.yaml"
    write_settings(file, preset)
    assert load_config(None, file, []) == PRESETS[preset]


def test_each_setting_has_its_help_and_its_choices_above_it():
    text = settings_text("policy")
    said = " ".join(text.replace("#", "").split())
    for name in COMMON:
        group, _, field = name.rpartition(".")
        owner = getattr(PRESETS["policy"], group) if group else PRESETS["policy"]
        if owner is not None:
            assert " ".join(type(owner).model_fields[field].description.split()) in said
    choices = get_args(TrainConfig.model_fields["optimizer"].annotation)
    assert f"One of: {', '.join(choices)}. optimizer:" in said
    assert max(map(len, text.splitlines())) <= 100


def test_a_file_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FILE.write_text("mine")
    with pytest.raises(ConfigError, match="never overwritten"):
        write_settings(FILE, "demo")
    assert FILE.read_text() == "mine"


def test_a_file_for_one_preset_is_not_laid_over_another(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("preset: minilm\ntrain: {lr: 0.1}\n")
    assert load_config(None, file, []).model.name == load_config("minilm", file, []).model.name == "minilm"
    with pytest.raises(ConfigError, match="--preset minilm"):
        load_config("smoke", file, [])
    file.write_text("preset: minilmm\n")
    with pytest.raises(ConfigError, match="Did you mean 'minilm'"):
        load_config(None, file, [])


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What the pipeline would be started with."""
    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_run, "print_reported", lambda outcome: None)
    monkeypatch.setattr(
        cli_run,
        "run_configured",
        lambda flow, preset, given, assignments=(), recorded=None: configs.append(
            load_config(preset, given.config, [*assignments, *(given.set_ or [])], recorded)
        ),
    )
    return configs


def typed(*words):
    outcome = CliRunner().invoke(cli.app, list(words), prog_name="rm-opt", catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_a_run_reads_the_file_of_its_folder_and_says_so(started):
    assert typed("run") == ""
    assert "rm-opt.yaml" in typed("init")
    FILE.write_text(FILE.read_text().replace("  source: ''\n", "  source: pairs.csv\n"))
    assert "rm-opt.yaml" in typed("run", "--set", "seed=3")
    assert started[0] == PRESETS["demo"]
    assert (started[1].data.source, started[1].seed, started[1].model.name) == ("pairs.csv", 3, "minilm")


def test_a_preset_or_a_file_that_is_named_wins(started, tmp_path):
    (tmp_path / "other.yaml").write_text("seed: 7\n")
    typed("init")
    assert "not read: --preset is given" in typed("run", "--preset", "smoke")
    assert "not read: --config is given" in typed("run", "--config", "other.yaml")
    assert started[0] == PRESETS["smoke"]
    assert started[1] == PRESETS["demo"].model_copy(update={"seed": 7})


def test_options_of_a_run_are_settings_and_set_has_the_last_word(started):
    typed("run", "--device", "cuda:1")
    typed("run", "--device", "cuda:1", "--set", "device=cpu")
    first, second = started
    assert (first.device, second.device) == ("cuda:1", "cpu")
    with pytest.raises(ValidationError, match="device"):
        typed("run", "--device", "gpu")


@pytest.mark.parametrize("source", [None, "gold", "pairs.csv", "owner/pairs"])
@pytest.mark.parametrize("preset", [None, "smoke"])
def test_a_command_and_a_form_start_from_the_same_preset_for_the_same_pairs(started, source, preset):
    """However the pairs are named."""
    typed("run", *(["--data", source] if source else []), *(["--preset", preset] if preset else []))
    expected = preset or (OWN_DATA_PRESET if source not in (None, "gold") else DEFAULT_PRESET)
    assert started[-1].model_copy(update={"data": PRESETS[expected].data}) == PRESETS[expected]
    given = {"preset": preset} if preset else {}
    for named in (
        {"data": source},
        {"overrides": {"data.source": source}},
        {"overrides": {"data": {"source": source}}},
    ):
        assert FORM.config(given | (named if source else {})) == started[-1]
    if source:
        typed("run", "--set", f"data.source={source}", *(["--preset", preset] if preset else []))
        FILE.with_name("mine.yaml").write_text(
            f"data: {{source: {source}}}\n" + (f"preset: {preset}\n" if preset else "")
        )
        typed("run", "--config", "mine.yaml")
        assert started[-1] == started[-2] == started[-3]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_for_ones_own_pairs_trains_on_no_others_unasked(preset):
    config = load_config(preset, None, [])
    if config.is_gold:
        return require_names(config)
    with pytest.raises(ConfigError, match="none are named: name them by --data FILE"):
        require_names(config)
    assert load_config(preset, None, ["data.source=gold"]).is_gold
    return None


def test_each_preset_has_one_line_that_says_what_it_is():
    shown = typed("run", "--presets").splitlines()
    for (name, one), line in zip(DESCRIBED.items(), shown, strict=False):
        assert line.startswith(f"{name} ")
        assert one.config.model.name in line
        assert (one.time or "by your") in line
        assert one.purpose[:12] in line
        assert one.command == "run" or f"rm-opt {one.command}" in line
    assert len(shown) == len(DESCRIBED) + 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("changed", [{}, {"seed": 3}, {"train": {"steps": 60}}, {"model": {"max_seq_len": 77}}])
def test_a_run_is_named_by_what_it_changes_of_the_nearest_preset(preset, changed):
    """Presets that differ in a study and data alone have one name between them."""
    tree = PRESETS[preset].model_dump(mode="json")
    for name, value in changed.items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    said = named_changes(tree | {"study": "mine"})
    if not changed or tree == PRESETS[preset].model_dump(mode="json"):
        assert named_changes(PRESETS[said].model_dump(mode="json")) == said
    else:
        last = next(iter(changed.values()))
        assert said == " ".join(
            f"{key}={value}" for key, value in (last if isinstance(last, dict) else changed).items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", DESCRIBED)
def test_presets_are_started_by_commands_that_there_are(name):
    command = typer.main.get_command(cli.app)
    words, _, options = DESCRIBED[name].command.partition(" --")
    for word in words.split():
        command = command.commands[word]
    assert {*options.split()[:1], "preset"} & {one.name for one in command.params} or name == "validation"
    assert isinstance(DESCRIBED[name].config, PipelineConfig)
