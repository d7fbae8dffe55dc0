"""The record of one pipeline run that the report renders: plain, JSON-ready types.

Shares are fractions (0.712), not percentages; undefined numbers are None, never NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict


class Verdict(TypedDict):
    """A judgement of a reward model with its evidence level; see rmcore.readiness.verdict."""

    rung: Literal[1, 2, 3, 4]
    """Evidence level: labelled pairs, logged answers, samples of the policy, an optimised policy."""
    evidence: str
    status: Literal["passes", "fails", "ready", "not_ready", "gained", "lost", "unclear"]
    """The first two at levels 1 and 2, the next two at level 3, the others at level 4."""
    headline: str
    """One plain sentence."""
    reasons: Sequence[str]
    """Findings that speak against the reward model."""


class NextRung(TypedDict):
    """The next step: what it gives, the command, and its cost."""

    rung: int
    """That of the evidence it leads to: the verdict's own where it mends what speaks against the model."""
    evidence: str
    command: str
    cost: str
    so_far: NotRequired[str]
    """Which of the runs on the same held-out prompts is best, where there are several."""


class Check(TypedDict):
    """One condition of the gate."""

    name: str
    value: float | None
    threshold: float
    passed: bool
    text: str


class Interval(TypedDict):
    """One number with its 95 % interval."""

    value: float | None
    ci_low: float | None
    ci_high: float | None


class Metric(Interval):
    """A measured number, and of how many."""

    num: int
    reason: str | None
    """Why value or interval is missing."""


class ContextItem(Interval):
    """One row of the accuracy figure, see rmcore.reporting.figures.pairs."""

    name: str
    kind: Literal["model", "reference", "subset", "ood"]


class Readiness(TypedDict):
    """The original score (v1) and its parts; no verdict follows from it."""

    version: str
    overall_score: float
    accuracy_score: float
    calibration_score: float
    stability_score: float
    landscape_score: float | None
    """None where no curvature was measured."""
    band: str
    recommendations: Sequence[str]


class PolicyResults(TypedDict):
    """Measurements on a policy's samples: records of the stages samples, overoptimization and readiness_v2."""

    sampling: Mapping[str, Any]
    overoptimization: Mapping[str, Any]
    readiness: Mapping[str, Any]


class Training(TypedDict):
    """How training went; `best_metric` and `best_value` are None where no step was chosen."""

    steps: int
    best_step: int
    best_metric: str | None
    best_value: float | None
    num_pairs: int
    """Pairs that the steps saw, with repetition."""
    num_distinct: int
    """Pairs that it was trained on."""
    num_parameters: int
    max_positions: NotRequired[int | None]
    """Most tokens of a side that the model has positions for; None: no limit."""
    stop_reason: str
    truncation: Mapping[str, Any]
    """Counts of shortened texts, possibly by split."""
    pairs_per_second: float
    wall_seconds: float


class Mistake(TypedDict):
    """A held-out pair that the model ranks the wrong way round."""

    pair_id: str
    prompt: str
    chosen: str
    rejected: str
    margin: float


class Symptom(TypedDict):
    """One finding about the training history."""

    symptom: str
    diagnosis: str
    advice: str


class StageResult(TypedDict):
    """One artifact of the run; the seconds are those that it took when it was made, None if unknown."""

    name: str
    key: str
    path: str
    cached: bool
    wall_seconds: float | None
    device_seconds: float | None
    """The same of a stage that holds the device while it runs, else 0."""


class Results(TypedDict):
    """All that a run found; under the name of each capability's stage also its record, None where it did not run."""

    study: str
    seed: int
    created: str
    """ISO 8601."""
    run_name: str
    verdict: Verdict
    next_rung: NextRung | None
    """The step that would raise the verdict; None where nothing would."""
    gate: Sequence[Check]
    """The checks of the highest level that has some."""
    label_gate: Sequence[Check]
    """The checks on labelled pairs, which decide where no policy's samples were judged."""
    metrics: Mapping[str, Metric]
    """Test split, names as in rmcore.evaluation."""
    ood_metrics: Mapping[str, Metric] | None
    """Out-of-distribution split, where there is one."""
    context: Sequence[ContextItem]
    readiness: Readiness
    """The original score: no verdict, and no part of one."""
    logged: Mapping[str, Any] | None
    """Choosing among logged answers (`rmcore.readiness.logged_answers`), where held-out prompts have enough of them."""
    observations: Mapping[str, Any] | None
    """Held-out judgements of any kind (`MeasuredJudgements` of the stage evaluate); None where all are strict pairs."""
    policy: PolicyResults | None
    """Measurements on judged samples of a policy."""
    rlhf: Mapping[str, Any] | None
    """Record of the stage grpo (`rmcore.stages.grpo`), where a policy was trained."""
    training: Training
    audit: Mapping[str, Any]
    """Any nesting of dicts, lists and scalars."""
    mistakes: Sequence[Mistake]
    """Most confident first."""
    diagnoses: Sequence[Symptom]
    stages: Sequence[StageResult]
    config: Mapping[str, Any]
    environment: Mapping[str, str]
