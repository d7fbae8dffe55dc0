"""The score of a trial, of an experiment's arm or of a search; what the winner of a search is worth."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rmcore.core.files import read_json_lines
from rmcore.core.metrics import METRICS, MetricSpec
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.experiment_schema import HypothesisResult, Trial, Tuned
from rmcore.study.analysis import Cells, judge_hypotheses

Objective = Literal["accuracy", "loss"]
"""The value that a search compares on the validation pairs."""
OBJECTIVES: dict[Objective, MetricSpec] = {"accuracy": METRICS["pairwise_accuracy"], "loss": METRICS["loss"]}
WINNER, DEFAULTS = "winner", "defaults"
WHY = "why"
"""Attribute of a trial that failed: the reason."""


def trial_score(training: Path, metric: str) -> float | None:
    """The best validation value of a finished training; None if it never had a finite one.

    Args:
        training: artifact of the train stage.
        metric: eval/loss, of which less is better, or eval/pairwise_accuracy.
    """
    values = [row["metrics"].get(metric) for row in read_json_lines(training / METRICS_FILE)]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return _best(metric, finite) if finite else None


def choose(
    setting: str, bounds: tuple[float, float], metric: str, trials: Mapping[float, float | None]
) -> Tuned | None:
    """The best of the trials, of equals the smaller value; None if none has a score.

    Args:
        setting: what was tuned.
        bounds: the declared range.
        metric: what the scores are.
        trials: score by value; None: that trial failed.
    """
    scored = {value: score for value, score in sorted(trials.items()) if score is not None}
    if not scored:
        return None
    best = _best(metric, list(scored.values()))
    chosen = next(value for value, score in scored.items() if score == best)
    listed: list[Trial] = [{"value": value, "score": score} for value, score in sorted(trials.items())]
    return {
        "setting": setting,
        "low": bounds[0],
        "high": bounds[1],
        "metric": metric,
        "trials": listed,
        "chosen": chosen,
        "at_edge": len(trials) > 1 and chosen in (min(trials), max(trials)),
    }


def _best(metric: str, values: Sequence[float]) -> float:
    return min(values) if metric == "eval/loss" else max(values)


def compare(objective: Objective, cells: Cells, seeds: list[int]) -> HypothesisResult:
    """Judge that the winner is better than the defaults on the test pairs, by the rules of an experiment's claims.

    Args:
        objective: what is compared.
        cells: winner and defaults under each fresh seed; differences are paired by seed and by test prompt.
        seeds: the fresh seeds.
    """
    spec = OBJECTIVES[objective]
    claim = {
        "name": "confirmation",
        "claim": "the winner is better than the defaults",
        "metric": spec.cell_name,
        "comparison": "difference",
        "arm": WINNER,
        "versus": DEFAULTS,
        "direction": "above" if spec.better == "higher" else "below",
        "threshold": 0.0,
    }
    [result] = judge_hypotheses([claim], cells, seeds, control=DEFAULTS).results
    return result


def verdict(objective: Objective, result: HypothesisResult | None) -> str:
    """Say in one sentence whether the winner is worth using; None: the winner is the defaults."""
    if result is None:
        return "No trial was better than the defaults on the validation pairs: keep the defaults."
    spec, low, high = OBJECTIVES[objective], result["ci_low"], result["ci_high"]
    scale, word, digits = (100, "points", 1) if spec.unit == "share" else (1, "nats", 3)

    def text(value: float | None) -> str:
        return "unknown" if value is None else f"{scale * value:+.{digits}f}"

    bounds = f"no interval: {result['reason']}" if low is None else f"{text(low)}, {text(high)}"
    difference = f"{text(result['value'])} {word} [{bounds}] of test {spec.label}"
    if result["verdict"] == "supported":
        return f"Better than the defaults by {difference}."
    is_worse = result["verdict"] == "refuted"
    found = "Worse than the defaults" if is_worse else "Not shown to be better than the defaults"
    return f"{found}: keep the defaults. The difference is {difference}."
