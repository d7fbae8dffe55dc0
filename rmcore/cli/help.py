"""Pages of commands: short help, and lists of commands that are imported when they are called.

--help shows the options that most calls need, --help-all every one. A command whose options are few shows them all. One
with more names its common ones with `common`; a test holds every page to LONGEST lines. A `Listed` is what a list shows
of a command, written down next to the place of the command itself; a test holds each line to the command's own.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

LONGEST = 60
"""Lines of any page that --help shows, 100 columns wide."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
HELP_ALL = "help_all"
COMMON = "common_options"
"""Attribute of a command's function: the parameters that --help shows."""
Function = TypeVar("Function", bound=Callable[..., Any])


def common(*names: str) -> Callable[[Function], Function]:
    """Name the parameters of a command that --help shows; required ones are always shown, the others by --help-all."""

    def mark(command: Function) -> Function:
        setattr(command, COMMON, frozenset(names))
        return command

    return mark


class PagedCommand(TyperCommand):
    """A command whose --help leaves out what few need, and says how much that is."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; with --help-all the whole of it."""
        shown = getattr(self.callback, COMMON, None)
        left_out = [p for p in self.params if shown is not None and not (p.required or p.name in shown)]
        left_out = [p for p in left_out if p.name != HELP_ALL]
        page = copy(self)
        if not left_out:
            page.params = [p for p in self.params if p.name != HELP_ALL]
        elif ctx.meta.get(HELP_ALL):
            page.rich_markup_mode = None  # plain: the boxes cut names that are long
        else:
            page.params = [p for p in self.params if p not in left_out]
            page.epilog = f"{len(left_out)} more options: {ctx.command_path} --help-all"
        TyperCommand.format_help(page, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the plain page under the headings of their panels."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            heading = "Arguments" if param.param_type_name == "argument" else "Options"
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or heading, []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL_OPTION = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every option and exit.")
]


def _with_help_all(command: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(command)
    asked = inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HELP_ALL_OPTION)

    @wraps(command)
    def run(**given: Any) -> Any:
        given.pop(HELP_ALL, None)
        return command(**given)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what typer reads, like `options`
        parameters=[*signature.parameters.values(), asked]
    )
    run.__annotations__ = {**command.__annotations__, HELP_ALL: _HELP_ALL_OPTION}
    return run


def _paragraphs(text: str) -> str:
    """A docstring with one line a paragraph: typer breaks all but the first where the source does."""
    return "\n\n".join(part.replace("\n", " ") for part in text.split("\n\n"))


def furnish(app: typer.Typer) -> None:
    """Give every command below `app` its pages; one that has them keeps them."""
    for command in app.registered_commands:
        function = command.callback
        if function is None or command.cls is PagedCommand:
            continue
        command.help = _paragraphs(inspect.getdoc(function) or "")
        command.callback = _with_help_all(function)
        command.cls = PagedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            furnish(group.typer_instance)


def without_show_completion(group: TyperGroup) -> TyperGroup:
    """The page of a group without --show-completion, which --install-completion replaces."""
    page = copy(group)
    page.params = [p for p in group.params if p.name != "show_completion"]
    return page


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
