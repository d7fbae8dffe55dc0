"""The score of a trial of an experiment's arm, and the best of its trials."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rmcore.core.files import read_json_lines
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.experiment_schema import Trial, Tuned


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
