"""Stage readiness: what labelled data tell of a reward model, before any policy is tried on it. Rungs 1 and 2.

The checks on labelled pairs decide. The original score is computed beside them and decides nothing (see
rmcore.policy.readiness.original_score).

Writes `readiness.json` and `summary.json`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rmcore.config.pipeline import ReadinessConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.evaluation.diagnosis import validation_gate
from rmcore.policy.readiness.original_score import RLReadinessScorer
from rmcore.policy.readiness.verdict import verdict_on_labels
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import ReadinessSettings


def run(settings: ReadinessSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Judge from the evaluation's metrics and the landscape's largest eigenvalue."""
    metrics = json.loads((upstream["evaluate"] / "metrics.json").read_text())["metrics"]
    spectrum = json.loads((upstream["landscape"] / "spectrum.json").read_text())
    test = {name: entry["value"] for name, entry in metrics["test"].items()}
    judged = judge(test, metrics["train"]["pairwise_accuracy"]["value"], spectrum["lambda_max"], settings.readiness)
    write_json(out / "readiness.json", judged)
    scores = {name: value for name, value in judged["readiness"].items() if name.endswith("_score")}
    shown = {f"ready/{name}": value for name, value in scores.items()}
    shown["ready/labels_passed"] = float(judged["verdict"]["status"] == "passes")
    write_json(out / "summary.json", {"metrics": shown})


def judge(
    test: dict[str, float | None], train_accuracy: float | None, lambda_max: float | None, config: ReadinessConfig
) -> dict[str, Any]:
    """Checks, verdict and the original score from point values.

    Args:
        test: held-out metrics by name, as from `evaluate_pairs`.
        train_accuracy: pairwise accuracy on training pairs, for the gap; None fails that check.
        lambda_max: largest eigenvalue of the loss Hessian.
        config: the weights of the original score.

    Returns:
        {"readiness": record of the original score, "gate": checks, "verdict": see rmcore.policy.readiness.verdict}.

    Raises:
        DataError: a quantity that the original score needs is undefined.
    """
    weights = {
        "accuracy": config.accuracy_weight,
        "calibration": config.calibration_weight,
        "stability": config.stability_weight,
        "landscape": config.landscape_weight,
    }
    accuracy, ece, variance = test["pairwise_accuracy"], test["ece_debiased"], test["pooled_reward_variance"]
    if accuracy is None or ece is None or variance is None or lambda_max is None:
        raise DataError(
            f"readiness needs pairwise_accuracy ({accuracy}), ece_debiased ({ece}), pooled_reward_variance "
            f"({variance}) and lambda_max ({lambda_max}), and one is undefined; evaluate on more pairs that are not "
            "all tied."
        )
    report = RLReadinessScorer(weights).compute_score(accuracy, ece, variance, lambda_max)
    gap = None if train_accuracy is None else train_accuracy - accuracy
    checks = validation_gate({**test, "train_test_gap": gap})
    return {
        "readiness": report.to_dict(),
        "gate": [asdict(check) for check in checks],
        "verdict": verdict_on_labels(checks, None),
    }
