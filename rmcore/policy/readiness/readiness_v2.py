"""Readiness v2: whether this policy may be optimised against this reward model, up to a planned KL.

Judged on the policy's own samples instead of on labelled pairs alone. Conditions, each on one end of a 95 %
interval, decide, and none can be bought back by another. Beside them stands a probability that the gain at the planned
KL is worth while. It decides nothing: it was fitted on the small models of the gold world (docs/readiness.md) at one
plan, and the gain at the plan that is meant is measured here. For the same reason the checks on labelled pairs decide
nothing on this rung: a model that only its gap between training and held-out accuracy refused gained 0.95 standard
deviations of gold (benchmarks/verdict_vs_truth.py).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal

from rmcore.config.readiness import ReadinessConfig
from rmcore.evaluation.diagnosis import GateCheck
from rmcore.policy.readiness.verdict import verdict_on_samples

FIT_FILE = "readiness_fit.json"
OPTIMIZERS = {"best_of_n": "best-of-n", "kl_optimum": "RL with a KL penalty"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: an end of the interval must be on the right side of `threshold`."""

    part: str
    side: Literal["at_least", "at_most"]
    threshold: float
    meaning: str
    end: Literal["low", "high"]
    """Which one: that which speaks against the model, so that it has to be shown; or, where a model is refused only for
    what is shown of it, that which speaks for it."""


def conditions(config: ReadinessConfig) -> tuple[Condition, ...]:
    """The conditions. Their thresholds are defaults that have to be defended, not findings.

    The gain at the plan has to be shown. That the peak lies beyond the plan has not: the fit of a peak is so uncertain
    that asking for it refused reward models whose gain at the plan is 0.7 to 0.9 standard deviations
    (benchmarks/RESULTS.md), and in the first study of readiness it let through 13 of 110, of which 23 % gained. A model
    is refused where the peak is shown to lie before the plan: one that stops earlier gains more and costs nothing.
    """
    gain, headroom = f"gold gain at the planned {config.planned_kl:g} nats", "distance to the gold reward's peak"
    return (
        Condition("on_policy_accuracy", "at_least", 0.6, "accuracy on pairs of the policy's own samples", "low"),
        Condition("win_rate_16", "at_least", 0.55, "how often the best of 16 beats another sample", "low"),
        Condition("planned_gain", "at_least", config.min_gain, gain, "low"),
        Condition("headroom", "at_least", 1.0, f"{headroom}, over the planned distance", "high"),
        Condition("hard_accuracy", "at_least", 0.5, "accuracy where the shorter sample is the better one", "low"),
        Condition("ece_tempered_debiased", "at_most", 0.15, "calibration error after temperature", "high"),
    )


def judge_v2(parts: Mapping[str, Mapping[str, Any]], config: ReadinessConfig, judge: str) -> dict[str, Any]:
    """Checks, probability and verdict.

    Args:
        parts: measurements by name, {"value", "ci_low", "ci_high", ...}; those of `conditions`, and what is shown
            beside.
        config: plan and thresholds.
        judge: who judged the samples, as people read it.

    Returns:
        {"readiness": {"version", "parts", "probability", "plan", "judge"}, "gate": checks, "verdict": see
        rmcore.policy.readiness.verdict}; JSON-ready.
    """
    checks = [_check(condition, parts.get(condition.part)) for condition in conditions(config)]
    fit = shipped_fit()
    plan = f"a KL of {config.planned_kl:g} nats by {OPTIMIZERS[config.planned_optimizer]}"
    return {
        "readiness": {
            "version": "v2",
            "parts": {name: dict(value) for name, value in parts.items()},
            "probability": probability(parts, fit),
            "score_parts": fit["features"],
            "probability_of": {"gain": fit["population"]["min_gain"], "kl": fit["planned_kl"]},
            "plan": {"optimizer": config.planned_optimizer, "kl": config.planned_kl, "min_gain": config.min_gain},
            "judge": judge,
        },
        "gate": [asdict(check) for check in checks],
        "verdict": verdict_on_samples(checks, plan=plan, judge=judge),
    }


def is_on_side(values: Any, side: str, threshold: float) -> Any:
    """Whether a number, or each of an array, lies on the wanted side of a threshold, which is itself on it."""
    return values >= threshold if side == "at_least" else values <= threshold


def _check(condition: Condition, part: Mapping[str, Any] | None) -> GateCheck:
    """Passed only where the end of the interval is known and on the right side."""
    wants_more = condition.side == "at_least"
    bound = None if part is None else part[f"ci_{condition.end}"]
    passed = bound is not None and is_on_side(bound, condition.side, condition.threshold)
    sign = "at least" if wants_more else "at most"
    if bound is None:
        why = "it was not measured" if part is None else part.get("reason") or "it has no interval"
        text = f"{condition.meaning}: {why}; wanted {sign} {condition.threshold:g}"
    else:
        end = {"low": "lower", "high": "upper"}[condition.end]
        text = f"{condition.meaning}: {end} end {bound:.3g}, wanted {sign} {condition.threshold:g}"
    return GateCheck(condition.part, bound, condition.threshold, passed, text)


def shipped_fit() -> dict[str, Any]:
    """The fit that the validation study left: features, their means, coefficients, what it is from."""
    found: dict[str, Any] = json.loads(
        (resources.files("rmcore.policy.readiness") / FIT_FILE).read_text(encoding="utf-8")
    )
    return found


def probability(parts: Mapping[str, Mapping[str, Any]], fit: Mapping[str, Any]) -> float | None:
    """P(gain at the planned KL >= min_gain) of the logistic fit, None where one of its parts has no value."""
    values = [parts.get(name, {}).get("value") for name in fit["features"]]
    if any(value is None for value in values):
        return None
    logit = fit["intercept"] + sum(
        coefficient * (value - mean)
        for coefficient, value, mean in zip(fit["coefficients"], values, fit["means"], strict=True)
    )
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, logit))))
