"""Names of other trainers lead to ours, on the command line, in files and in the documents alike."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app
from flows.settings import _setting_names, load_config
from rmcore.cli.guard import guard
from rmcore.config.elsewhere import ELSEWHERE
from rmcore.core.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {"TRL and transformers": DOCS / "from-trl.md", "OpenRLHF": DOCS / "from-openrlhf.md"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_name_is_told_of_by_the_page_of_its_library_with_our_flag(name):
    ours = ELSEWHERE[name]
    assert ours.setting in _setting_names()
    options = {option for parameter in get_command(app).commands["train"].params for option in parameter.opts}
    assert ours.flag in options
    lines = PAGES[ours.library].read_text().splitlines()
    told = [line for line in lines if re.search(rf"`[^`]*\b{re.escape(name)}\b", line)]
    assert any(re.search(rf"{ours.flag}(?![a-z-])", line) for line in told), told


@pytest.mark.parametrize("given", ["--learning-rate", "--per_device_train_batch_size", "--adam.lr"])
@pytest.mark.parametrize(("command", "flag"), [("train", ""), ("run", "--set ")])
def test_an_option_of_another_trainer_is_answered_with_ours(given, command, flag, capsys):
    assert guard(lambda: app([command, given, "3"], standalone_mode=False)) == 2
    ours = ELSEWHERE[given.lstrip("-").replace("-", "_")]
    assert f"here it is {flag}{ours.setting if flag else ours.flag}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.learning_rate", "learning_rate", "train.batch_size"])
def test_a_setting_of_another_trainer_is_answered_with_ours(name, tmp_path):
    file = tmp_path / "settings.yaml"
    group, _, last = name.rpartition(".")
    file.write_text(f"{group}: {{{last}: 1}}" if group else f"{last}: 1")
    for file_, words in ((file, []), (None, [f"{name}=1"])):
        with pytest.raises(ConfigError, match=r"here\.$"):
            load_config("demo", file_, words)


@pytest.mark.parametrize("name", ["rlhf.max_length", "policy.max_length", "rlhf.num_train_epochs"])
def test_a_name_within_a_group_of_its_own_is_not_answered_with_a_setting_of_the_reward_model(name):
    with pytest.raises(ConfigError) as refused:
        load_config("demo", None, [f"{name}=1"])
    assert str(refused.value).startswith(f"no setting {name!r}.")
    assert "TRL" not in str(refused.value)


@pytest.mark.parametrize(
    ("typed", "meant"), [("train.lrr", "train.lr"), ("lr", "train.lr"), ("model.max_seq_length", "model.max_seq_len")]
)
def test_a_slip_of_the_fingers_is_answered_first_and_without_a_list(typed, meant):
    with pytest.raises(ConfigError) as refused:
        load_config("demo", None, [f"{typed}=1"])
    assert str(refused.value).startswith(f"no setting {typed!r}. Did you mean {meant!r}")
    assert len(str(refused.value)) < 200


def test_a_plan_of_a_run_that_cannot_start_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "home"))
    (tmp_path / "pairs.csv").write_text("question,good,bad\na,b,c\n")
    for words, said in ((["--device", "cuda:7"], "device=cuda:7"), ([], "no layout fits the columns")):
        call = ["run", "--data", str(tmp_path / "pairs.csv"), "--plan", *words]
        assert guard(lambda call=call: app(call, standalone_mode=False)) == 2
        assert said in capsys.readouterr().err
