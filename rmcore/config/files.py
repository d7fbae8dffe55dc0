"""Settings and experiments that stand in a YAML file.

PyYAML reads YAML 1.1, where 010 is 8 and 1:30 is 90, and of a repeated key it keeps the last one. All of these
are refused: who wrote them meant something else.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from rmcore.core.errors import ConfigError

MAX_VALUES = 100_000
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9_]+:[0-9:._]+")


class _YamlLoader(yaml.SafeLoader):
    """YAML without what is read as something else than it looks like."""

    where: str
    has_lines: bool
    last: yaml.Node

    @property
    def place(self) -> str:
        """Where the value that was last begun is."""
        return f"{self.where}, line {self.last.start_mark.line + 1}" if self.has_lines else self.where

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value, and know which it is where that fails."""
        self.last = node
        return super().construct_object(node, deep)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Look for repeated keys here, where merged ones (`<<`), which a mapping may set again, are not among them."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(
                        f"{self.where} names {key.value!r} twice in one group, in lines {lines[key.value]} and {line}: "
                        "which one counts is unknown. Remove one of them."
                    )
                lines[key.value] = line
        return node

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A number that is written as it counts."""
        is_int = node.tag == "tag:yaml.org,2002:int"
        number: float = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        for pattern, base in ((_OCTAL, "8, for its leading zero"), (_SEXAGESIMAL, "60, for its colons")):
            if pattern.fullmatch(node.value):
                raise ConfigError(
                    f"{self.place}: YAML would read {node.value} as {number:g}, a number in base {base}. Write the "
                    f"number in the usual way, or '{node.value}' in quotes where text is meant."
                )
        return number


for _tag in ("int", "float"):
    _YamlLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _YamlLoader.construct_number)


def _size(node: yaml.Node, known: dict[int, int], where: str) -> int:
    """How many values a node stands for when its aliases are written out."""
    if id(node) in known:
        if not known[id(node)]:
            raise ConfigError(f"{where} has an alias of something that it is a part of itself; write the value out.")
        return known[id(node)]
    known[id(node)] = 0  # while it is looked into
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    known[id(node)] = 1 + sum(_size(one, known, where) for one in inner)
    return known[id(node)]


def setting_text(value: Any, digits: int | None = None) -> str:
    """Return a setting's value as YAML, in one line unless it has line breaks; a float with `digits` digits."""
    if digits is not None and isinstance(value, float):
        return f"{value:.{digits}g}"
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def parse_yaml(text: str, where: str, *, has_lines: bool = False) -> Any:
    """The value that a YAML text holds; `where` it is read from is what messages begin with, a line with `has_lines`.

    Raises:
        ConfigError: a key is repeated in a mapping, a number is written in base 8 or 60, a date or number cannot be
            read, or it is nested too deeply, a part of itself or huge.
        yaml.YAMLError: it is no YAML.
    """
    loader = _YamlLoader(text)
    loader.where, loader.has_lines = where, has_lines
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, where) > MAX_VALUES:
            raise ConfigError(f"{where} stands for over {MAX_VALUES} values, aliases written out; settings are fewer.")
        return loader.construct_document(node)
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply to be settings; write it flatter.") from error
    except ConfigError:
        raise
    except (ValueError, LookupError, AttributeError, OverflowError) as error:  # of PyYAML, at numbers and dates
        raise ConfigError(
            f"{loader.place} has a number or a date that cannot be read ({error}); correct it, or put it in quotes "
            "where text is meant."
        ) from error
    finally:
        loader.dispose()


def read_mapping(file: Path, advice: str) -> dict[str, Any]:
    """The mapping in a YAML file; `advice` says what to write where it holds something else.

    Raises:
        ConfigError: it cannot be read, or holds no YAML mapping, or see `parse_yaml`.
    """
    try:
        text = file.read_text(encoding="utf-8")
        loaded = parse_yaml(text, str(file), has_lines=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}, line {line} holds a byte that is no UTF-8; save the file as UTF-8.") from error
    except yaml.YAMLError as error:
        if isinstance(error, yaml.MarkedYAMLError):
            mark, why = error.problem_mark or error.context_mark, error.problem or error.context
            line = 1 if mark is None else mark.line + 1
        else:  # a character that no YAML may hold
            line, why = text.count("\n", 0, getattr(error, "position", 0)) + 1, str(error).splitlines()[0]
        raise ConfigError(f"{file}, line {line} is not valid YAML: {why}; fix that line.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}; {advice}.")
    return loaded


def lines_of(file: Path) -> dict[str, int]:
    """The line of each setting in a YAML file that `read_mapping` has read, by dotted name."""
    lines: dict[str, int] = {}

    def note(node: yaml.Node, path: tuple[str, ...]) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (*path, str(key.value))
            lines.setdefault(".".join(name), key.start_mark.line + 1)
            note(value, name)

    note(yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader), ())
    return lines
