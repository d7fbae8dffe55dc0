"""The capabilities: each is a folder of rmcore, whose name in `NAMES` is all that makes it one.

A folder has, as far as it needs them, `settings.py` (a section of `PipelineConfig`), `stage.py`, `blocks.py` (`SHOWN`:
the stage's record in reports and cards), `command.py`, and in its `__init__.py` a docstring, or `CAPABILITY` where more
is to be said. What is listed here is read without importing any of these. No stage's key depends on this file.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

from rmcore.core.metric_spec import MetricSpec

NAMES = ("suites", "probes", "landscape", "ensembles", "noise", "judging", "active", "serving")
"""Folders, in the order in which their stages run and their commands are listed."""
OF_STAGES = "rmcore.cli.measurement"
"""Module with the commands that are made of stages, by the names of these."""


class Capability(NamedTuple):
    """One capability as the platform lists it before it is used."""

    commands: Mapping[str, str] = {}
    """The first paragraph of a command's help by the command's name, which `command.py` has, or a Typer, under it.
    Without that file the command is made of the stage (`rmcore.cli.measurement`)."""
    panel: Literal["Train and measure", "Policies", "Services"] = "Train and measure"
    """Heading of `rm-opt --help` under which they are listed."""
    data_commands: tuple[str, ...] = ()
    """Functions of `command.py` that are commands of `rm-opt data`."""
    explains: tuple[str, ...] = ()
    """Command, with options, that says of pairs why a checkpoint gets them wrong."""
    metrics: tuple[MetricSpec, ...] = ()
    """Its entries in the registry of metrics."""
    public: Mapping[str, str] = {}
    """Modules of its folder by the names that `rmcore` itself gives of them."""


@cache
def capabilities() -> dict[str, Capability]:
    """Return all capabilities by the name of their folder.

    One that has no more than a docstring has one command, with its folder's name, and the first paragraph as its help.
    """
    folders = {name: import_module(f"rmcore.{name}") for name in NAMES}
    helps = {name: " ".join(str(folder.__doc__).partition("\n\n")[0].split()) for name, folder in folders.items()}
    return {
        name: getattr(folder, "CAPABILITY", None) or Capability({name: helps[name]}) for name, folder in folders.items()
    }


def modules(kind: Literal["stage", "blocks"]) -> list[ModuleType]:
    """Import the file `kind` of each capability that has one."""
    places = [f"rmcore.{name}.{kind}" for name in NAMES]
    return [import_module(place) for place in places if find_spec(place)]


def commands(panel: str) -> dict[str, tuple[str, str]]:
    """Return the commands that are listed under a heading: place and first paragraph of the help by name."""
    return {
        command: (f"{_module_of(folder)}:{command}", line)
        for folder, one in capabilities().items()
        if one.panel == panel
        for command, line in one.commands.items()
    }


def _module_of(folder: str) -> str:
    own = f"rmcore.{folder}.command"
    return own if find_spec(own) else OF_STAGES
