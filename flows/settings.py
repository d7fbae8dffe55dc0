"""From a preset, a YAML file and `--set a.b=c`, or a form, to one validated config; and back to what was changed."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from experiments.presets import PRESETS
from rmcore.config.base import Settings
from rmcore.config.data import GOLD, NO_PAIRS
from rmcore.config.files import lines_of, parse_yaml, read_mapping
from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hub import require_model
from rmcore.core.store import flatten

Tree = dict[str, Any]

OPTIONAL_GROUPS = {
    name: group
    for name, group in GROUPS.items()
    if name and GROUPS[name.rpartition(".")[0]].model_fields[name.rpartition(".")[2]].default is None
}
"""Groups that most runs do without: setting one field of them brings the whole group with its defaults."""
FREE_KEYS = tuple(
    f"{group}.{name}"
    for group, model in GROUPS.items()
    for name, field in model.model_fields.items()
    if any(get_origin(kind) is dict for kind in get_args(field.annotation))
)
"""Settings whose value is a mapping with the user's own keys, dots in them included."""
PRESET = "preset"
"""Key of a settings file that is no setting: what the file changes."""
DEFAULT_PRESET, OWN_DATA_PRESET = "demo", "minilm"
"""The presets of a run that names none: without data of its own, and with them, as the demo's policy writes in
the synthetic benchmark's world and nowhere else."""
STEPS, EPOCHS, SOURCE = "train.steps", "train.epochs", "data.source"


def load_config(
    preset: str | None, file: Path | None, assignments: Sequence[str], recorded: PipelineConfig | None = None
) -> PipelineConfig:
    """Apply `file`, then `assignments`, to a preset.

    Args:
        preset: a name in `experiments.presets`; None: as `base_preset` has it.
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
    preset = base_preset(preset, file, named_source(assignments))
    tree = (recorded or PRESETS[preset]).model_dump()
    begins = _groups_of(preset if recorded is None else _nearest_preset(recorded.model_dump(mode="json"))[0])
    places = {} if file is None else {name: f"{file}, line {line}: " for name, line in lines_of(file).items()}
    _merge(tree, changes, "", begins, places)
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {assignment!r} is not of the form dotted.name=value, for example train.lr=1e-4.")
        _set(tree, name.strip(), _value(name, text), begins)
        places.pop(name.strip(), None)
    try:
        return PipelineConfig.model_validate(tree)
    except ValidationError as error:
        wrong = {".".join(map(str, item["loc"])): None for item in error.errors()}
        for name in filter(places.get, wrong):
            error.add_note(f"{places[name]}{name}")
        raise


def named_source(assignments: Sequence[str]) -> Any:
    """The pairs that `dotted.name=value` settings name; None where they name none."""
    named = [text for name, _, text in (one.partition("=") for one in assignments) if name.strip() == SOURCE]
    return _value(SOURCE, named[-1]) if named else None


def base_preset(preset: str | None, file: Path | None, source: Any = None) -> str:
    """The preset that a run changes: the one named by it or by its file, or the one for its pairs.

    The same for commands and forms. `source` is what the run names as its pairs besides the file; None: nothing.

    Raises:
        ConfigError: there is no such preset, the two name different ones, or the file cannot be read.
    """
    given = _read(file)
    named = given.get(PRESET)
    if source is None and isinstance(given.get("data"), dict):
        source = given["data"].get("source")
    if preset is not None and named not in (None, preset):
        raise ConfigError(
            f"{file} changes the preset {named}, and this command starts from {preset}: the two together are neither. "
            f"Add --preset {named}, or remove the line `{PRESET}: {named}` from the file."
        )
    if file is not None and not isinstance(named, str | None):
        line = lines_of(file)[PRESET]
        raise ConfigError(
            f"{file}, line {line}: preset is a {type(named).__name__}; write one name, such as `preset: demo`."
        )
    preset = preset or named or (DEFAULT_PRESET if source in (None, NO_PAIRS, GOLD) else OWN_DATA_PRESET)
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
    preset = base_preset(preset, None)
    tree, begins = PRESETS[preset].model_dump(), _groups_of(preset)
    others = flat_overrides(overrides)
    if twice := [name for name in chosen if any(f"{name}.".startswith(f"{other}.") for other in others)]:
        raise ConfigError(f"{', '.join(twice)} is in a field of its own and in overrides, too; give it once.")
    if EPOCHS in chosen:
        if STEPS in chosen or others.get(STEPS) is not None:
            raise ConfigError("steps and epochs are both given, and each says how long the training is; give one.")
        chosen = {**chosen, STEPS: None}  # steps go before epochs, so that the preset's would have the last word
    for name, value in (*chosen.items(), *overrides.items()):
        _set(tree, str(name), value, begins)
    return PipelineConfig.model_validate(tree)


def flat_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The other settings of a form by dotted name.

    Raises:
        ConfigError: they are no settings.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f'overrides is a {type(overrides).__name__}; write settings by name: {{"model.max_seq_len": 256}}.'
        )
    return flatten(overrides, GROUPS)


def changes_of(preset: str, config: PipelineConfig) -> dict[str, Any]:
    """List what a config changes of a preset, JSON-ready, as overrides: `form_config` makes the same config of them."""
    changes: dict[str, Any] = {}
    _differences(PRESETS[preset].model_dump(mode="json"), config.model_dump(mode="json"), "", changes)
    return changes


UNNAMED = frozenset(("study", "data.source", "device"))
"""Settings that name no run: those of one study mostly share them."""
MOST_NAMED, LONGEST_VALUE = 4, 24


def named_changes(recorded: Mapping[str, Any]) -> str:
    """Say in short what a run changes of the preset that is nearest to it, by the last part of each setting's name.

    Nothing changed: the preset's name.

    >>> named_changes(PRESETS["minilm"].model_dump(mode="json") | {"study": "mine", "seed": 2})
    'seed=2'
    """
    nearest, changed = _nearest_preset(recorded)
    parts = []
    for name, value in list(changed.items())[:MOST_NAMED]:
        text = f"{value:g}" if isinstance(value, float) else str(value).rpartition("/")[2]
        parts.append(f"{name.rpartition('.')[2]}={text[:LONGEST_VALUE]}")
    more = len(changed) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "") if parts else nearest


def _nearest_preset(recorded: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The preset of which a run changes fewest settings, and these with the run's values."""
    own = flatten(recorded, GROUPS)

    def changed(preset: str) -> dict[str, Any]:
        usual = flatten(PRESETS[preset].model_dump(mode="json"), GROUPS)
        return {
            name: own[name]
            for name, value in usual.items()
            if name in own and name not in UNNAMED and value != own[name]
        }

    return min(((preset, changed(preset)) for preset in PRESETS), key=lambda one: len(one[1]))


def _differences(before: Tree, now: Tree, path: str, changes: dict[str, Any]) -> None:
    for name, value in now.items():
        where = f"{path}.{name}" if path else name
        if where in GROUPS and isinstance(value, dict) and isinstance(before[name], dict):
            _differences(before[name], value, where, changes)
        elif value != before[name]:
            changes[where] = value


def _read(file: Path | None) -> Tree:
    return {} if file is None else read_mapping(file, "write for example `train: {lr: 0.0001}`")


def _set(tree: Tree, name: str, value: Any, begins: Mapping[str, Settings]) -> None:
    """Set one setting, or one entry of a setting in FREE_KEYS, in place."""
    setting = next((one for one in FREE_KEYS if name.startswith(f"{one}.")), None)
    if setting is not None:
        before = flatten(tree, GROUPS).get(setting)
        value = (before if isinstance(before, dict) else {}) | {name.removeprefix(f"{setting}."): value}
    _merge(tree, _nested(setting or name, value), "", begins)


def _nested(name: str, value: Any) -> Tree:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _groups_of(preset: str) -> dict[str, Settings]:
    """The optional groups as they begin where one setting of them changes a preset that does without."""
    return {name: group(**group.usual.get(preset, {})) for name, group in OPTIONAL_GROUPS.items()}


def _merge(
    tree: Tree,
    change: Tree,
    path: str,
    begins: Mapping[str, Settings],
    places: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Apply a change in place.

    Args:
        tree: settings, by name.
        change: of them, shaped alike.
        path: dotted name of `tree` in the whole.
        begins: see `_groups_of`.
        places: of each setting where it was given, for messages.
    """
    for name, value in change.items():
        where = f"{path}.{name}" if path else str(name)
        place = places.get(where, "")
        if name not in tree:
            raise ConfigError(f"{place}no setting {where!r}.{_meant(where)}")
        if tree[name] is None and isinstance(value, dict) and where in OPTIONAL_GROUPS:
            tree[name] = begins[where].model_dump()
        is_group = where in GROUPS and isinstance(tree[name], dict)
        if is_group and isinstance(value, dict):
            _merge(tree[name], value, where, begins, places)
        elif is_group and not (value is None and where in OPTIONAL_GROUPS):
            inside = ", ".join(tree[name])
            raise ConfigError(f"{place}{where} is a group of settings, not a value; set one of {inside} in it.")
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


def _meant(where: str) -> str:
    """Suggest which setting an unknown name may stand for."""
    known = _setting_names()
    own = where.rpartition(".")[2]
    found = [name for name in known if name.rpartition(".")[2] == own]
    found = found or difflib.get_close_matches(where, known, n=1) or difflib.get_close_matches(own, known, n=1)
    meant = f" Did you mean {' or '.join(map(repr, found[:3]))}?" if found else ""
    return f"{meant} `rm-opt init` writes the common settings down."


@cache
def _setting_names() -> list[str]:
    """Dotted names of all settings, those of groups that most runs do without among them."""
    return sorted(f"{group}.{name}".removeprefix(".") for group, model in GROUPS.items() for name in model.model_fields)


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_names(*configs: PipelineConfig) -> None:
    """Refuse runs that name no pairs, and ask the hub once for each model and data set that is only there.

    Raises:
        ConfigError: the preset is for the user's own pairs and none are named, or a model is `minilm`, whose package is
            not installed.
        ModelError, DataError: the hub does not answer or does not show them.
    """
    from rmcore.data.readers.hub import hub_revision
    from rmcore.data.readers.sources import source_kind

    models, sources = dict[str, None](), dict[str, None]()  # in order, each once
    for config in configs:
        if config.data.source == NO_PAIRS:
            raise ConfigError(
                "this preset is for pairs of your own and none are named: name them by --data FILE, in the field data "
                f"of a form, or in a settings file as data.source ({GOLD} is the synthetic benchmark)."
            )
        models[config.model.name] = None
        if config.policy is not None and config.needs_policy:
            models |= {config.policy.name: None, config.policy.base: None}
        sources |= dict.fromkeys(source for source in (config.data.source, config.data.eval_source) if source)
    for model in models:
        require_model(model)
    for source in sources:
        if source != GOLD and source_kind(source) == "hub":
            hub_revision(source)
