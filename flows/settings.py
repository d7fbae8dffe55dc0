"""From a preset, a YAML file and `--set a.b=c`, or a form, to one validated config; and back to what was changed."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.presets import PRESETS
from rmcore.config.active import ActiveConfig, CheckConfig
from rmcore.config.base import Settings
from rmcore.config.benchmark import BenchmarkConfig
from rmcore.config.explain import ExplainConfig
from rmcore.config.files import parse_yaml, read_mapping
from rmcore.config.model import LoraSettings
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.probe import ProbeConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.config.validation import ValidationConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import flatten

Tree = dict[str, Any]
OPTIONAL_GROUPS: dict[str, type[Settings]] = {
    "benchmark": BenchmarkConfig,
    "probe": ProbeConfig,
    "explain": ExplainConfig,
    "policy": PolicyConfig,
    "validation": ValidationConfig,
    "active": ActiveConfig,
    "active.check": CheckConfig,
    "rlhf": RlhfConfig,
    "rlhf.watch": WatchConfig,
    "model.lora": LoraSettings,
}
"""Groups that most runs do without: setting one field of them brings the whole group with its defaults."""


PRESET = "preset"
"""Key of a settings file that is no setting: what the file changes."""
DEFAULT_PRESET = "demo"
STEPS, EPOCHS = "train.steps", "train.epochs"


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
    changes = _read(file)
    changes.pop(PRESET, None)
    preset = base_preset(preset, file)
    tree = (recorded or PRESETS[preset]).model_dump()
    _merge(tree, changes, "")
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {assignment!r} is not of the form dotted.name=value, for example train.lr=1e-4.")
        _merge(tree, _nested(name.strip(), _value(name, text)), "")
    return PipelineConfig.model_validate(tree)


def base_preset(preset: str | None, file: Path | None) -> str:
    """The preset that a command changes: the one named by it or by its file, or DEFAULT_PRESET.

    Raises:
        ConfigError: there is no such preset, the two name different ones, or the file cannot be read.
    """
    named = _read(file).get(PRESET)
    if preset is not None and named not in (None, preset):
        raise ConfigError(
            f"{file} changes the preset {named}, and this command starts from {preset}: the two together are neither. "
            f"Add --preset {named}, or remove the line `{PRESET}: {named}` from the file."
        )
    preset = preset or named or DEFAULT_PRESET
    if preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(PRESETS)}.{_near(str(preset), list(PRESETS))}")
    return preset


def form_config(preset: str, chosen: Mapping[str, Any], overrides: Mapping[str, Any]) -> PipelineConfig:
    """Apply the fields of a form, and its other settings, to a preset.

    Args:
        preset: a name in `experiments.presets`.
        chosen: values by dotted setting. train.epochs takes the place of the preset's train.steps.
        overrides: values by dotted setting, or in groups as a settings file has them.

    Raises:
        ConfigError: unknown preset or setting, or one that is chosen and in the overrides, too.
        pydantic.ValidationError: a value is not allowed.
    """
    tree = PRESETS[base_preset(preset, None)].model_dump()
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f'overrides is a {type(overrides).__name__}; write settings by name: {{"model.max_seq_len": 256}}.'
        )
    others = flatten(overrides)
    if twice := [name for name in chosen if any(f"{name}.".startswith(f"{other}.") for other in others)]:
        raise ConfigError(f"{', '.join(twice)} stands in a field of its own and in overrides, too; give it once.")
    if EPOCHS in chosen:
        if STEPS in chosen or others.get(STEPS) is not None:
            raise ConfigError("steps and epochs are both given, and each says how long the training is; give one.")
        chosen = {**chosen, STEPS: None}  # steps go before epochs, so that the preset's would have the last word
    for name, value in (*chosen.items(), *overrides.items()):
        _merge(tree, _nested(str(name), value), "")
    return PipelineConfig.model_validate(tree)


def changes_of(preset: str, config: PipelineConfig) -> dict[str, Any]:
    """List what a config changes of a preset, JSON-ready, as overrides: `form_config` makes the same config of them."""
    changes: dict[str, Any] = {}
    _differences(PRESETS[preset].model_dump(mode="json"), config.model_dump(mode="json"), "", changes)
    return changes


def _differences(before: Tree, now: Tree, path: str, changes: dict[str, Any]) -> None:
    for name, value in now.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, dict) and isinstance(before[name], dict):
            _differences(before[name], value, where, changes)
        elif value != before[name]:
            changes[where] = value


def _read(file: Path | None) -> Tree:
    return {} if file is None else read_mapping(file, "write for example `train: {lr: 0.0001}`")


def _nested(name: str, value: Any) -> Tree:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


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
