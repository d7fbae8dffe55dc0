"""The reference pages of the site, made from the code: every command with its options, every setting with its bounds.

Nothing of them is written by hand: commands come from the Typer apps, settings from the pydantic classes, and what a
preset changes from the presets themselves. docs/pages.py puts both beside the written pages; `make docs` calls it.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args

import typer

from experiments.presets import DESCRIBED
from flows.cli import PANELS, app
from rmcore.cli.help import HELP_ALL
from rmcore.config.base import Settings
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.hardware import HARDWARE

KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "group",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
UNSET = "—"


def commands_page() -> str:
    """Every command of `rm-opt` under the headings of its help: what it does, its arguments, options and defaults."""
    root = typer.main.get_command(app)
    parts = [
        "# Commands",
        "Written from the programs themselves. In a terminal `rm-opt COMMAND -h` shows the options that most calls "
        "need, and `rm-opt COMMAND --help-all` every one.",
    ]
    for heading, names in PANELS.items():
        parts.append(f"## {heading}")
        for name in names:
            for words, command in _leaves(root.commands[name], ("rm-opt", name)):
                parts += _command(words, command)
    return "\n\n".join(filter(None, parts)) + "\n"


def _leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The command itself, or those of a group."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    else:
        for name, one in below.items():
            yield from _leaves(one, (*words, name))


def _command(words: tuple[str, ...], command: Any) -> Iterator[str]:
    yield f"### {' '.join(words)}"
    for paragraph in (command.help or "").split("\n\n"):
        example = re.fullmatch(r"(?:(.*:) )?((?:rm-opt|torchrun) .+)", paragraph)
        if example is None:
            yield _text(paragraph)
            continue
        yield _text(example[1] or "")
        yield "```bash\n" + example[2].replace(", then rm-opt", "\nrm-opt") + "\n```"
    context = typer.Context(command, info_name=" ".join(words))
    rows: dict[str, list[str]] = {}
    for one in command.params:
        record = None if one.name == HELP_ALL else _record(one, context)
        if record is not None:
            rows.setdefault(getattr(one, "rich_help_panel", None) or "", []).append(_row(*record))
    for panel, lines in rows.items():
        yield f"**{panel}**" if panel else ""
        yield "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *lines])


def _record(parameter: Any, context: Any) -> tuple[str, str, str] | None:
    """How a parameter is written, its default, and what it means with what else its help says in brackets."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    flags, told = record
    if parameter.param_type_name == "argument":
        flags = f"{parameter.name.upper()} (argument)"
    meaning, _, extras = told.partition("  [")
    default = UNSET
    notes = []
    for extra in filter(None, extras.rstrip("]").split("; ")):
        name, _, value = extra.partition("default: ")
        if value and not name:
            default = value.strip("()")
        else:
            notes.append(extra.replace("x>=", "≥ ").replace("<=x<=", " to "))
    if getattr(parameter, "is_flag", False) and default == UNSET:
        default = "off"
    return flags, default, " ".join([meaning, *(f"*({note})*" for note in notes)])


def settings_page() -> str:
    """Every field of PipelineConfig by section: default, what it means, type, bounds, presets that change it."""
    changed = _preset_values()
    parts = [
        "# Settings",
        "Each is `--set NAME=VALUE` of `rm-opt run`, a line of a YAML file (`--config`, or the `rm-opt.yaml` that "
        "`rm-opt init` writes), and a key of `overrides` in Prefect's form. A whole group may be null where that is "
        "its default: setting one field of it brings the group. Presets are listed where they differ from the default; "
        "*(train)* marks the settings of a machine, `rm-opt train --preset NAME`.",
    ]
    for path, model, absent in sections():
        parts.append(f"## {path or 'The run'}")
        parts.append(_text(_paragraph(model.__doc__ or "")))
        if absent:
            with_it = ", ".join(f"`{name}`" for name in changed.get(path, {}))
            parts.append(f"Null by default. Presets that have it: {with_it or 'none'}.")
        schema = model.model_json_schema()
        lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
        for name, field in model.model_fields.items():
            if _group(field.annotation) is None:
                full = f"{path}.{name}" if path else name
                lines.append(_setting(full, schema["properties"][name], field, changed.get(full, {})))
        parts.append("\n".join(lines))
    return "\n\n".join(filter(None, parts)) + "\n"


Section = tuple[str, type[Settings], bool]
"""A group of settings: its dotted name, its class, and whether it is null by default."""


def sections(model: type[Settings] = PipelineConfig, path: str = "", absent: bool = False) -> Iterator[Section]:
    """The group of a class, then those below it, in the order of their fields."""
    yield path, model, absent
    for name, field in model.model_fields.items():
        group = _group(field.annotation)
        if group is not None:
            yield from sections(group, f"{path}.{name}" if path else name, field.get_default() is None)


def _group(annotation: Any) -> type[Settings] | None:
    """The class of a group of settings, also of one that may be null; None for a plain value."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Settings):
            return one
    return None


def _setting(name: str, schema: dict[str, Any], field: Any, presets: dict[str, Any]) -> str:
    meaning = f"{_text(_paragraph(field.description or ''))}<br>*{_kind(schema)}*"
    if presets:
        meaning += "<br>presets: " + ", ".join(f"{preset} `{_shown(value)}`" for preset, value in presets.items())
    return f'| <a id="{name}"></a>`{name}` | `{_shown(field.get_default(call_default_factory=True))}` | {meaning} |'


def _kind(schema: dict[str, Any]) -> str:
    """Type and bounds of a value, from its JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or schema['prefixItems'][0])}"
    bounds = [f"{sign} {_shown(schema[name])}" for name, sign in BOUNDS.items() if name in schema]
    if "pattern" in schema:
        bounds.append(f"matching `{schema['pattern']}`")
    return " ".join([KINDS[schema["type"]], ", ".join(bounds)]).strip()


def _preset_values() -> dict[str, dict[str, Any]]:
    """By setting (or group that is null by default): the presets that change it, and to what."""
    found: dict[str, dict[str, Any]] = {}
    for name, preset in DESCRIBED.items():
        for path, value in _differences(preset.config, ""):
            found.setdefault(path, {})[name] = value
    for name, settings in HARDWARE.items():
        for field, value in settings.items():
            found.setdefault(f"train.{field}", {})[f"{name} *(train)*"] = value
    return found


def _differences(config: Settings, path: str) -> Iterator[tuple[str, Any]]:
    """What differs from the defaults of the config's own class, field by field, into its groups."""
    for name, field in type(config).model_fields.items():
        full = f"{path}.{name}" if path else name
        value, default = getattr(config, name), field.get_default(call_default_factory=True)
        if isinstance(value, Settings):
            if default is None:
                yield full, True
            yield from _differences(value, full)
        elif value != default:
            yield full, value


def _shown(value: Any) -> str:
    """A value as a YAML file has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _row(flags: str, default: str, meaning: str) -> str:
    shown = default if default in (UNSET, "off") else f"`{default}`"
    return f"| `{flags}` | {shown} | {_text(_paragraph(meaning))} |"


def _text(text: str) -> str:
    """Plain words as Markdown of one cell or paragraph: what is code stays code, nothing else is taken for markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(parts), 2):
        parts[place] = parts[place].replace("<", "&lt;").replace("|", "&#124;").replace("_*", "_\\*")
    return "".join(parts)


def names() -> frozenset[str]:
    """The full names of all settings."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, model, _ in sections()
        for name, field in model.model_fields.items()
        if _group(field.annotation) is None
    )
