"""One way to declare options that commands share: groups of them, and flags made of settings.

A field of the settings is a flag with the field's own help, bounds and default.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_origin, get_type_hints

from pydantic import BaseModel

from rmcore.cli.common import setting


def field_options(
    model: type[BaseModel],
    names: Iterable[str],
    *,
    panel: str | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
    prefix: str = "",
) -> list[inspect.Parameter]:
    """One keyword parameter a field, None where the flag is not given, so that given and default can be told apart.

    Args:
        model: settings.
        names: its fields.
        panel: heading of the group in the help; None: among the options.
        flags: all names of some of them, by field; the others are called as their field.
        prefix: put before the parameter names and flags.
    """
    parameters = []
    for name in names:
        field = model.model_fields[name]
        default = field.get_default(call_default_factory=True)
        shown = False if default in (None, (), False) else _shown(default)
        option = setting(model, name, *(flags or {}).get(name, ()), show_default=shown, rich_help_panel=panel)
        kind: Any = list[str] if get_origin(field.annotation) is tuple else field.annotation
        parameters.append(
            inspect.Parameter(
                prefix + name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return parameters


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def options(*settings: inspect.Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare what a command shares with others: groups of options, and settings.

    A parameter whose type is a dataclass becomes one option a field and is made of them: a group is written once, as
    that dataclass, and its methods do what its options mean. A command with **settings takes these parameters there.
    """

    def declare(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command).parameters.values()
        groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
        shown: list[inspect.Parameter] = []
        for parameter in own:
            if parameter.name in groups:
                shown += _group_options(parameter.annotation)
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        shown += settings

        signature = inspect.Signature(shown)

        @wraps(command)
        def run(**given: Any) -> Any:
            bound = signature.bind(**given)  # the command stays a function that a program may call
            bound.apply_defaults()
            values = bound.arguments
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            return command(**values)

        run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads; functions declare no such attribute
        run.__annotations__ = {p.name: p.annotation for p in shown}
        return run

    return declare


def _group_options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def given(settings: Mapping[str, Any], names: Iterable[str], *, prefix: str = "") -> dict[str, Any]:
    """The settings among `names` that were given on the command line, by field."""
    return {name: settings[prefix + name] for name in names if settings[prefix + name] not in (None, [])}
