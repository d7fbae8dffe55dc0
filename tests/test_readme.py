"""What the README names is there, and pages that give numbers of the code give the real ones."""

import re
from pathlib import Path

import pytest
import typer

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 110


def test_every_command_shown_exists():
    from flows.cli import app

    commands = typer.main.get_command(app).commands
    groups = {name: one.commands.keys() for name, one in commands.items() if hasattr(one, "commands")}
    shown = re.findall(r"(?:^|`)(?:\.venv/bin/)?rm-opt ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", README, flags=re.MULTILINE)
    assert shown
    assert {first for first, _ in shown} <= commands.keys()
    assert not [words for words in shown if words[0] in groups and words[1] not in groups[words[0]]]


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"--set ([a-z_.]+)=", README))))
def test_every_setting_shown_exists(setting):
    from rmcore.config.pipeline import PipelineConfig

    model = PipelineConfig
    *groups, name = setting.split(".")
    for group in groups:
        model = model.model_fields[group].annotation
    assert name in model.model_fields


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_leads_somewhere(link):
    assert (Path(__file__).resolve().parents[1] / link).exists()


def test_every_make_target_that_a_text_names_exists():
    root = Path(__file__).resolve().parents[1]
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    texts = [
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
        *(f for d in ("rmcore", "tasks", "flows") for f in (root / d).rglob("*.py")),
    ]
    named = {(file.name, name) for file in texts for name in re.findall(r"`make ([a-z-]+)`", file.read_text())}
    assert named
    assert [one for one in named if one[1] not in targets] == []


def test_the_size_of_the_readiness_study_is_the_same_everywhere():
    from experiments.presets import PRESETS
    from rmcore.config.validation import ValidationConfig
    from rmcore.policy.grpo.defects import heads

    num_models = PRESETS["validation"].validation.num_models
    study = ValidationConfig()
    assert num_models == len(study.worlds) * study.num_backbones * (1 + len(heads()))
    root = Path(__file__).resolve().parents[1]
    first_study = "110"  # whose results are what is documented
    for name, sizes in (
        ("docs/readiness.md", {first_study, str(num_models)}),
        ("experiments/presets.py", {str(num_models)}),
        ("rmcore/policy/readiness/original_score.py", {first_study}),
    ):
        named = re.findall(r"(\d+)(?: small)? reward models", (root / name).read_text())
        assert set(named) == sizes, name


def table(text, heading):
    """The rows of the table whose first header cell is `heading`, as lists of cells."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.strip().startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def choices(name):
    from typing import get_args

    from rmcore.config.train import TrainConfig

    return set(get_args(TrainConfig.model_fields[name].annotation))


def test_the_training_table_names_what_there_is():
    from rmcore.core.hardware import HARDWARE

    page = (Path(__file__).resolve().parents[1] / "docs" / "training.md").read_text()
    rows = dict(table(page, "training"))
    optimizers, schedules, _ = rows["optimizers, schedules"].split("; ")
    assert set(optimizers.split(", ")) == choices("optimizer")
    assert set(schedules.split(", ")) == choices("schedule")
    assert set(re.findall(r"presets ([\w, ]+)", rows["scale"])[0].split(", ")) == set(HARDWARE)


def test_the_trainer_page_gives_the_real_defaults():
    from rmcore.config.train import TrainConfig
    from rmcore.core.hardware import HARDWARE

    page = (Path(__file__).resolve().parents[1] / "docs" / "training.md").read_text()
    defaults = TrainConfig()
    for _, names, given in table(page, "term"):
        for name, value in zip(re.findall(r"`(\w+)`", names), given.split(", "), strict=True):
            real = getattr(defaults, name)
            assert (real is None) if value == "off" else real == float(value), name
    assert {name for cell, _, _ in table(page, "optimizer") for name in re.findall(r"`(\w+)`", cell)} == choices(
        "optimizer"
    )
    assert {cell.strip("`") for cell, _ in table(page, "preset")} == set(HARDWARE)
    assert f"`resume_every_seconds` ({defaults.resume_every_seconds:.0f})" in page
