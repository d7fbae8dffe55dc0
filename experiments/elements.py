"""The parts of a declaration: factors with their levels, hypotheses, tuning."""

import difflib
import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rmcore.config.base import Settings
from rmcore.config.changes import Changes

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


MOST_WIDENINGS = 2
"""Times that an arm's range is continued on a side where its best trial is the last one."""


class Tuning(Declared):
    """Tune one setting of each arm before its cells run, with as many trials for each."""

    setting: str = "train.lr"
    """Dotted name of the setting."""
    trials: int = Field(default=3, ge=1, le=64)
    """Trials for each arm."""
    ranges: dict[ArmName, tuple[float, float]] = Field(min_length=1)
    """Log-uniform range of each arm that is tuned; arms without a range keep what they declare."""
    metric: Literal["eval/loss", "eval/pairwise_accuracy"] = "eval/loss"
    """Metric that a trial is judged by: its best validation value. The loss separates trials that accuracy cannot."""

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Self:
        for arm, (low, high) in self.ranges.items():
            if not 0 < low < high:
                raise ValueError(f"ranges.{arm}: {low:g} to {high:g} is no log-uniform range; write 0 < low < high")
        return self

    def values(self, arm: str) -> list[float]:
        """The trials of an arm, rising: log-uniform over its range, one in each of `trials` equal parts of it.

        Fixed by the declaration alone, to three digits or as many as keep a value in its part; one part each, so that
        few trials cannot fall together.
        """
        low, high = self.ranges[arm]
        return self._one_in_each(low, high, self.trials, f"{self.setting} {arm} {self.trials}")

    def beyond(self, arm: str, tried: Collection[float], best: float) -> list[float]:
        """The trials to add where the best one is the first or the last: the optimum may lie outside.

        Half as many parts of the same width follow on that side, at most `MOST_WIDENINGS` times. With fewer than three
        trials the best one is always at an edge, which says nothing.

        Args:
            arm: which one.
            tried: all values so far.
            best: the best of them.

        Returns:
            More values, fixed by these alone; none where the best lies inside, or the range was widened often enough.
        """
        low, high = self.ranges[arm]
        added = math.ceil(self.trials / 2)
        above, below = sum(value >= high for value in tried), sum(value < low for value in tried)
        is_inside = best not in (min(tried), max(tried))
        if self.trials < 3 or is_inside or (above + below) // added >= MOST_WIDENINGS:
            return []
        part = (high / low) ** (1 / self.trials)
        start = high * part**above if best == max(tried) else low / part ** (below + added)
        named = f"{self.setting} {arm} {self.trials} {above} {below} {best == max(tried)}"
        return self._one_in_each(start, start * part**added, added, named)

    def _one_in_each(self, low: float, high: float, parts: int, named: str) -> list[float]:
        digest = hashlib.sha256(named.encode()).digest()
        shares = (np.arange(parts) + np.random.default_rng(list(digest)).random(parts)) / parts
        ends = [low, *(low * (high / low) ** (part / parts) for part in range(1, parts)), high]
        return [
            _rounded(low * (high / low) ** float(share), ends[part], ends[part + 1])
            for part, share in enumerate(shares)
        ]


def _rounded(value: float, low: float, high: float) -> float:
    """The fewest digits, from three on, that stay within low <= value < high."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(3, 17))
    return next((rounded for rounded in candidates if low <= rounded < high), value)
