"""Help that fits on a screen: --help shows the options that most calls need, --help-all every one.

A command whose options are few shows them all. One with more names its common ones with `common`; a test holds every
page to LONGEST lines.
"""

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Annotated, Any, TypeVar

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
