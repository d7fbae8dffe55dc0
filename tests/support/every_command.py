"""All commands of `rm-opt`, for the tests that hold each of them to something."""

import typer

from flows.cli import app


def below(command, path=()):
    """All commands and groups by their words."""
    found = {path: command}
    for name, one in getattr(command, "commands", {}).items():
        found |= below(one, (*path, name))
    return found


EVERY = below(typer.main.get_command(app))
LEAVES = {path: command for path, command in EVERY.items() if not hasattr(command, "commands")}
