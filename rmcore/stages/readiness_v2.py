"""Stage readiness_v2: the verdict where a policy is given, from its samples.

Writes `readiness.json` and `summary.json`.
"""

import json
from pathlib import Path
from typing import Any

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.policy.judge import audited
from rmcore.readiness.readiness_v2 import Unseen, judge_v2
from rmcore.stages.stages import ReadinessV2Stage

FROM_PAIRS = ("pairwise_accuracy", "length_matched_accuracy", "ece_tempered_debiased")


def run(settings: ReadinessV2Stage, out: Path, tracker: Tracker, report: Report) -> None:
    """Put the parts together and judge."""
    optimized = json.loads((settings.overoptimization.folder / "overoptimization.json").read_text())
    metrics = json.loads((settings.evaluated.folder / "metrics.json").read_text())["metrics"]["test"]
    planned = settings.readiness.planned_optimizer
    curve = next((one for one in optimized.get("curves", []) if one["method"] == planned), None)
    plan = None if curve is None else curve["plan"]
    by_length = optimized.get("by_length", {}).get(planned, {})
    parts: dict[str, Any] = optimized.get("parts", {}) | by_length
    if plan is not None:
        parts |= {"planned_gain": plan["gain"], "planned_fall": plan["fall"]}
    parts |= {name: metrics[name] for name in FROM_PAIRS if name in metrics}
    judged = judge_v2(
        parts,
        settings.readiness,
        optimized["judge"],
        num_telling=0 if plan is None else plan["num_telling"],
        reached=None if plan is None else plan["reached"],
        unseen=None
        if curve is None or plan is None
        else Unseen(
            optimized["num_unjudged_prompts"] + plan["num_short"],
            curve["num_prompts"],
            plan["worst"],
            min(optimized["num_chosen_unjudged"], curve["num_prompts"]),
        ),
    )
    judged["verdict"]["reasons"] = [*judged["verdict"]["reasons"], *optimized["left_out"]]
    asked = settings.judge, settings.judging
    judged["verdict"] = audited(judged["verdict"], optimized["judge"], *asked, by_length=by_length)
    write_json(out / "readiness.json", judged)
    shown = {"ready/gate_passed": float(judged["verdict"]["status"] == "ready")}
    write_json(out / "summary.json", {"metrics": shown})
