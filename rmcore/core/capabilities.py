"""The capabilities: each is a folder of rmcore, whose name in `NAMES` is all that makes it one.

A folder has `CAPABILITY` in its `__init__.py` and, as far as it needs them, `settings.py` (a section of
`PipelineConfig`), `stage.py`, `blocks.py` (`SHOWN`: the stage's record in reports and cards) and `command.py`. What is
listed here is read without importing any of these. No stage's key depends on this file.
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


class Capability(NamedTuple):
    """One capability as the platform lists it before it is used."""

    commands: Mapping[str, str] = {}
    """The first paragraph of a command's help by the command's name, which `command.py` has, or a Typer, under it."""
    panel: Literal["Train and measure", "Policies", "Services"] = "Train and measure"
    """Heading of `rm-opt --help` under which they are listed."""
    data_commands: tuple[str, ...] = ()
    """Functions of `command.py` that are commands of `rm-opt data`."""
    explains: tuple[str, ...] = ()
    """Command, with options, that says of pairs why a checkpoint gets them wrong."""
    metrics: tuple[MetricSpec, ...] = ()
    """Its entries in the registry of metrics."""


@cache
def capabilities() -> dict[str, Capability]:
    """Return all capabilities by the name of their folder."""
    return {name: import_module(f"rmcore.{name}").CAPABILITY for name in NAMES}


def modules(kind: Literal["stage", "blocks"]) -> list[ModuleType]:
    """Import the file `kind` of each capability that has one."""
    places = [f"rmcore.{name}.{kind}" for name in NAMES]
    return [import_module(place) for place in places if find_spec(place)]


def commands(panel: str) -> dict[str, tuple[str, str]]:
    """Return the commands that are listed under a heading: place and first paragraph of the help by name."""
    return {
        command: (f"rmcore.{name}.command:{command}", line)
        for name, one in capabilities().items()
        if one.panel == panel
        for command, line in one.commands.items()
    }
