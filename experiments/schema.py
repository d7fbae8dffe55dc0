"""The declaration of an experiment: a question, a base, factors with arms, a control, seeds, hypotheses, a budget.

A declaration is data. It is checked whole before anything runs: every arm is a re-validated change of the base, and
whatever does not fit is refused, naming the field.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from rmcore.config.base import Settings
from rmcore.config.pipeline import Changes, PipelineConfig, change_config
from rmcore.core.metrics import CELL_METRICS, CELL_STAGES

FILE_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".gz")
"""Endings of data files; a relative name without one may be of the hub, where `owner/` is part of it."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]{0,60}$")]
"""Part of names in MLflow, which allows no more in a tag or a metric."""
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.=,/-]{0,300}$")]
"""Longer than a level's: an arm of a grid is named by all of its levels."""
NOT_VARIED = {"seed": "name the replicates under seeds", "study": "it is the experiment's name"}
"""Settings that an experiment sets itself."""


class Factor(Settings):
    """One thing that is varied."""

    name: Name
    """Shown in the arms' names, for example `lr`."""
    levels: dict[Name, Changes] = Field(min_length=1)
    """Each level's changes of the base, by dotted setting: {"1e-4": {"train.lr": 1e-4}}."""

    @model_validator(mode="after")
    def _varies_what_may_vary(self) -> Self:
        for level, changes in self.levels.items():
            for setting in changes.keys() & NOT_VARIED.keys():
                raise ValueError(f"levels.{level}: {setting} is no factor: {NOT_VARIED[setting]}")
        return self

    def settings(self) -> set[str]:
        """All settings that a level changes."""
        return {setting for changes in self.levels.values() for setting in changes}


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
    arm: ArmName
    """The arm that the claim is about."""
    versus: ArmName | None = None
    """Arm that it is compared with; left out, the control."""
    direction: Literal["above", "below", "within"]
    """On which side of the threshold the claim puts the value. within: between minus the threshold and it, or of a
    ratio between one over it and it: that arm and versus are as good as equal."""
    threshold: float
    """In units of the metric; for a ratio a plain number."""

    @model_validator(mode="after")
    def _equality_has_a_width(self) -> Self:
        if self.direction == "within" and self.comparison == "level":
            raise ValueError("direction: within is of a difference or a ratio; a level lies above or below")
        if self.direction == "within" and self.threshold <= (1.0 if self.comparison == "ratio" else 0.0):
            raise ValueError(
                f"threshold: within {self.threshold:g} holds nothing; give the largest difference that does not matter "
                "(above 0), or of a ratio the largest factor (above 1)"
            )
        return self


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe: a change of the base."""

    name: str
    changes: Changes
    config: PipelineConfig
    merged: tuple[str, ...] = ()
    """Names of declared arms that turned out to be this one."""


class Experiment(Settings):
    """A pre-registered comparison of reward-model recipes."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    """Name on the command line and of the MLflow experiment."""
    size: str = Field(default="custom", pattern=r"^[a-z][a-z0-9_-]{0,20}$")
    """smoke, gold, small or paper of a shipped experiment; custom otherwise."""
    title: str = Field(min_length=3)
    """Heading of the report."""
    question: str = Field(min_length=10)
    """Question, in a sentence or two."""
    base: PipelineConfig
    """Settings that all arms share."""
    factors: tuple[Factor, ...] = Field(min_length=1)
    """Factors that are varied."""
    design: Literal["grid", "one_at_a_time"] = "grid"
    """grid: every combination of levels; one_at_a_time: the base (arm `base`), then each level alone."""
    control: ArmName
    """The arm that others are compared with."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(min_length=1)
    """Replicates of every arm: each seeds head, data order and split. No factor."""
    metrics: tuple[str, ...] = Field(min_length=1)
    """Metrics reported of each cell, the main one first: names of `rmcore.core.metrics.CELL_METRICS`."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """The claims that the experiment decides."""
    budget_minutes: float = Field(gt=0)
    """Longest expected time of what has to run; a longer plan is refused before it starts."""
    target_accuracy: float | None = Field(default=None, gt=0, lt=1)
    """Validation accuracy whose first crossing defines `steps_to_target` and `seconds_to_target`."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} repeats a seed, which would count one run twice")
        return self

    @model_validator(mode="after")
    def _factors_do_not_meet(self) -> Self:
        for first, second in combinations(self.factors, 2) if self.design == "grid" else ():
            for one, other in product(sorted(first.settings()), sorted(second.settings())):
                if one == other or one.startswith(f"{other}.") or other.startswith(f"{one}."):
                    raise ValueError(
                        f"factors: {first.name} changes {one} and {second.name} changes {other}, so in a combination "
                        "one of them would be lost; make one factor of the two, or vary them one_at_a_time"
                    )
        return self

    @model_validator(mode="after")
    def _metrics_are_known(self) -> Self:
        for position, metric in enumerate(self.metrics):
            if metric not in CELL_METRICS:
                raise ValueError(f"metrics.{position}: no metric {metric!r}; there are {', '.join(CELL_METRICS)}")
            if CELL_METRICS[metric].needs_target and self.target_accuracy is None:
                raise ValueError(f"metrics.{position}: {metric} needs target_accuracy, which is not set")
            if metric.startswith("eval/answers_"):
                for arm in self.arms():
                    if arm.config.evaluate.answers is None:
                        raise ValueError(
                            f"metrics.{position}: {metric} is of judged answers, and arm {arm.name!r} names no file of "
                            "them; set evaluate.answers"
                        )
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
            ValueError: a change names no setting or gives a config that is not allowed; names the arm.
        """
        named = self.grid() if self.design == "grid" else self._one_at_a_time()
        arms: list[Arm] = []
        for name, changes in named:
            if name in {arm.name for arm in arms}:
                raise ValueError(f"factors: two arms would be called {name!r}; rename a factor or a level")
            try:
                config = change_config(self.base, changes | {"study": self.name})
            except ValidationError as error:
                raise ValueError(f"arm {name!r}: {_first_problem(error)}") from error
            except ValueError as error:
                raise ValueError(f"arm {name!r}: {error}") from error
            arms.append(Arm(name, changes, config))
        return merge_equal(arms)

    def grid(self) -> Iterable[tuple[str, Changes]]:
        """Name and changes of every combination of levels."""
        for levels in product(*(factor.levels.items() for factor in self.factors)):
            if len(self.factors) == 1:
                name = levels[0][0]
            else:
                name = ", ".join(
                    f"{factor.name}={level}" for factor, (level, _) in zip(self.factors, levels, strict=True)
                )
            yield name, {setting: value for _, changes in levels for setting, value in changes.items()}

    def _one_at_a_time(self) -> Iterable[tuple[str, Changes]]:
        yield "base", {}
        for factor in self.factors:
            yield from ((f"{factor.name}={level}", changes) for level, changes in factor.levels.items())

    def arm_name(self, name: str) -> str:
        """The name that an arm goes by, `name` being its own or one that was merged into it."""
        return next(arm.name for arm in self.arms() if name in (arm.name, *arm.merged))

    def claims(self) -> list[dict[str, Any]]:
        """The hypotheses by the names that their arms go by."""
        return [
            claim.model_dump()
            | {"arm": self.arm_name(claim.arm), "versus": claim.versus and self.arm_name(claim.versus)}
            for claim in self.hypotheses
        ]

    def stages(self) -> list[str]:
        """The stages that the metrics need, in order; a cell runs those that they need, too."""
        needed = {"prepare", "train", *(CELL_METRICS[metric].stage for metric in self.metrics)}
        return [name for name in CELL_STAGES if name in needed]

    def frozen(self) -> dict[str, Any]:
        """Gather what is pre-registered: all that decides a verdict, and nothing that only says how it is run."""
        arms = [{"name": arm.name, "changes": _without_places(arm.changes)} for arm in self.arms()]
        record = self.model_dump(mode="json", include={"name", "size", "question", "seeds", "metrics", "hypotheses"})
        base = self.base.model_dump(mode="json", exclude={"study", "seed", "device"})
        for name in ("source", "eval_source"):
            base["data"][name] = _without_place(base["data"][name])
        base["evaluate"]["answers"] = _without_place(base["evaluate"]["answers"])
        control = self.arm_name(self.control)
        return record | {"control": control, "arms": arms, "base": base, "target_accuracy": self.target_accuracy}


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']} (given: {first['input']!r})"


def _without_places(changes: Changes) -> Changes:
    named = ("data.source", "data.eval_source", "evaluate.answers")
    return {name: _without_place(value) if name in named else value for name, value in changes.items()}


def _without_place(source: str | None) -> str | None:
    """The name of a file without its folder, which decides nothing; a name of the hub as it is."""
    if source is None or not (PurePath(source).is_absolute() or source.endswith(FILE_ENDINGS)):
        return source
    return PurePath(source).name


def merge_equal(arms: Sequence[Arm]) -> list[Arm]:
    """Keep the first of arms with equal configs; the others' names are noted on it."""
    kept: dict[str, Arm] = {}
    for arm in arms:
        text = arm.config.model_dump_json()
        first = kept.get(text)
        kept[text] = arm if first is None else replace(first, merged=(*first.merged, arm.name))
    return list(kept.values())


def changed_settings(base: BaseModel, config: BaseModel, prefix: str = "") -> Changes:
    """The settings in which `config` differs from `base`, by dotted name, with their new values."""
    found: Changes = {}
    for name in type(base).model_fields:
        before, after = getattr(base, name), getattr(config, name)
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            found |= changed_settings(before, after, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = after.model_dump() if isinstance(after, BaseModel) else after
    return found
