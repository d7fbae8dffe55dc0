"""Stage readiness: what labelled data tell of a reward model, before any policy is tried on it. Rungs 1 and 2.

The checks on labelled pairs decide, and what the model chooses among logged answers (`rmcore.readiness.logged_answers`)
where held-out prompts have enough of them. The original score is computed next to them and decides nothing (see
rmcore.readiness.original_score).

Writes `readiness.json`, `logged_answers.json` (null where there are none), with them a figure, and `summary.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.table import read_pairs
from rmcore.evaluation.diagnosis import OVER_BASELINE, baseline_check, validation_gate
from rmcore.readiness.judged_answers import ANSWERS_FILE, choose_among_judged, stored_judged_answers
from rmcore.readiness.logged_answers import logged_answers, logged_table
from rmcore.readiness.original_score import RLReadinessScorer
from rmcore.readiness.verdict import verdict_on_labels
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.logged import logged_answers_figure
from rmcore.stages.stages import CURVATURE, STAGES, ReadinessStage


def run(settings: ReadinessStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Judge from the evaluation's metrics, and compute the original score."""
    metrics = json.loads((settings.evaluated.folder / "metrics.json").read_text())["metrics"]
    lambda_max = largest_eigenvalue(settings)
    logged = choose_among_logged(settings, report)
    write_json(out / "logged_answers.json", logged)
    train_accuracy = metrics["train"]["pairwise_accuracy"]["value"]
    judged = judge(metrics["test"], train_accuracy, lambda_max, logged)
    write_json(out / "readiness.json", judged)
    scores = {name: value for name, value in judged["readiness"].items() if name.endswith("_score")}
    shown = {f"ready/{name}": value for name, value in scores.items() if value is not None}
    shown["ready/labels_passed"] = float(judged["verdict"]["status"] == "passes")
    if logged is not None:
        save(logged_answers_figure(logged), out / "figures" / "logged_answers.png")
        names = ("win_rate", "gain")
        shown |= {f"ready/logged_{name}_{row['k']}": row[name] for row in logged["choices"] for name in names}
    write_json(out / "summary.json", {"metrics": shown})


def largest_eigenvalue(settings: ReadinessStage) -> float | None:
    """Read the largest eigenvalue of the loss Hessian; None where it is undefined, or was not measured."""
    measured = settings.curvature
    if measured is None:
        return None
    value: float | None = json.loads((measured.folder / STAGES[measured.stage].outcome[0]).read_text())[CURVATURE]
    return value


def choose_among_logged(settings: ReadinessStage, report: Report) -> dict[str, Any] | None:
    """Measure the best of k among judged answers, else those of held-out pairs; None where no prompt has enough."""
    evaluated = settings.evaluated.folder
    if (evaluated / ANSWERS_FILE).is_file():
        given, of_model = stored_judged_answers(evaluated)
        return choose_among_judged(
            given, of_model, num_resamples=settings.num_resamples, seed=settings.seed, report=report
        )
    rewards = pd.read_parquet(evaluated / "rewards.parquet")
    table = logged_table(read_pairs(settings.prepared.folder / "test.parquet"), rewards[rewards["split"] == "test"])
    return logged_answers(table, num_resamples=settings.num_resamples, seed=settings.seed, report=report)


def judge(
    test: Mapping[str, Mapping[str, Any]],
    train_accuracy: float | None,
    lambda_max: float | None,
    logged: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Checks, verdict and the original score.

    Args:
        test: held-out metrics by name with their intervals, as records of `evaluate_pairs`.
        train_accuracy: pairwise accuracy on training pairs, for the gap; None leaves that check unmeasured.
        lambda_max: largest eigenvalue of the loss Hessian; None: not measured, and the original score does without.
        logged: record of `rmcore.readiness.logged_answers`, where there is one.

    Returns:
        {"readiness": record of the original score, "gate": checks, "verdict": see
        rmcore.readiness.verdict}.

    Raises:
        DataError: a quantity that the original score needs is undefined.
    """
    needed = ("pairwise_accuracy", "ece_debiased", "pooled_reward_variance")
    accuracy, ece, variance = (test[name]["value"] for name in needed)
    if accuracy is None or ece is None or variance is None:
        raise DataError(
            f"readiness needs pairwise_accuracy ({accuracy}), ece_debiased ({ece}) and pooled_reward_variance "
            f"({variance}), and one is undefined; evaluate on more pairs that are not all tied."
        )
    original = RLReadinessScorer().compute_score(accuracy, ece, variance, lambda_max).to_dict()
    over_baseline = test[OVER_BASELINE]
    checks = [baseline_check(over_baseline), *validation_gate(test, train_accuracy)]
    return {
        "readiness": original,
        "gate": [asdict(check) for check in checks],
        "verdict": verdict_on_labels(checks, logged, over_baseline),
    }
