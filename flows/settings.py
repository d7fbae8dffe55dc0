"""From a preset, a YAML file and `--set a.b=c` to one validated config."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.presets import PRESETS
from rmcore.config.active import ActiveConfig, CheckConfig
from rmcore.config.base import Settings
from rmcore.config.files import parse_yaml, read_mapping
from rmcore.config.model import LoraSettings
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.config.validation import ValidationConfig
from rmcore.core.errors import ConfigError

Tree = dict[str, Any]
OPTIONAL_GROUPS: dict[str, type[Settings]] = {
    "policy": PolicyConfig,
    "validation": ValidationConfig,
    "active": ActiveConfig,
    "active.check": CheckConfig,
    "rlhf": RlhfConfig,
    "model.lora": LoraSettings,
}
"""Groups that most runs do without: setting one field of them brings the whole group with its defaults."""


PRESET = "preset"
"""Key of a settings file that is no setting: what the file changes."""
DEFAULT_PRESET = "demo"


def load_config(
    preset: str | None, file: Path | None, assignments: Sequence[str], recorded: PipelineConfig | None = None
) -> PipelineConfig:
    """Apply `file`, then `assignments`, to a preset.

    Args:
        preset: a name in `experiments.presets`; None: the one that the file names, or DEFAULT_PRESET.
        file: YAML mapping shaped like PipelineConfig; only what it names changes. It may name its preset, too.
        recorded: settings of a run that there was, which are changed in place of a preset's.
        assignments: `dotted.name=value`; the value is read as YAML (1e-4, null, true, text).

    Raises:
        ConfigError: unknown preset or key, another preset than the file names, unreadable file, a malformed assignment,
            or a number or repeated key that YAML reads otherwise than it looks (`rmcore.config.files`).
        pydantic.ValidationError: a value is not allowed.
    """
    changes = {} if file is None else read_mapping(file, "write for example `train: {lr: 0.0001}`")
    named = changes.pop(PRESET, None)
    if preset is not None and named not in (None, preset):
        raise ConfigError(
            f"{file} changes the preset {named}, and this command starts from {preset}: the two together are neither. "
            f"Add --preset {named}, or remove the line `{PRESET}: {named}` from the file."
        )
    preset = preset or named or DEFAULT_PRESET
    if preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(PRESETS)}.{_near(str(preset), list(PRESETS))}")
    tree = (recorded or PRESETS[preset]).model_dump()
    _merge(tree, changes, "")
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {assignment!r} is not of the form dotted.name=value, for example train.lr=1e-4.")
        change: Any = _value(name, text)
        for part in reversed(name.strip().split(".")):
            change = {part: change}
        _merge(tree, change, "")
    return PipelineConfig.model_validate(tree)


def _merge(tree: Tree, change: Tree, path: str) -> None:
    for name, value in change.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in tree:
            raise ConfigError(f"no setting {where!r}; here are {', '.join(tree)}.{_near(str(name), list(tree))}")
        if tree[name] is None and isinstance(value, dict) and where in OPTIONAL_GROUPS:
            tree[name] = OPTIONAL_GROUPS[where]().model_dump()
        if isinstance(tree[name], dict) and isinstance(value, dict):
            _merge(tree[name], value, where)
        elif isinstance(tree[name], dict) and not (value is None and where in OPTIONAL_GROUPS):
            raise ConfigError(f"{where} is a group of settings, not a value; set one of {', '.join(tree[name])} in it.")
        else:
            tree[name] = value


def _value(name: str, text: str) -> Any:
    try:
        value = parse_yaml(text, f"--set {name.strip()}={text[:80]}")
    except yaml.YAMLError:
        return text
    if value == text.strip():  # not in quotes, which make a text of anything
        try:
            return float(value)  # YAML 1.1 reads 1e-4 as text
        except ValueError:
            return value
    return value


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
