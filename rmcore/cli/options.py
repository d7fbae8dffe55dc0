"""Command-line options made from settings: every field is a flag, with the field's own help, bounds and default."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel


def field_options(
    model: type[BaseModel], names: Iterable[str], *, panel: str, flags: Mapping[str, Sequence[str]], prefix: str = ""
) -> list[inspect.Parameter]:
    """One keyword parameter a field, None where the flag is not given, so that given and default can be told apart.

    Args:
        model: settings.
        names: its fields.
        panel: heading of the group in the help.
        flags: all names of some of them, by field; the others are called as their field.
        prefix: put before the parameter names and flags.
    """
    parameters = []
    for name in names:
        field = model.model_fields[name]
        least = next((entry.ge for entry in field.metadata if hasattr(entry, "ge")), None)
        default = field.get_default(call_default_factory=True)
        option = typer.Option(
            *flags.get(name, ()),
            help=field.description,
            show_default=False if default in (None, (), False) else _shown(default),
            min=least,
            rich_help_panel=panel,
        )
        kind: Any = list[str] if get_origin(field.annotation) is tuple else field.annotation
        parameters.append(
            inspect.Parameter(
                prefix + name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return parameters


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def add_options(command: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> Callable[..., Any]:
    """Give `command`, which takes them as **settings, these parameters in its signature."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature([*keyword, *parameters])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return command


def given(settings: Mapping[str, Any], names: Iterable[str], *, prefix: str = "") -> dict[str, Any]:
    """The settings among `names` that were given on the command line, by field."""
    return {name: settings[prefix + name] for name in names if settings[prefix + name] not in (None, [])}
