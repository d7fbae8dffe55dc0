"""Stage readiness: whether a policy may be optimised against this model. The v1 score, the gate and the verdict.

The v1 score is the specification's, with known flaws (see rmcore.policy.readiness.readiness), so the verdict also asks
for the specification's gate: a model is ready only if all gate checks pass and v1 says ready.

Beside it stands what the model chooses among logged answers (`rmcore.policy.logged_answers`), where held-out prompts
have enough of them.

Writes `readiness.json`, `logged_answers.json` (null where there are none), with them a figure, and `summary.json`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from rmcore.config.pipeline import ReadinessConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.table import read_pairs
from rmcore.evaluation.diagnosis import GateCheck, validation_gate
from rmcore.policy.logged_answers import logged_answers, logged_table
from rmcore.policy.readiness.readiness import READY_ABOVE, RLReadinessScorer
from rmcore.reporting.figures.logged_answers import logged_answers_figure
from rmcore.reporting.figures.style import save
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
    shown["ready/gate_passed"] = float(judged["verdict"]["status"] == "ready")
    shown |= choose_among_logged(settings, upstream, out)
    write_json(out / "summary.json", {"metrics": shown})


def choose_among_logged(settings: ReadinessSettings, upstream: Upstream, out: Path) -> dict[str, Any]:
    """Write what the best of k among logged held-out answers does; returns its metrics, none where there are none."""
    rewards = pd.read_parquet(upstream["evaluate"] / "rewards.parquet")
    table = logged_table(read_pairs(upstream["prepare"] / "test.parquet"), rewards[rewards["split"] == "test"])
    found = logged_answers(table, num_resamples=settings.num_resamples, seed=settings.seed)
    write_json(out / "logged_answers.json", found)
    if found is None:
        return {}
    save(logged_answers_figure(found), out / "figures" / "logged_answers.png")
    names = ("win_rate", "gain")
    return {f"ready/logged_{name}_{row['k']}": row[name] for row in found["choices"] for name in names}


def judge(
    test: dict[str, float | None], train_accuracy: float | None, lambda_max: float | None, config: ReadinessConfig
) -> dict[str, Any]:
    """Score, gate and verdict from point values.

    Args:
        test: held-out metrics by name, as from `evaluate_pairs`.
        train_accuracy: pairwise accuracy on training pairs, for the gap; None fails that check.
        lambda_max: largest eigenvalue of the loss Hessian.
        config: the weights of the v1 score.

    Returns:
        {"readiness": v1 record, "gate": checks, "verdict": {"status", "headline", "reasons"}}.

    Raises:
        DataError: a quantity the v1 score needs is undefined.
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
    v1_ready = report.verdict == "ready"
    v1_text = f"readiness v1: {report.overall_score:.3f}, {'' if v1_ready else 'not '}above {READY_ABOVE:g}"
    checks.append(GateCheck("readiness_v1", report.overall_score, READY_ABOVE, v1_ready, v1_text))
    failed = [check.text for check in checks if not check.passed]
    status = "not_ready" if failed else "ready"
    headline = (
        f"Not ready: {len(failed)} of {len(checks)} checks failed"
        if failed
        else f"Ready: every gate check passed and readiness v1 is {report.overall_score:.2f}"
    )
    return {
        "readiness": report.to_dict(),
        "gate": [asdict(check) for check in checks],
        "verdict": {"status": status, "headline": headline, "reasons": failed},
    }
