"""A search for the best settings: which values trials draw, by Optuna's TPE, and which was best.

Importing this module imports Optuna.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rmcore.config.changes import change_config
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.extras import require_extra
from rmcore.stages.reads import setting_at
from rmcore.study.tuning import OBJECTIVES, WHY, Objective
from rmcore.training.length import planned_steps

require_extra("optuna", "tune", "rm-opt tune")
import optuna  # noqa: E402
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import FrozenTrial, TrialState  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)
Distribution = FloatDistribution | IntDistribution | CategoricalDistribution
Space = Mapping[str, Distribution]
FIXED = {
    "train.stop_step": "it cuts a training off",
    "train.eval_every": "the best of more evaluations is better by luck",
    "train.best_metric": "values of trials would be those of steps that were chosen otherwise",
    "model.name": "a search is about one model; run one for each, and compare them by `rm-opt experiment`",
    "model.max_seq_len": "the winner and the defaults would be compared on other pairs",
}
"""Settings of `train` and `model` that cannot be searched, and why."""
STARTUP_DRAWS = 8
"""Trials that are drawn at random before TPE's model of good values has a say."""


def default_space(base: PipelineConfig) -> Space:
    """Return the settings that decide most, in ranges around the values of a config, which are among them."""
    train = base.train

    def around(value: int) -> Distribution:
        return CategoricalDistribution(sorted({max(1, value // 2), value, 2 * value}))

    # Passes that follow from the number of pairs are the first choice, and whole numbers of them the others.
    length: dict[str, Distribution] = {
        "train.epochs": CategoricalDistribution([None, 1.0, 3.0, 10.0])
        if train.epochs is None
        else FloatDistribution(0.5 * train.epochs, 3 * train.epochs, log=True)
    }
    if train.steps is not None:
        length = {"train.steps": around(train.steps)}
    return {
        "train.lr": FloatDistribution(train.lr / 8, train.lr * 8, log=True),
        **length,
        "train.pairs_per_step": around(train.pairs_per_step),
        "train.label_smoothing": CategoricalDistribution(sorted({0.0, 0.05, 0.1, train.label_smoothing})),
        "train.schedule": CategoricalDistribution(
            list(dict.fromkeys((train.schedule, "cosine", "linear", "constant")))
        ),
    }


def parse_space(given: Mapping[str, Any], base: PipelineConfig) -> Space:
    """Check a space against the config and return it.

    Args:
        given: setting -> a list of choices, or a mapping of low, high and perhaps log.
        base: what trials change.

    Raises:
        ConfigError: it is empty, names no setting or one that cannot be searched, has a range that is none, or a value
            that the config refuses.
    """
    space = {str(name): _distribution(str(name), value, base) for name, value in given.items()}
    if not space:
        raise ConfigError(
            "the space is empty, so every trial would be the same: name at least one setting with its values, for "
            "example `train.schedule: [cosine, linear]`, or leave --space out for the default one."
        )
    if "train.steps" in space and "train.epochs" in space:
        raise ConfigError(
            "the space has train.steps and train.epochs, and each says how long a training is: leave one of them out."
        )
    return space


def _distribution(name: str, value: Any, base: PipelineConfig) -> Distribution:
    if name in FIXED or name.partition(".")[0] not in ("train", "model"):
        why = FIXED.get(name, "only settings of train and model change a training on the same pairs")
        raise ConfigError(f"space: {name} cannot be searched: {why}. Remove it.")
    is_range = isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= {"low", "high", "log"}
    if not is_range and not (isinstance(value, list | tuple) and value):
        raise ConfigError(
            f"space: {name} is {value!r}; write a list of choices, such as [0.0, 0.1], or a range, such as "
            "{low: 0.001, high: 0.1, log: true}. To fix a setting, use --set."
        )
    read = [_read(name, one, base) for one in ((value["low"], value["high"]) if is_range else value)]
    try:
        if not is_range:
            if len({text_of(one) for one in read}) < len(read):
                raise ValueError("a choice is named twice, and would be drawn twice as often")
            return CategoricalDistribution(read)
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in read) or read[0] >= read[1]:
            raise ValueError(f"{text_of(read[0])} to {text_of(read[1])} is no range of numbers from low to high")
        of = IntDistribution if all(isinstance(end, int) for end in read) else FloatDistribution
        return of(low=read[0], high=read[1], log=bool(value.get("log", False)))
    except ValueError as error:
        raise ConfigError(f"space: {name} cannot be drawn from {value!r}: {error}") from None


def _read(name: str, value: Any, base: PipelineConfig) -> Any:
    """Return a value as the config has it: 1e-4, which YAML reads as text, is a number there."""
    try:
        read = setting_at(changed(base, {name: value}), name)
    except ValueError as error:
        raise ConfigError(
            f"space: {name} may not be {text_of(value)}, so a trial with it could not run: {reason(error)}"
        ) from None
    if not isinstance(read, str | int | float | bool | None):
        raise ConfigError(f"space: {name} is a group or a list, and choices are single values; name settings in it.")
    return read


def reason(error: ValueError) -> str:
    """Return what a config refuses, in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(dict.fromkeys(str(one["msg"]) for one in error.errors()))
    return str(error)


def changed(base: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """Return the base with other settings.

    Raises:
        ValueError: a name is no setting, or the config refuses a value, alone or with the others.
    """
    # Steps have the last word where both are set.
    steps = {"train.steps": None} if "train.epochs" in settings else {}
    return change_config(base, {**steps, **settings})


def text_of(value: Any) -> str:
    """Return a value as people and files write it.

    >>> text_of(None), text_of(True), text_of(0.0001)
    ('null', 'true', '0.0001')
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def space_record(space: Space) -> dict[str, str]:
    """Return a space as text by setting, as the plan, the report and the study's record show it."""
    return {
        name: ", ".join(map(text_of, one.choices))
        if isinstance(one, CategoricalDistribution)
        else f"{text_of(one.low)} to {text_of(one.high)}{', logarithmic' if one.log else ''}"
        for name, one in space.items()
    }


@dataclass
class Search:
    """The trials of one search, in order; `num_pairs` pairs to train on turn epochs into steps.

    Nothing of it is stored: what a trial draws depends on the seed, its number and the values of those before it, and
    their trainings are in the store, so the same search made again goes through the same trials.
    """

    base: PipelineConfig
    space: Space
    objective: Objective
    num_pairs: int

    def __post_init__(self) -> None:
        self.higher = OBJECTIVES[self.objective].better == "higher"
        self.study = optuna.create_study(direction="maximize" if self.higher else "minimize")

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that were drawn, in order."""
        return self.study.get_trials(deepcopy=False)

    def ask(self) -> optuna.Trial:
        """Draw the next trial, first the defaults."""
        number = len(self.trials)
        inside: dict[str, optuna.distributions.BaseDistribution]
        inside = {name: one for name, one in self.space.items() if number or _has(one, setting_at(self.base, name))}
        if not number:
            self.study.enqueue_trial({name: setting_at(self.base, name) for name in inside})
        seed = zlib.crc32(f"{self.base.seed} {number}".encode())
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_DRAWS)
        return self.study.ask(inside)

    def fail(self, trial: optuna.Trial, why: str) -> None:
        """Tell that a trial failed; the search continues."""
        trial.set_user_attr(WHY, why)
        self.study.tell(trial, state=TrialState.FAIL)

    def best(self) -> FrozenTrial:
        """Return the complete trial with the best value, the earlier one of equals: a tie with the defaults is no win.

        Raises:
            ConfigError: no trial came to its end.
        """
        complete = [one for one in self.trials if one.state == TrialState.COMPLETE]
        if not complete:
            whys = [str(one.user_attrs[WHY]) for one in self.trials if one.state == TrialState.FAIL]
            raise ConfigError(
                f"none of {len(self.trials)} trials came to its end, so there is nothing to choose: {len(whys)} failed"
                f"{f', the last one because: {whys[-1]}' if whys else ''}. Correct that (often a learning rate range "
                "that is too high), and repeat the command."
            )
        sign = -1 if self.higher else 1
        return min(complete, key=lambda one: (sign * (one.value or 0.0), one.number))

    def settings_of(self, number: int) -> dict[str, Any]:
        """Return the searched settings of a trial, also where they do not fit together."""
        drawn = self.trials[number].params if number else {}
        return {name: drawn.get(name, setting_at(self.base, name)) for name in self.space}

    def config_of(self, number: int) -> PipelineConfig:
        """Return the settings of a trial's training, in steps.

        Raises:
            ValueError: what it has drawn does not fit together.
        """
        config = changed(self.base, self.trials[number].params) if number else self.base
        steps = planned_steps(config.train, self.num_pairs)
        return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def _has(one: Distribution, value: Any) -> bool:
    """Whether a trial could have drawn a value."""
    if isinstance(one, CategoricalDistribution):
        return value in one.choices
    return value is not None and one.low <= value <= one.high
