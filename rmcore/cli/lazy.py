"""Commands that are imported when they are called: the page that lists them imports none.

A `Listed` is what such a page shows of a command, written down next to the place of the command itself. A test holds
each line to the command's own.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from rmcore.cli.help import CONTEXT, furnish, without_show_completion


class Listed(NamedTuple):
    """A command, or a group of commands, before it is imported."""

    place: str
    """`module:name` of its function, or of a Typer with the commands of the group."""
    line: str
    """The first paragraph of its help."""


def lazy_app(panels: Mapping[str, Mapping[str, Listed]]) -> typer.Typer:
    """Make a command line of commands that are imported when they are called.

    Args:
        panels: the commands and groups by name, under the headings of the page that lists them and in its order.
    """
    listed = {name: one for commands in panels.values() for name, one in commands.items()}
    shown = {name: heading for heading, commands in panels.items() for name in commands}

    class LazyGroup(TyperGroup):
        """Lists commands by what is written down of them; `commands` imports each as it is taken."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.commands = _Imported(listed)  # type: ignore[assignment]  # a dict is declared, a mapping is enough

        def list_commands(self, ctx: Any) -> list[str]:
            """Names in the order of the panels."""
            return list(shown)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """Find what is written down of a command, which takes its arguments as the command itself."""
            found = listed.get(cmd_name)
            return None if found is None else _ListedCommand(cmd_name, found, shown[cmd_name], self.commands)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Print the page."""
            TyperGroup.format_help(without_show_completion(self), ctx, formatter)

    return typer.Typer(no_args_is_help=True, cls=LazyGroup, context_settings=CONTEXT)


class _ListedCommand(TyperCommand):
    """A line of the page above a command; given arguments, it makes way for the command."""

    def __init__(self, name: str, listed: Listed, panel: str, commands: Mapping[str, Any]) -> None:
        super().__init__(name, help=listed.line, rich_help_panel=panel)
        self._commands = commands

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and begin its call."""
        return self._commands[str(self.name)].make_context(info_name, args, parent=parent, **extra)


class _Imported(Mapping[str, Any]):
    """The commands themselves by name, each imported when it is used."""

    def __init__(self, listed: Mapping[str, Listed]) -> None:
        self._listed = listed
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = _import(name, self._listed[name])
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def _import(name: str, listed: Listed) -> Any:
    module, _, attribute = listed.place.partition(":")
    found = getattr(import_module(module), attribute)
    holder = typer.Typer(add_completion=False)
    holder.callback()(lambda: None)  # so that it is a group, whatever it holds
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    furnish(holder)
    return typer.main.get_command(holder).commands[name]  # type: ignore[attr-defined]  # a group, see above
