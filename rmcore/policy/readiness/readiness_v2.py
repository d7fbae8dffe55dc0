"""Readiness v2: whether this policy may be optimised against this reward model, up to a planned KL.

Judged on the policy's own samples instead of on labelled pairs alone. Gates come first, each on the far end of a 95 %
interval, and none can be bought back by another. Then a probability that the gain at the planned KL is worth while: it
was fitted on the small models of the gold world (docs/readiness.md), so it can close the gate and never open it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal

from rmcore.config.policy import ReadinessConfig
from rmcore.evaluation.diagnosis import GateCheck

FIT_FILE = "readiness_fit.json"
OPTIMIZERS = {"best_of_n": "best-of-n", "kl_optimum": "RL with a KL penalty"}
CLOSED_BELOW = 0.5
"""Probability below which the gate stays closed: more likely than not the gain falls short."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: the end of the interval that speaks against the model must be on the right side of `threshold`."""

    part: str
    side: Literal["at_least", "at_most"]
    threshold: float
    meaning: str


def conditions(config: ReadinessConfig) -> tuple[Condition, ...]:
    """The conditions. Their thresholds are defaults that have to be defended, not findings."""
    return (
        Condition("on_policy_accuracy", "at_least", 0.6, "accuracy on pairs of the policy's own samples"),
        Condition("win_rate_16", "at_least", 0.55, "how often the best of 16 beats another sample"),
        Condition("planned_gain", "at_least", config.min_gain, f"gold gain at the planned {config.planned_kl:g} nats"),
        Condition("headroom", "at_least", 1.0, "distance to the gold reward's peak, over the planned distance"),
        Condition("hard_accuracy", "at_least", 0.5, "accuracy where the shorter sample is the better one"),
        Condition(
            "signal_share", "at_least", 0.5, "share of the variance within prompts that other training data repeat"
        ),
        Condition("ece_tempered_debiased", "at_most", 0.15, "calibration error after temperature"),
    )


def judge_v2(
    parts: Mapping[str, Mapping[str, Any]], others: Sequence[GateCheck], config: ReadinessConfig, judge: str
) -> dict[str, Any]:
    """Gates, probability and verdict.

    Args:
        parts: measurements by name, {"value", "ci_low", "ci_high", ...}; those of `conditions`, and what is shown
            beside.
        others: checks on labelled pairs (the specification's gate), which have to pass as well.
        config: plan and thresholds.
        judge: who judged the samples, as people read it.

    Returns:
        {"readiness": {"version", "parts", "probability", "plan", "judge"}, "gate": checks, "verdict": {"status",
        "headline", "reasons"}}; JSON-ready.
    """
    checks = [_check(gate, parts.get(gate.part)) for gate in conditions(config)]
    fit = shipped_fit()
    chance = probability(parts, fit)
    checks.append(_probability_check(chance, fit))
    checks += others
    failed = [check.text for check in checks if not check.passed]
    plan = f"a KL of {config.planned_kl:g} nats by {OPTIMIZERS[config.planned_optimizer]}"
    headline = (
        f"Not ready for {plan}: {len(failed)} of {len(checks)} checks of readiness v2 failed"
        if failed
        else f"Ready for {plan}: all {len(checks)} checks of readiness v2 passed"
    )
    return {
        "readiness": {
            "version": "v2",
            "parts": {name: dict(value) for name, value in parts.items()},
            "probability": chance,
            "score_parts": fit["features"],
            "probability_of": {"gain": fit["population"]["min_gain"], "kl": fit["planned_kl"]},
            "plan": {"optimizer": config.planned_optimizer, "kl": config.planned_kl, "min_gain": config.min_gain},
            "judge": judge,
        },
        "gate": [asdict(check) for check in checks],
        "verdict": {"status": "not_ready" if failed else "ready", "headline": headline, "reasons": failed},
    }


def _check(gate: Condition, part: Mapping[str, Any] | None) -> GateCheck:
    """Passed only where the end of the interval is known and on the right side."""
    bound = None if part is None else part["ci_low" if gate.side == "at_least" else "ci_high"]
    passed = bound is not None and (bound >= gate.threshold if gate.side == "at_least" else bound <= gate.threshold)
    sign = "at least" if gate.side == "at_least" else "at most"
    if bound is None:
        why = "it was not measured" if part is None else part.get("reason") or "it has no interval"
        text = f"{gate.meaning}: {why}; wanted {sign} {gate.threshold:g}"
    else:
        end = "lower" if gate.side == "at_least" else "upper"
        text = f"{gate.meaning}: {end} end {bound:.3g}, wanted {sign} {gate.threshold:g}"
    return GateCheck(gate.part, bound, gate.threshold, passed, text)


def _probability_check(chance: float | None, fit: Mapping[str, Any]) -> GateCheck:
    gain = f"a gain of {fit['population']['min_gain']:g} at {fit['planned_kl']:g} nats"
    what = f"probability of {gain}, as the gold world's small models had it"
    shown = "not known, a part is missing" if chance is None else f"{chance:.2f}"
    passed = chance is not None and chance >= CLOSED_BELOW
    return GateCheck(
        "gain_probability", chance, CLOSED_BELOW, passed, f"{what}: {shown}, wanted at least {CLOSED_BELOW:g}"
    )


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
