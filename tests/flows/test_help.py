"""What `rm-opt COMMAND --help` and `--help-all` show, and that the shell can complete it."""

import re
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

import rmcore.cli
from every_command import EVERY, LEAVES
from flows.cli import PANELS, app
from rmcore.cli.help import COMMON, HELP_ALL, LONGEST

ROOT = EVERY[()]
SCREEN = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}


@cache
def said(*words):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SCREEN.items():
            patched.setenv(name, value)
        outcome = CliRunner().invoke(app, list(words), prog_name="rm-opt")
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_page_fits_on_a_screen(path):
    page = said(*path, "--help")
    assert said(*path, "-h") == page
    assert len(page.splitlines()) <= LONGEST
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_whole_help_has_every_option_and_the_page_counts_the_others(path):
    whole, page = said(*path, "--help-all"), said(*path, "--help")
    options = [one for one in LEAVES[path].params if one.param_type_name == "option" and one.name != HELP_ALL]

    def shown(text):
        return {
            one.name for one in options if re.search(rf"(?<![\w-]){re.escape(max(one.opts, key=len))}(?![\w-])", text)
        }

    missing = {one.name for one in options} - shown(page)
    assert {one.name for one in options} == shown(whole)
    assert not missing & {one.name for one in options if one.required}
    counted = re.search(r"(\d+) more options: (rm-opt .*) --help-all", page)
    assert (int(counted[1]) if counted else 0) == len(missing)
    assert counted is None or counted[2] == " ".join(["rm-opt", *path])


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_common_options_are_options(path):
    command = LEAVES[path]
    assert getattr(command.callback, COMMON, frozenset()) <= {one.name for one in command.params}


@pytest.mark.parametrize("app", [app, rmcore.cli.app], ids=["flows", "rmcore"])
def test_the_page_says_of_each_command_what_the_command_says(app):
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        listed = root.get_command(None, name)
        assert listed.help == command.help.split("\n\n")[0]
        assert (listed.name, listed.hidden) == (command.name, command.hidden)


def test_panels_stand_in_their_order():
    page = said("--help")
    places = [page.index(f"─ {heading} ─") for heading in PANELS]
    assert places == sorted(places)
    assert len({name for every in PANELS.values() for name in every}) == sum(map(len, PANELS.values()))
    for every in PANELS.values():
        names = [name for name in every if not ROOT.commands[name].hidden]
        found = [re.search(rf"^│ {name} ", page, re.MULTILINE).start() for name in names]
        assert found == sorted(found)


def test_the_version_is_the_package_s():
    from importlib.metadata import version

    assert said("--version").strip() == f"rm-opt {version('rm-optimizer')}"


@pytest.mark.parametrize(("words", "expected"), [("rm-opt tra", "train"), ("rm-opt train --lora-r", "--lora-rank")])
def test_the_shell_completes_commands_and_options_that_the_page_leaves_out(words, expected):
    asked = {"_RM_OPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    outcome = CliRunner().invoke(app, [], prog_name="rm-opt", env=asked)
    assert expected in outcome.output.split()
