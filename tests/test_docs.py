"""The documents: generated pages are complete, links lead somewhere, commands exist, numbers are those of the code."""

import ast
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd
import pytest
import typer

import gallery
from command_line import succeeded
from every_command import LEAVES
from experiments.library import load_experiment
from flows import cli_run
from flows.cli import app
from flows.settings import load_config
from machine import PATIENCE_S
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.table import read_pairs
from rmcore.reporting.html.blocks import capabilities_shown
from rmcore.stages import prepare
from single_stage import stage_with

CHECKOUT = Path(__file__).resolve().parents[1]
WRITTEN = [*sorted(path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "docs").glob("*.md")), "README.md"]
ROOT = typer.main.get_command(app)


def text_of(page):
    return (CHECKOUT / page).read_text()


def fields(model, path=""):
    """Dotted names of all plain fields, found without the module under test."""
    for name, schema in model["properties"].items():
        choices = [schema, *schema.get("anyOf", [])]
        groups = [one["$ref"].split("/")[-1] for one in choices if "$ref" in one]
        if groups:
            yield from fields(DEFINITIONS[groups[0]], f"{path}{name}.")
        else:
            yield path + name


SCHEMA = PipelineConfig.model_json_schema()
DEFINITIONS = SCHEMA["$defs"]
SETTINGS = set(fields(SCHEMA))


def commands_shown(page):
    for block in re.findall(r"^```bash\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            place = line.find("rm-opt ")
            if place == 0 or line.startswith("torchrun"):
                yield line[place:]


@pytest.mark.parametrize("page", WRITTEN)
def test_every_command_and_option_that_a_page_shows_exists(page):
    for line in commands_shown(page):
        words = shlex.split(line, comments=True)[1:]
        command = ROOT
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {"-h", "--help"} | {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line
        settings = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        for setting in settings:
            assert setting.partition("=")[0] in SETTINGS, line


@pytest.fixture
def own_pairs(gold_pairs, tmp_path, monkeypatch):
    """pairs.csv and pairs.parquet in the current folder, as the pages call them; a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "home"))
    table = pd.DataFrame([{"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in gold_pairs])
    table.to_csv("pairs.csv", index=False)
    table.to_parquet("pairs.parquet")


def told(*words):
    """What a command prints, in one line; it has to succeed."""
    return " ".join(succeeded(*words).split())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial.md"])
def test_the_runs_that_a_page_asks_for_would_train_on_the_file(page, own_pairs, monkeypatch):
    """Up to the first stage: the settings are allowed, the file is read and split. tests/flows run the stages."""
    configs = []

    def configured(flow, preset, given, assignments, recorded):
        configs.append(load_config(preset, given.config, [*assignments, *(given.set_ or [])], recorded))

    monkeypatch.setattr(cli_run, "run_configured", configured)
    monkeypatch.setattr(cli_run, "print_reported", lambda outcome: None)
    lines = [shlex.split(line, comments=True)[1:] for line in commands_shown(page)]
    runs = [words for words in lines if words[0] == "run" and "--from" not in words]
    assert runs
    for words in runs:
        told(*words)
    for number, config in enumerate(configs):
        assert (config.model.name, config.policy) == ("minilm", None)
        prepared = Path(f"prepared-{number}")
        prepared.mkdir()
        prepare.run(stage_with("prepare", config, {}), prepared, NullTracker(), silent)
        assert read_pairs(prepared / "test.parquet")
    for words in lines:
        if words[0] == "data":
            assert "pairs 240" in told(*words)


def test_each_page_is_in_the_navigation_and_each_entry_is_a_page():
    entries = re.findall(r"^ +- [^:]+: (\S+\.md)$", text_of("docs/mkdocs.yml"), flags=re.MULTILINE)
    assert sorted(entries) == sorted(page for page in WRITTEN if page.startswith("docs/"))


def test_every_picture_of_the_documents_is_shown_on_a_page():
    shown = {name for page in WRITTEN for name in re.findall(r"!\[[^]]+\]\((?:docs/)?(\S+\.png)\)", text_of(page))}
    assert shown == {path.name for path in (CHECKOUT / "docs").glob("*.png")}


def test_the_gallery_draws_what_every_figure_module_has():
    """Each public function that ends in _figure, found without importing the gallery's own list."""
    found = set()
    for module in (CHECKOUT / "rmcore").rglob("*.py"):
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.fullmatch(r"[a-z]\w*_figure", node.name):
                found.add(node.name)
    drawn = {node.id for node in ast.walk(ast.parse(text_of("docs/gallery.py"))) if isinstance(node, ast.Name)}
    drawn |= {figure.__name__ for one in capabilities_shown() for figure in one.figures.values()}
    assert found - {"new_figure"} <= drawn
    commands = {" ".join(words) for words in LEAVES}
    for one in gallery.SHOWN.values():
        assert any(f"{one.command} ".startswith(f"{command} ") for command in commands), one.command


@pytest.mark.slow
def test_the_site_has_every_command_setting_and_figure_and_no_broken_link(tmp_path):
    """A link or anchor of any page that leads nowhere is an error, and so is code that fails.

    Figures are saved as a pixel, see tests/support/pixels: tests/rmcore/reporting/test_figures.py draws them.
    """
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(
        text_of("docs/mkdocs.yml").replace("docs_dir: ..", f"docs_dir: {CHECKOUT}").replace("../build/site", "site")
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", settings]
    places = (CHECKOUT / "tests/support", CHECKOUT / "tests/support/pixels", CHECKOUT / "docs")
    environment = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    environment |= os.environ | {"PYTHONPATH": ":".join([*map(str, places), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    commands, options, figures = (
        (tmp_path / f"site/docs/{name}.html").read_text() for name in ("commands", "settings", "figures")
    )
    for words, command in LEAVES.items():
        _, found, rest = commands.partition(f"rm-opt {' '.join(words)}<")
        assert found, words
        for one in command.params:
            if one.param_type_name == "option" and one.name != "help_all":
                assert max(one.opts, key=len) in rest.partition("</h3>")[2].partition("<h3")[0], (words, one.opts)
    assert set(re.findall(r"<td><code>([\w.]+)</code></td>", options)) >= SETTINGS
    assert figures.count("data:image/png") == len(gallery.SHOWN)


def cells():
    found = json.loads(text_of("docs/tutorial.ipynb"))["cells"]
    return [("".join(cell["source"]), cell) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    """In one fresh namespace, as a kernel that was restarted would."""
    monkeypatch.chdir(tmp_path)
    names, printed = {}, io.StringIO()
    with redirect_stdout(printed):
        for number, (source, _) in enumerate(cells(), start=1):
            exec(compile(source, f"cell {number}", "exec"), names)
    imported = [line for source, _ in cells() for line in source.splitlines() if "import " in line]
    assert imported == ["import rmcore"]
    assert names["margin"] == pytest.approx(float(names["rewards"][0] - names["rewards"][1]), abs=1e-5)
    accuracy = names["metrics"]["pairwise_accuracy"]
    assert accuracy.ci_low < accuracy.value < accuracy.ci_high
    assert names["spectrum"].lambda_max > names["spectrum"].lambda_min
    assert names["verdict"]["rung"] == 1
    assert f"evidence level 1: {names['verdict']['headline']}" in printed.getvalue()
    assert "No verdict follows from it" in printed.getvalue()
    assert (Path("out") / "best" / "model.safetensors").is_file()


def test_the_notebook_holds_no_outputs():
    for _, cell in cells():
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("declared", re.findall(r"```yaml\n(.*?)```", text_of("docs/experiments.md"), re.DOTALL))
def test_an_experiment_that_a_page_declares_is_one(declared, tmp_path):
    (tmp_path / "mine.yaml").write_text(declared)
    assert load_experiment(str(tmp_path / "mine.yaml"), "smoke").arms()


def test_every_make_target_that_a_text_names_exists():
    root = CHECKOUT
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    texts = [
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
        *(f for d in ("rmcore", "tasks", "flows") for f in (root / d).rglob("*.py")),
    ]
    named = {(file.name, name) for file in texts for name in re.findall(r"`make ([a-z-]+)`", file.read_text())}
    assert named
    assert [one for one in named if one[1] not in targets] == []


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


def test_the_trainer_page_gives_the_real_defaults():
    from rmcore.config.train import TrainConfig
    from rmcore.core.hardware import HARDWARE

    page = text_of("docs/training.md")
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
