"""The settings that a search varies: which values each may take, checked against the config before anything runs.

A value that a trial is given is the config's own (an int where the setting is one), so what a trial ran under can be
written down and run again. `model.lora.rank` stands for the whole group: null trains all weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rmcore.config.changes import change_config
from rmcore.config.files import read_mapping
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import Trial

Value = str | int | float | bool | None
SECTIONS = ("train", "model")
"""Sections whose settings may be searched: trials must share their pairs and how they are measured."""
FIXED = {
    "train.stop_step": "the rungs of the search set it",
    "train.eval_every": "the rungs of the search set it",
    "train.best_metric": "values of trials would be those of steps that were chosen otherwise",
    "model.name": "a search is about one model; run one for each, and compare them by `rm-opt experiment`",
}
"""Settings of these sections that cannot be, and why."""
LORA = "model.lora"
OPTIMIZER_SCALE = {"adamw": 1.0, "adam": 1.0, "sam": 1.0, "muon": 3.0, "lion": 0.15, "sgd": 300.0}
"""Learning rates that suit an optimizer, in units of AdamW's: middles of the ranges of experiments/optimizers.py."""
LORA_SCALE = 5.0
"""Learning rate of adapters in units of that of full fine-tuning: Schulman et al. 2025, LoRA Without Regret, found
about 10, which the range around this holds."""
RANGE_KEYS = {"low", "high", "log", "scale"}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two ends."""

    low: float
    high: float
    log: bool = False
    is_int: bool = False
    scale: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Factors on what is drawn, by another setting and its value as text: a learning rate that suits each optimizer."""

    def factor(self, drawn: Mapping[str, Any]) -> float:
        """The product of the factors under what was drawn of the other settings."""
        return math.prod(by.get(text_of(drawn.get(other)), 1.0) for other, by in self.scale.items())

    def to_dict(self) -> dict[str, Any]:
        """As a space file has it."""
        shown: dict[str, Any] = {"low": self.low, "high": self.high}
        shown |= {"log": True} if self.log else {}
        return shown | ({"scale": {name: dict(by) for name, by in self.scale.items()}} if self.scale else {})


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several values."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """The settings of a search with what each may be."""

    settings: Mapping[str, Range | Choices]

    def suggest(self, trial: "Trial") -> dict[str, Any]:
        """Draw a value of every setting for a trial, or read those that it has; as the study stores them."""
        drawn: dict[str, Any] = {}
        for name, one in self.settings.items():
            if isinstance(one, Choices):
                drawn[name] = trial.suggest_categorical(name, list(one.values))
            elif one.is_int:
                drawn[name] = trial.suggest_int(name, int(one.low), int(one.high), log=one.log)
            else:
                drawn[name] = trial.suggest_float(name, one.low, one.high, log=one.log)
        return drawn

    def values(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that drawn values stand for: ranges times their factors."""
        found = {}
        for name, value in drawn.items():
            one = self.settings[name]
            found[name] = float(f"{value * one.factor(drawn):.6g}") if isinstance(one, Range) and one.scale else value
        return found

    def config(self, base: PipelineConfig, drawn: Mapping[str, Any]) -> PipelineConfig:
        """The base under drawn values.

        Raises:
            ConfigError: the config refuses them together.
        """
        values = self.values(drawn)
        try:
            return with_settings(base, values)
        except ValueError as error:
            said = settings_line(values)
            raise ConfigError(f"the settings of this trial do not fit together ({said}): {_reason(error)}") from None

    def drawn_of(self, config: PipelineConfig) -> dict[str, Any]:
        """Find what would have to be drawn for a config, of the settings whose value is in the space."""
        found: dict[str, Any] = {}
        own = {name: value_of(config, name) for name in self.settings}
        for name, one in self.settings.items():
            value = own[name]
            if isinstance(one, Choices):
                if value in one.values:
                    found[name] = value
            elif isinstance(value, int | float) and not isinstance(value, bool):
                unscaled = value / one.factor(own)
                if one.low <= unscaled <= one.high:
                    found[name] = int(unscaled) if one.is_int else float(unscaled)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As a space file has it."""
        return {
            name: list(one.values) if isinstance(one, Choices) else one.to_dict() for name, one in self.settings.items()
        }


def text_of(value: Any) -> str:
    """A value as people and files write it.

    >>> text_of(None), text_of(True), text_of(0.0001)
    ('null', 'true', '0.0001')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def settings_line(values: Mapping[str, Any]) -> str:
    """Settings in one line, as `--set` names them."""
    return ", ".join(f"{name}={text_of(value)}" for name, value in values.items())


def with_settings(base: PipelineConfig, values: Mapping[str, Any]) -> PipelineConfig:
    """Change a config; settings of LoRA bring their group, a rank of null removes it.

    Raises:
        ValueError: a name is no setting, or a value is not allowed.
    """
    changes = {name: value for name, value in values.items() if not name.startswith(f"{LORA}.")}
    own = {name.removeprefix(f"{LORA}."): value for name, value in values.items() if name not in changes}
    if own:
        before = {} if base.model.lora is None else base.model.lora.model_dump()
        changes[LORA] = None if own.get("rank", 0) is None else before | own
    if "train.epochs" in changes and "train.steps" not in changes:
        changes["train.steps"] = None  # which would have the last word
    return change_config(base, changes)


def value_of(config: PipelineConfig, setting: str) -> Any:
    """The value of a setting; None inside a group that is not there."""
    place: Any = config
    for name in setting.split("."):
        place = getattr(place, name, None)
    return place


def default_space(base: PipelineConfig) -> Space:
    """The settings that decide most, around the values of a config: small, so that few trials find something.

    Ranges hold the base's own values, so the defaults are a trial like any other.
    """
    train = base.train
    optimizers = tuple(dict.fromkeys((train.optimizer, "adamw", "muon", "lion")))
    relative: dict[str, float] = {name: OPTIMIZER_SCALE[name] / OPTIMIZER_SCALE[train.optimizer] for name in optimizers}
    scale: dict[str, dict[str, float]] = {"train.optimizer": relative}
    length: Choices | Range = Range(0.5 * train.epochs, 3 * train.epochs, log=True)
    name = "train.epochs"
    if train.steps is not None:
        name = "train.steps"
        length = Choices(tuple(sorted({max(1, train.steps // 2), train.steps, 2 * train.steps})))
    found: dict[str, Range | Choices] = {
        "train.lr": Range(train.lr / 8, train.lr * 8, log=True, scale=scale),
        name: length,
        "train.pairs_per_step": Choices(
            tuple(sorted({max(1, train.pairs_per_step // 2), train.pairs_per_step, 2 * train.pairs_per_step}))
        ),
        "train.label_smoothing": Choices(tuple(sorted({0.0, 0.05, 0.1, train.label_smoothing}))),
        "train.regularization_lambda": Range(
            min(1e-4, train.regularization_lambda or 1e-4), max(0.03, train.regularization_lambda), log=True
        ),
        "train.schedule": Choices(tuple(dict.fromkeys((train.schedule, "cosine", "linear", "constant")))),
        "train.optimizer": Choices(optimizers),
    }
    if not base.model.head_only:
        ranks = dict.fromkeys((None, 8, 16, *(() if base.model.lora is None else (base.model.lora.rank,))))
        found["model.lora.rank"] = Choices(tuple(ranks))
        own = LORA_SCALE if base.model.lora is not None else 1.0
        scale["model.lora.rank"] = {text_of(rank): (1.0 if rank is None else LORA_SCALE) / own for rank in ranks}
    return Space(found)


def read_space(file: Path) -> dict[str, Any]:
    """The mapping in a space file, as `parse_space` takes it.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.
    """
    return read_mapping(file, "write for example `train.lr: {low: 1.0e-6, high: 1.0e-4, log: true}`")


def parse_space(given: Mapping[str, Any], base: PipelineConfig) -> Space:
    """Check a space against the config and give it.

    Args:
        given: setting -> a list of choices, or a mapping of low, high and perhaps log and scale.
        base: what trials change.

    Raises:
        ConfigError: it is empty, names no setting or one that cannot be searched, has a range that is none, or a value
            that the config refuses.
    """
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            "the space is empty, so every trial would be the same: name at least one setting with its values, for "
            "example `train.optimizer: [adamw, lion]`, or leave --space out for the default one."
        )
    space = Space({str(name): _parse(str(name), value, base) for name, value in given.items()})
    if "train.steps" in space.settings and "train.epochs" in space.settings:
        raise ConfigError(
            "the space has train.steps and train.epochs, and each says how long a training is: leave one of them out."
        )
    for name, one in space.settings.items():
        for other in one.scale if isinstance(one, Range) else ():
            if not isinstance(space.settings.get(other), Choices):
                raise ConfigError(
                    f"space, {name}.scale: {other} is no setting with choices in this space, so the factors would be "
                    "of no use; add its choices, or leave the scale out."
                )
    return space


def _parse(name: str, value: Any, base: PipelineConfig) -> Range | Choices:
    if name.partition(".")[0] not in SECTIONS or name in FIXED or name == LORA:
        why = FIXED.get(name, f"only settings of {' and '.join(SECTIONS)} change a training on the same pairs")
        if name == LORA:
            why = "it is a group; name model.lora.rank, where null trains all weights"
        raise ConfigError(f"space: {name} cannot be searched: {why}. Remove it.")
    if isinstance(value, Mapping):
        return _parse_range(name, value, base)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"space: {name} is {value!r}; write a list of choices, such as [0.0, 0.1], or a range, such as "
            "{low: 0.001, high: 0.1, log: true}. To fix a setting, use --set."
        )
    if not value:
        raise ConfigError(f"space: {name} has no choices, so nothing could be drawn: name some, or leave it out.")
    choices = [_checked(name, one, base) for one in value]
    if odd := [one for one in choices if not isinstance(one, str | int | float | bool | None)]:
        raise ConfigError(
            f"space: {name} has the choice {odd[0]!r}, which is a group or a list, and choices are single values; name "
            "the settings in it."
        )
    if len({(type(one), one) for one in choices}) < len(choices):
        raise ConfigError(f"space: {name} names a choice twice, which would be drawn twice as often; remove one.")
    return Choices(tuple(choices))


def _parse_range(name: str, value: Mapping[str, Any], base: PipelineConfig) -> Range:
    if unknown := sorted(set(map(str, value)) - RANGE_KEYS):
        raise ConfigError(f"space: {name} has {', '.join(unknown)}; a range has low, high and perhaps log and scale.")
    if missing := [key for key in ("low", "high") if key not in value]:
        raise ConfigError(f"space: {name} has no {' and no '.join(missing)}; a range has both ends.")
    low, high = (_checked(name, _number(name, key, value[key]), base) for key in ("low", "high"))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise ConfigError(f"space: {name} is no number, so it has no range; write a list of choices.")
    is_log = value.get("log", False)
    if not isinstance(is_log, bool):
        raise ConfigError(f"space: {name}.log is {is_log!r}; write true or false.")
    if not low < high:
        raise ConfigError(
            f"space: {name} goes from {text_of(low)} to {text_of(high)}, and nothing lies between: low has to be below "
            "high. To fix a setting, use --set."
        )
    if is_log and low <= 0:
        raise ConfigError(f"space: {name} begins at {text_of(low)}, which has no logarithm: raise low, or drop log.")
    return Range(low, high, is_log, isinstance(low, int) and isinstance(high, int), _scale(name, value.get("scale")))


def _number(name: str, key: str, given: Any) -> Any:
    try:  # YAML 1.1 reads 1e-4 as text
        return float(given) if isinstance(given, str) else given
    except ValueError:
        raise ConfigError(f"space: {name}.{key} is {given!r}, and a range has numbers for ends.") from None


def _scale(name: str, given: Any) -> dict[str, dict[str, float]]:
    if given is None:
        return {}
    advice = "write {train.optimizer: {lion: 0.15}}: factors above 0 by the values of another setting."
    if not isinstance(given, Mapping) or not all(isinstance(by, Mapping) for by in given.values()):
        raise ConfigError(f"space: {name}.scale is {given!r}; {advice}")
    found = {str(other): {text_of(value): factor for value, factor in by.items()} for other, by in given.items()}
    factors = [factor for by in found.values() for factor in by.values()]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and one > 0 for one in factors):
        raise ConfigError(f"space: {name}.scale has a factor that is no number above 0; {advice}")
    return found


def _checked(name: str, value: Any, base: PipelineConfig) -> Any:
    """A value as the config has it.

    Raises:
        ConfigError: there is no such setting, or it may not have that value.
    """
    try:
        return value_of(with_settings(base, {name: value}), name)
    except ValidationError as error:
        raise ConfigError(
            f"space: {name} may not be {text_of(value)}, so a trial with it could not run: {_reason(error)}. Change it "
            "in the space; `rm-opt init` writes what each setting may be."
        ) from None
    except ValueError as error:
        raise ConfigError(f"space: {error}. Settings are named as for --set, for example train.lr.") from None


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(dict.fromkeys(str(one["msg"]) for one in error.errors()))
    return str(error)
