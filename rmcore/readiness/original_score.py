"""The original readiness score (v1): one number from four held-out measurements, exactly as first specified.

Kept for comparison with earlier runs. It is no verdict and nothing is decided by it: see the flaws listed at
`RLReadinessScorer`, and `rmcore.readiness.verdict` for what decides. Plain Python, no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

from rmcore.core.errors import ConfigError

Band = Literal["above 0.8", "0.6 to 0.8", "below 0.6"]

DEFAULT_WEIGHTS: Mapping[str, float] = {"accuracy": 0.35, "calibration": 0.25, "stability": 0.25, "landscape": 0.15}
"""Accuracy first. Defaults, not findings; the validation study shows what they predict."""

UPPER, LOWER = 0.8, 0.6
"""Bounds of the original definition's three bands."""
NOT_MEASURED = "not measured; the overall score is formed of the other three parts, their weights divided by their sum"
LIMITS = (
    "No verdict follows from it: it sees no sample of a policy, gives a model that guesses 0.88, and ranks reward "
    "models no better than chance by what a policy gains (Spearman 0.008). Judge a policy's samples: rm-opt readiness "
    "policy."
)

READINGS: Mapping[Band, str] = {
    "above 0.8": "✓ Model is ready for RL training",
    "0.6 to 0.8": "Model may be used, monitor closely",
    "below 0.6": "✗ Model is not recommended for RL training",
}
"""Readings of the three bands in the original definition; `LIMITS` follows them, because no verdict does."""

ACCURACY_ADVICE_BELOW = 0.7
ECE_ADVICE_ABOVE = 0.1
VARIANCE_ADVICE_ABOVE = 2.0
EIGENVALUE_ADVICE_ABOVE = 200.0


@dataclass(frozen=True)
class RLReadinessReport:
    """The score, its four parts and advice; `band` and `version` follow.

    Attributes:
        overall_score: weighted sum of the four parts; up to 1.067 with the default weights, not 1. Without curvature,
            the sum of the other three over the sum of their weights.
        accuracy_score: min(1, accuracy).
        calibration_score: max(0, 1 - 5 ECE).
        stability_score: max(0, 1 - (variance - 0.5) / 2.5), up to 1.2.
        landscape_score: max(0, 1 - (top eigenvalue - 50) / 450), up to 1.111 for a top eigenvalue of 0; None where no
            curvature was measured.
        recommendations: one sentence for each measurement beyond its threshold, in the order of the parts.
    """

    overall_score: float
    accuracy_score: float
    calibration_score: float
    stability_score: float
    landscape_score: float | None
    recommendations: tuple[str, ...]

    version: ClassVar[str] = "v1"

    def __str__(self) -> str:
        """Describe the report for people: score, parts, band, advice, and what it cannot know."""
        parts = {
            "Accuracy": self.accuracy_score,
            "Calibration": self.calibration_score,
            "Stability": self.stability_score,
            "Landscape": self.landscape_score,
        }
        return "\n".join(
            [
                f"Original readiness score ({self.version})",
                f"Overall Score: {self.overall_score:.2f}/1.00 ({self.band})",
                *(
                    f"  {name + ':':<12} {NOT_MEASURED if part is None else f'{part:.2f}'}"
                    for name, part in parts.items()
                ),
                *(["Recommendations:"] if self.recommendations else []),
                *(f"  - {advice}" for advice in self.recommendations),
                f"In the original score's own words: {READINGS[self.band]}",
                LIMITS,
            ]
        )

    @property
    def band(self) -> Band:
        """Which of the three ranges of the original definition the score lies in."""
        if self.overall_score > UPPER:
            return "above 0.8"
        return "below 0.6" if self.overall_score < LOWER else "0.6 to 0.8"

    def to_dict(self) -> dict[str, Any]:
        """A JSON record, band and version included."""
        return asdict(self) | {
            "recommendations": list(self.recommendations),
            "band": self.band,
            "version": self.version,
        }


class RLReadinessScorer:
    """Weighted sum of accuracy, calibration, stability and landscape scores: the original score (v1), no verdict.

    Known flaws, kept because they are the definition, and pinned by tests:

    - A reward model that guesses is in the highest band: accuracy 0.494 with small margins scores 0.88, because a model
      whose rewards hardly differ is "calibrated", "stable" and "flat".
    - Stability and landscape parts exceed 1, so the score reaches 1.067. (A negative top eigenvalue goes further.)
    - It depends on the scale of the rewards, which no ranking sees: a head multiplied by 10 has 100 times the variance.
    - Its printed example, 0.82 for 0.87 / 0.05 / 1.2 / 150, is 0.789 by its own formula.
    - Over the 110 reward models of the first study (docs/readiness.md) its rank correlation with the gain of best-of-64
      sampling was 0.008, where accuracy on the policy's own samples reached 0.666.

    Args:
        weights: numbers for `accuracy`, `calibration`, `stability`, `landscape`, at least 0, summing to 1 within 1e-6;
            None takes `DEFAULT_WEIGHTS`, 0.35, 0.25, 0.25, 0.15.

    Raises:
        ConfigError: other names, a weight that is negative or not a number, or another sum.

    Example:
        >>> report = RLReadinessScorer().compute_score(0.87, 0.05, 1.2, 150.0)
        >>> round(report.overall_score, 3), report.band
        (0.789, '0.6 to 0.8')
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = _checked_weights(DEFAULT_WEIGHTS if weights is None else weights)

    def compute_score(
        self, accuracy: float, ece: float, reward_variance: float, top_eigenvalue: float | None
    ) -> RLReadinessReport:
        """Score one reward model.

        Args:
            accuracy: held-out pairwise accuracy, 0 to 1.
            ece: expected calibration error, 0 to 1; debiased, or a calibrated model loses points on few pairs.
            reward_variance: variance of the rewards pooled over all held-out sides, in squared logits.
            top_eigenvalue: largest eigenvalue of the loss Hessian; None: not measured, and the score is formed of the
                other three parts, with their weights divided by their sum.

        Raises:
            ConfigError: a value is not a finite number or outside its range, or only the part without a value has a
                weight.
        """
        _check("accuracy", accuracy, 0.0, 1.0)
        _check("ece", ece, 0.0, 1.0)
        _check("reward_variance", reward_variance, 0.0, math.inf)
        if top_eigenvalue is not None:
            _check("top_eigenvalue", top_eigenvalue, -math.inf, math.inf)
        parts: dict[str, float | None] = {
            "accuracy": min(1.0, float(accuracy)),
            "calibration": max(0.0, 1.0 - 5.0 * float(ece)),
            "stability": max(0.0, 1.0 - (float(reward_variance) - 0.5) / 2.5),
            "landscape": None if top_eigenvalue is None else max(0.0, 1.0 - (float(top_eigenvalue) - 50.0) / 450.0),
        }
        measured = {name: part for name, part in parts.items() if part is not None}
        # The four weights sum to 1 up to rounding: dividing by that would change scores in the last digit.
        shares = 1.0 if len(measured) == len(parts) else sum(self.weights[name] for name in measured)
        if shares == 0:
            raise ConfigError(
                "only the landscape has a weight, and no curvature was measured: set landscape.method, or give the "
                "other parts a weight."
            )
        return RLReadinessReport(
            overall_score=sum(self.weights[name] * part for name, part in measured.items()) / shares,
            accuracy_score=measured["accuracy"],
            calibration_score=measured["calibration"],
            stability_score=measured["stability"],
            landscape_score=parts["landscape"],
            recommendations=tuple(_advice(accuracy, ece, reward_variance, top_eigenvalue)),
        )


def _checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    if set(weights) != set(DEFAULT_WEIGHTS):
        raise ConfigError(
            f"readiness weights are {weights!r}; the parts are {', '.join(DEFAULT_WEIGHTS)}. Give each a number."
        )
    for name, weight in weights.items():
        _check(f"{name} weight", weight, 0.0, math.inf)
    total = sum(weights.values())
    if abs(total - 1.0) > 1e-6:
        raise ConfigError(f"readiness weights sum to {total:.6g}, not 1. Divide each by {total:.6g}.")
    return {name: float(weights[name]) for name in DEFAULT_WEIGHTS}


def _check(name: str, value: float, least: float, most: float) -> None:
    if not isinstance(value, Real) or not math.isfinite(value) or not least <= value <= most:
        raise ConfigError(
            f"{name} is {value!r}, not a finite number from {least:g} to {most:g}: readiness cannot be scored. Compute "
            "it on held-out pairs first."
        )


def _advice(accuracy: float, ece: float, reward_variance: float, top_eigenvalue: float | None) -> list[str]:
    advice = []
    if accuracy < ACCURACY_ADVICE_BELOW:
        advice.append(
            f"Pairwise accuracy {accuracy:.3f} is below {ACCURACY_ADVICE_BELOW}: train on more or cleaner pairs."
        )
    if ece > ECE_ADVICE_ABOVE:
        advice.append(
            f"Calibration error {ece:.3f} is above {ECE_ADVICE_ABOVE}: divide margins by a temperature fitted on "
            "other pairs, which changes no ranking."
        )
    if reward_variance > VARIANCE_ADVICE_ABOVE:
        advice.append(
            f"Reward variance {reward_variance:.3g} is above {VARIANCE_ADVICE_ABOVE}: normalise rewards before "
            "a policy is optimised against them."
        )
    if top_eigenvalue is not None and top_eigenvalue > EIGENVALUE_ADVICE_ABOVE:
        advice.append(
            f"Top Hessian eigenvalue {top_eigenvalue:.4g} is above {EIGENVALUE_ADVICE_ABOVE:g}: the minimum is sharp; "
            "try SAM, lower the learning rate, or regularise more."
        )
    return advice
