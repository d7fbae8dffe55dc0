"""Claims against estimates: supported, refuted or inconclusive, with one error rate for all of them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rmcore.core.errors import ConfigError
from rmcore.evaluation.verdicts.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Claim:
    """A pre-registered statement: the quantity lies above, or below, the threshold."""

    name: str
    direction: Literal["above", "below"]
    threshold: float
    """In the estimate's own unit: the logarithm of the ratio where the estimate is a log ratio."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a claim, with its numbers."""

    verdict: Literal["supported", "refuted", "inconclusive"]
    p: float | None
    """Two-sided, of quantity = threshold; None: the estimate has no interval."""
    p_holm: float | None
    """Holm's adjustment over all claims that were judged together."""
    smallest_detectable: float | None
    """Distance from the threshold that would have been seen with 80 % power at Holm's strictest step, alpha / k."""
    reason: str


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the given order: rejecting those below alpha keeps the familywise error below alpha.

    The i-th smallest of k becomes max_{j <= i} min(1, (k - j + 1) p_j); no independence is needed.

    Source:
        Holm 1979, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6(2).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - step) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def judge(claims: Mapping[str, tuple[Claim, Estimate]], *, alpha: float = 0.05) -> dict[str, Judgement]:
    """Verdicts of all claims of an experiment, by name.

    A claim is supported or refuted where its p value, after Holm over all claims given, is below alpha, by the side on
    which the estimate lies. The test is two-sided, because a claim may also turn out the other way round. A claim
    without an interval stays inconclusive but counts among the k: it was registered.

    Args:
        claims: each claim with the estimate of its quantity.
        alpha: familywise error rate of wrong verdicts.

    Raises:
        ConfigError: not 0 < alpha < 0.8, the power that smallest_detectable is for.
    """
    if not 0 < alpha < 0.8:
        raise ConfigError(f"judge got alpha={alpha:g}: an error rate is a share such as 0.05. Pass 0 < alpha < 0.8.")
    p_values = {name: estimate.p_value(claim.threshold) for name, (claim, estimate) in claims.items()}
    adjusted = dict(zip(p_values, holm([1.0 if p is None else p for p in p_values.values()]), strict=True))
    return {
        name: _judgement(claim, estimate, p_values[name], adjusted[name], alpha, len(claims))
        for name, (claim, estimate) in claims.items()
    }


def _judgement(
    claim: Claim, estimate: Estimate, p: float | None, p_holm: float, alpha: float, num_claims: int
) -> Judgement:
    interval = estimate.interval(alpha)
    if p is None or interval is None:
        return Judgement("inconclusive", None, None, None, f"No interval: {estimate.reason}.")
    detectable = estimate.smallest_detectable(alpha=alpha / num_claims)
    seen = f"The {100 * (1 - alpha):.4g} % interval"
    family = f"Holm's correction over {num_claims} hypotheses (p = {p_holm:.2g})"
    if p >= alpha:
        reason = f"{seen} includes the threshold."
        return Judgement("inconclusive", p, p_holm, detectable, reason)
    side = "above" if estimate.value > claim.threshold else "below"
    excluded = f"{seen} lies {side} the threshold"
    if p_holm >= alpha:
        return Judgement("inconclusive", p, p_holm, detectable, f"{excluded}, but not after {family}.")
    reason = f"{excluded}, also after {family}." if num_claims > 1 else f"{excluded} (p = {p:.2g})."
    return Judgement("supported" if side == claim.direction else "refuted", p, p_holm, detectable, reason)
