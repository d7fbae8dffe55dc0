"""The README's promises that can be run: the Python example and the names of commands and settings."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_python_example_runs(rm, tmp_path, capsys):
    rm.save(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {"checkpoint": tmp_path}
    exec(compile(example, "README.md", "exec"), names)
    assert names["report"].verdict in ("ready", "monitor", "not recommended")
    assert len(names["spectrum"].eigenvalues) == 4
    assert str(names["margin"]) in capsys.readouterr().out


def test_every_command_shown_exists():
    from flows.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = set(re.findall(r"^(?:\.venv/bin/)?rm-opt ([a-z]+)", README, flags=re.MULTILINE))
    shown |= set(re.findall(r"`rm-opt ([a-z]+)", README))
    assert shown
    assert shown <= known


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"--set ([a-z_.]+)=", README))))
def test_every_setting_shown_exists(setting):
    from rmcore.config import PipelineConfig

    model = PipelineConfig
    *groups, name = setting.split(".")
    for group in groups:
        model = model.model_fields[group].annotation
    assert name in model.model_fields


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_leads_somewhere(link):
    assert (Path(__file__).resolve().parents[1] / link).exists()
