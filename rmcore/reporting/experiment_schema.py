"""The record of one experiment that its report renders: plain, JSON-ready types.

Shares are fractions (0.712), not percentages; undefined numbers are None, never NaN. Metric names are those of
`rmcore.core.metrics`, for example `eval/test_pairwise_accuracy`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from rmcore.core.metric_spec import Unit
from rmcore.reporting.schema import Check, Interval, Metric, Symptom


class MetricInfo(TypedDict):
    """Label, unit and direction of a metric."""

    label: str
    """In words, without unit: `held-out pairwise accuracy`."""
    unit: Unit
    higher_is_better: bool | None
    """None: neither."""


class ArmResult(TypedDict):
    """One arm over its seeds."""

    name: str
    is_control: bool
    changes: Mapping[str, Any]
    """Dotted settings by which it differs from the base."""
    merged: Sequence[str]
    """Names of declared arms that turned out to be this same one."""
    metrics: Mapping[str, Metric]
    """Mean over seeds with its interval; `num` counts seeds."""
    bands: Mapping[str, str]
    """Bands (failure, acceptable, success) of its mean: {"eval accuracy": "success", ...}."""


class CellResult(TypedDict):
    """One arm under one seed."""

    arm: str
    seed: int
    status: Literal["cached", "computed", "failed"]
    error: str | None
    """Why it failed; None where it did not."""
    key: str | None
    """Digest of all its artifacts' keys."""
    metrics: Mapping[str, float | None]
    device_seconds: float | None
    """Seconds that its artifacts held a device when they were made; those shared with other cells count for each."""
    diagnoses: Sequence[Symptom]
    gate: Sequence[Check]
    paths: Mapping[str, str]
    """Folder of each stage's artifact."""


class HypothesisResult(Interval):
    """One pre-registered claim and what became of it."""

    name: str
    claim: str
    """In one sentence, as it was declared."""
    metric: str
    comparison: Literal["difference", "ratio", "level"]
    """Whether the claim is about arm minus versus, arm over versus, or the arm alone."""
    arm: str
    versus: str | None
    direction: Literal["above", "below", "within"]
    """within: between minus the threshold and the threshold (of a ratio: between one over it and it)."""
    threshold: float
    num_seeds: int
    num_prompts: int | None
    """None: the metric has no prompts, only seeds (a time, a size)."""
    p: float | None
    """Two-sided, of value = threshold, by the same method as the interval."""
    p_holm: float | None
    """Holm's adjustment over all hypotheses of the experiment."""
    smallest_detectable: float | None
    """Distance from the threshold that this matrix would have seen with 80 % power."""
    verdict: Literal["supported", "refuted", "inconclusive"]
    reason: str
    """One sentence: why this verdict."""
    method: str
    """How the interval was made."""
    condition: str | None
    """Words that follow the ends of the interval: what it holds under, "if no training collapses"."""


class Registration(TypedDict):
    """The hypotheses as they were frozen before the first cell ran."""

    hash: str
    """64 hex digits."""
    number: int
    """1 for the first registration of this experiment and size."""
    frozen_at: str
    """ISO time with zone."""
    changes: Sequence[str]
    """Differences from the registration before, one line each; empty for the first."""
    path: str


class Cost(TypedDict):
    """Time that the matrix took and was expected to take, and how many of its cells ran."""

    estimated_seconds: float | None
    """Expected time of the cells that were to run, before they ran; None: no throughput was known."""
    measured_seconds: float
    """Wall seconds of all artifacts of all cells, whenever they were made; a shared artifact counts once."""
    device_seconds: float
    """Those of them that held a device."""
    run_seconds: float
    """Wall seconds of this run."""
    num_computed: int
    num_cached: int
    num_failed: int


class CurveData(TypedDict):
    """Learning curve of one cell: points of one metric."""

    arm: str
    seed: int
    steps: Sequence[int]
    values: Sequence[float]


class ExperimentResults(TypedDict):
    """Everything a report shows of one experiment."""

    name: str
    size: str
    title: str
    question: str
    created: str
    """ISO time with zone."""
    control: str
    seeds: Sequence[int]
    metrics: Mapping[str, MetricInfo]
    """The reported metrics, the first one being the main one."""
    registration: Registration
    hypotheses: Sequence[HypothesisResult]
    arms: Sequence[ArmResult]
    """In declared order."""
    cells: Sequence[CellResult]
    curves: Mapping[str, Sequence[CurveData]]
    """By metric: eval/pairwise_accuracy, train/loss."""
    notes: Sequence[str]
    """Facts that a reader must know: merged arms, failed cells, missing seeds."""
    cost: Cost
    command: str
    """That runs it again."""
    base: Mapping[str, Any]
    """The base config."""
    environment: Mapping[str, str]
    mlflow_url: str | None
