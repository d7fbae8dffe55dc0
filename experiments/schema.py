"""What an experiment declares: a question, a base, factors with their arms, a control, seeds, hypotheses, a budget.

A declaration is data. It is checked whole before anything runs: every arm is a re-validated change of the base, and
whatever does not fit is refused, naming the field.
"""

import hashlib
from collections.abc import Mapping
from itertools import product
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from experiments.arms import Arm, Changes, change_config, merge_equal
from experiments.catalogue import CATALOGUE
from rmcore.config import PipelineConfig, Settings

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.=,/-]{0,60}$")]
TUNING_SEED = 1_000_003
"""Seed of all tuning trials, far from any replicate's: what an arm is tuned on is not what it is judged on."""


class Factor(Settings):
    """One thing that is varied."""

    name: Name
    """Shown in the arms' names, for example `lr`."""
    levels: dict[Name, Changes] = Field(min_length=1)
    """Each level's changes of the base, by dotted setting: {"1e-4": {"train.lr": 1e-4}}."""


class Hypothesis(Settings):
    """One claim, with the comparison and the threshold that decide it, fixed before the first cell runs."""

    name: Name
    """Short, for example H1."""
    claim: str = Field(min_length=10)
    """One sentence that a stranger understands."""
    metric: str
    """One of the experiment's metrics."""
    comparison: Literal["difference", "ratio", "level"]
    """difference: arm minus versus; ratio: arm over versus; level: the arm alone."""
    arm: Name
    """The arm that the claim is about."""
    versus: Name | None = None
    """What it is compared with; left out, the control."""
    direction: Literal["above", "below"]
    """On which side of the threshold the claim puts the value."""
    threshold: float
    """In units of the metric; for a ratio a plain number."""


class Tuning(Settings):
    """Tune one setting of each arm before its cells run, with as many trials for each."""

    setting: str = "train.lr"
    """Dotted name of the setting."""
    trials: int = Field(default=3, ge=1, le=64)
    """Trials for each arm."""
    ranges: dict[Name, tuple[float, float]] = Field(min_length=1)
    """Log-uniform range of each arm that is tuned; arms without a range keep what they declare."""
    metric: Literal["eval/loss", "eval/pairwise_accuracy"] = "eval/loss"
    """What a trial is judged by: its best validation value. The loss separates trials that accuracy cannot."""

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Self:
        for arm, (low, high) in self.ranges.items():
            if not 0 < low < high:
                raise ValueError(f"ranges.{arm}: {low:g} to {high:g} is no log-uniform range; write 0 < low < high")
        return self

    def values(self, arm: str) -> list[float]:
        """The trials of an arm, rising: log-uniform over its range, one in each of `trials` equal parts of it.

        Fixed by the declaration alone, to three digits; one part each, so that few trials cannot fall together.
        """
        low, high = self.ranges[arm]
        digest = hashlib.sha256(f"{self.setting} {arm} {self.trials}".encode()).digest()
        shares = (np.arange(self.trials) + np.random.default_rng(list(digest)).random(self.trials)) / self.trials
        return [float(f"{low * (high / low) ** share:.3g}") for share in shares]


class Experiment(Settings):
    """A pre-registered comparison of reward-model recipes."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    """Name on the command line and of the MLflow experiment."""
    size: str = Field(default="custom", pattern=r"^[a-z][a-z0-9_-]{0,20}$")
    """smoke, small or paper of a shipped experiment; custom otherwise."""
    title: str = Field(min_length=3)
    """Heading of the report."""
    question: str = Field(min_length=10)
    """What is asked, in a sentence or two."""
    base: PipelineConfig
    """What all arms share."""
    factors: tuple[Factor, ...] = Field(min_length=1)
    """What is varied."""
    design: Literal["grid", "one_at_a_time"] = "grid"
    """grid: every combination of levels; one_at_a_time: the base (arm `base`), then each level alone."""
    control: Name
    """The arm that others are compared with."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(min_length=1)
    """Replicates of every arm: each seeds head, data order and split. No factor."""
    metrics: tuple[str, ...] = Field(min_length=1)
    """What is reported of each cell, the main one first: names of `experiments.catalogue`."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """The claims that the experiment decides."""
    budget_minutes: float = Field(gt=0)
    """Longest expected time of what has to run; a longer plan is refused before it starts."""
    tuning: Tuning | None = None
    """A setting that each arm is given its own best value of, first."""
    target_accuracy: float | None = Field(default=None, gt=0, lt=1)
    """Validation accuracy whose first crossing defines `steps_to_target` and `seconds_to_target`."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} repeats a seed, which would count one run twice")
        if self.tuning is not None and TUNING_SEED in self.seeds:
            raise ValueError(f"seeds: {TUNING_SEED} is the seed of the tuning trials")
        return self

    @model_validator(mode="after")
    def _metrics_are_known(self) -> Self:
        for position, metric in enumerate(self.metrics):
            if metric not in CATALOGUE:
                raise ValueError(f"metrics.{position}: no metric {metric!r}; there are {', '.join(CATALOGUE)}")
            if CATALOGUE[metric].needs_target and self.target_accuracy is None:
                raise ValueError(f"metrics.{position}: {metric} needs target_accuracy, which is not set")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError("metrics: a metric is named twice")
        return self

    @model_validator(mode="after")
    def _names_refer_to_something(self) -> Self:
        arms = self.arms()
        known = {name for arm in arms for name in (arm.name, *arm.merged)}
        shown = ", ".join(arm.name for arm in arms)
        if self.control not in known:
            raise ValueError(f"control: there is no arm {self.control!r}; arms are {shown}")
        for position, hypothesis in enumerate(self.hypotheses):
            where = f"hypotheses.{position} ({hypothesis.name})"
            for field, arm in (("arm", hypothesis.arm), ("versus", hypothesis.versus)):
                if arm is not None and arm not in known:
                    raise ValueError(f"{where}.{field}: there is no arm {arm!r}; arms are {shown}")
            self._check_comparison(where, hypothesis, arms)
        names = [hypothesis.name for hypothesis in self.hypotheses]
        if len(set(names)) < len(names):
            raise ValueError("hypotheses: two have the same name")
        for arm in self.tuning.ranges if self.tuning else ():
            if arm not in {one.name for one in arms}:
                raise ValueError(f"tuning.ranges.{arm}: there is no such arm; arms are {shown}")
        return self

    def _check_comparison(self, where: str, hypothesis: Hypothesis, arms: list[Arm]) -> None:
        if hypothesis.metric not in self.metrics:
            raise ValueError(
                f"{where}.metric: no cell reports {hypothesis.metric!r}; metrics are {', '.join(self.metrics)}"
            )
        if hypothesis.comparison == "level":
            if hypothesis.versus is not None:
                raise ValueError(f"{where}.versus: a level is of one arm alone; leave versus out")
            return
        find = {name: arm.name for arm in arms for name in (arm.name, *arm.merged)}
        if find[hypothesis.arm] == find[hypothesis.versus or self.control]:
            raise ValueError(f"{where}: {hypothesis.arm!r} would be compared with itself; name another versus")
        if hypothesis.comparison == "ratio" and hypothesis.threshold <= 0:
            raise ValueError(f"{where}.threshold: a ratio is compared with a positive number")

    def arms(self) -> list[Arm]:
        """The arms in declared order, equal ones merged into the first of them.

        Raises:
            ValueError: a change names no setting, or gives a config that is not allowed; names the arm.
        """
        named = self._grid() if self.design == "grid" else self._one_at_a_time()
        arms = []
        for name, changes in named.items():
            try:
                config = change_config(self.base, changes | {"study": self.name})
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ValueError(f"arm {name!r}: {where}: {first['msg']} (given: {first['input']!r})") from error
            except ValueError as error:
                raise ValueError(f"arm {name!r}: {error}") from error
            arms.append(Arm(name, changes, config))
        return merge_equal(arms)

    def _grid(self) -> dict[str, Changes]:
        found: dict[str, Changes] = {}
        for levels in product(*(factor.levels.items() for factor in self.factors)):
            if len(self.factors) == 1:
                name = levels[0][0]
            else:
                name = ", ".join(
                    f"{factor.name}={level}" for factor, (level, _) in zip(self.factors, levels, strict=True)
                )
            found[name] = {setting: value for _, changes in levels for setting, value in changes.items()}
        return found

    def _one_at_a_time(self) -> dict[str, Changes]:
        found: dict[str, Changes] = {"base": {}}
        for factor in self.factors:
            found |= {f"{factor.name}={level}": changes for level, changes in factor.levels.items()}
        return found

    def arm_name(self, name: str) -> str:
        """The name that an arm goes by, `name` being its own or one that was merged into it."""
        return next(arm.name for arm in self.arms() if name in (arm.name, *arm.merged))

    def stages(self) -> list[str]:
        """The stages that a cell runs, in order: no more than the metrics need."""
        needed = {CATALOGUE[metric].stage for metric in self.metrics}
        return ["prepare", "train", *(name for name in ("evaluate", "landscape") if name in needed)]

    def frozen(self) -> dict[str, Any]:
        """What is pre-registered: everything that decides a verdict, and nothing that only says how it is run."""
        arms: list[Mapping[str, Any]] = [{"name": arm.name, "changes": arm.changes} for arm in self.arms()]
        record = self.model_dump(mode="json", include={"name", "size", "question", "seeds", "metrics", "hypotheses"})
        tuning = None if self.tuning is None else self.tuning.model_dump(mode="json")
        base = self.base.model_dump(mode="json", exclude={"study", "seed", "device"})
        for name in ("source", "eval_source"):  # where a file lies decides nothing
            base["data"][name] = base["data"][name] and PurePath(base["data"][name]).name
        control = self.arm_name(self.control)
        return record | {
            "control": control,
            "arms": arms,
            "base": base,
            "tuning": tuning,
            "target_accuracy": self.target_accuracy,
        }
