"""The record of a search as reports show it: plain values, JSON-ready."""

from typing import Any, Literal, TypedDict

from rmcore.reporting.schema import Metric

FEWEST_FOR_IMPORTANCE = 10
"""Complete trials below which a forest over the settings says nothing."""


class TrialRow(TypedDict):
    """One trial."""

    number: int
    state: Literal["complete", "pruned", "failed", "running"]
    settings: dict[str, Any]
    """Values that it ran under, of the settings that are searched."""
    values: list[float]
    """The objective at the end of each rung that it came to."""
    shares: list[float]
    """Share of its training that each of these rungs ends at."""
    seconds: float
    train_seconds: float
    why: str
    """Why it was given up or failed."""


class ArmRow(TypedDict):
    """The winner or the defaults, trained anew with fresh seeds."""

    trial: int
    settings: dict[str, Any]
    selected: float
    """Validation score of the trial, by which it was chosen."""
    fresh: Metric
    """Mean validation score of the fresh seeds."""
    fresh_values: list[float]
    test: Metric
    """Mean test score of the fresh seeds."""
    test_values: list[float]
    optimism: float
    """Selected minus fresh, turned so that above zero flatters."""
    train_seconds: float
    """Mean over the fresh seeds."""


class Cost(TypedDict):
    """Cost of a search in device time, computed or from the store."""

    search_seconds: float
    confirmation_seconds: float
    device_seconds: float
    """Both."""
    price_per_hour: float | None
    """Price of a device; None where it was not set."""


class TuningResults(TypedDict):
    """Everything that a search found."""

    name: str
    study: str
    created: str
    headline: str
    """The verdict in one sentence."""
    is_better: bool
    """Whether the winner is better than the defaults by an interval that excludes zero."""
    objective: str
    label: str
    definition: str
    unit: str
    higher_is_better: bool
    model: str
    data: str
    num_train: int
    num_validation: int
    num_test_prompts: int
    seed: int
    """Seed of the trials."""
    seeds: list[int]
    """Fresh seeds of the confirmation."""
    space: dict[str, Any]
    """As a space file has it."""
    trials: list[TrialRow]
    winner: ArmRow
    defaults: ArmRow
    difference: Metric
    """Winner minus defaults on the test pairs, turned so that above zero is better."""
    method: str
    """How its interval was made."""
    importance: dict[str, float] | None
    """Share of the spread explained by each setting; None: too few trials."""
    notes: list[str]
    cost: Cost
    recipe: str
    """Path of the recipe."""
