"""The parts of a declaration: factors with their levels, and hypotheses."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings
from rmcore.config.pipeline import Changes

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]{0,60}$")]
"""Part of names in MLflow, which allows no more in a tag or a metric."""
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.=,/-]{0,300}$")]
"""Longer than a level's: an arm of a grid is named by all of its levels."""
NOT_VARIED = {"seed": "name the replicates under seeds", "study": "it is the experiment's name"}
"""Settings that an experiment sets itself."""


class Declared(Settings):
    """A part of a declaration: a field that there is not is named together with the one that was meant."""

    @model_validator(mode="before")
    @classmethod
    def _fields_are_known(cls, given: Any) -> Any:
        for name in given if isinstance(given, Mapping) else ():
            near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
            if name not in cls.model_fields and near:
                raise ValueError(f"no field {name!r}; did you mean {near[0]!r}?")
        return given


class Factor(Declared):
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


class Hypothesis(Declared):
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
