"""Claims against estimates: supported, refuted or inconclusive, with one error rate for all of them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rmcore.evaluation.verdicts.estimate import Estimate

Direction = Literal["above", "below", "within"]
ALPHA = 0.05
"""Familywise error rate of wrong verdicts of an experiment."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A pre-registered statement: the quantity lies above, or below, the threshold, or between it and its negative."""

    name: str
    direction: Direction
    threshold: float
    """In the estimate's own unit: the logarithm of the ratio where the estimate is a log ratio. within: above 0."""

    def p_value(self, estimate: Estimate) -> float | None:
        """Two-sided p that the quantity lies on the border of what is claimed; None where there is no interval.

        within: p of the nearer border, so below alpha where the 1 - alpha interval lies wholly inside or wholly outside
        (two one-sided tests at alpha / 2 each).
        """
        return max(estimate.spread.p_value(border) for border in self.borders) if estimate.spread else None

    @property
    def borders(self) -> tuple[float, ...]:
        """Where what is claimed ends, rising: the threshold, or both ends."""
        return (-self.threshold, self.threshold) if self.direction == "within" else (self.threshold,)

    def holds(self, value: float) -> bool:
        """Whether a value lies where the claim puts it."""
        if self.direction == "within":
            return abs(value) < self.threshold
        return value > self.threshold if self.direction == "above" else value < self.threshold


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


def judge(claims: Mapping[str, tuple[Claim, Estimate]]) -> dict[str, Judgement]:
    """Verdicts of all claims of an experiment, by name.

    A claim is supported or refuted where its p value, after Holm over all claims given, is below `ALPHA`, by the side
    on which its interval lies. The test is two-sided, because a claim may also turn out the other way round. A claim
    without an interval stays inconclusive but counts among the k: it was registered.

    Args:
        claims: each claim with the estimate of its quantity.
    """
    p_values = {name: claim.p_value(estimate) for name, (claim, estimate) in claims.items()}
    adjusted = dict(zip(p_values, holm([1.0 if p is None else p for p in p_values.values()]), strict=True))
    return {
        name: _judgement(claim, estimate, p_values[name], adjusted[name], len(claims))
        for name, (claim, estimate) in claims.items()
    }


def _judgement(claim: Claim, estimate: Estimate, p: float | None, p_holm: float, num_claims: int) -> Judgement:
    if p is None:
        return Judgement("inconclusive", None, None, None, f"No interval: {estimate.reason}.")
    detectable = estimate.smallest_detectable(ALPHA / num_claims)
    seen = "The 95 % interval" + (f", {estimate.condition}," if estimate.condition else "")
    family = f"Holm's correction over {num_claims} hypotheses (p = {p_holm:.2g})"
    border = "an end of what is claimed" if claim.direction == "within" else "the threshold"
    if p >= ALPHA:
        return Judgement("inconclusive", p, p_holm, detectable, f"{seen} includes {border}.")
    excluded = f"{seen} lies {_side(claim, estimate.value)}"
    if p_holm >= ALPHA:
        return Judgement("inconclusive", p, p_holm, detectable, f"{excluded}, but not after {family}.")
    reason = f"{excluded}, also after {family}." if num_claims > 1 else f"{excluded} (p = {p:.2g})."
    verdict: Literal["supported", "refuted"] = "supported" if claim.holds(estimate.value) else "refuted"
    return Judgement(verdict, p, p_holm, detectable, reason)


def _side(claim: Claim, value: float) -> str:
    if claim.direction != "within":
        return f"{'above' if value > claim.threshold else 'below'} the threshold"
    return f"{'within' if claim.holds(value) else 'outside of'} what is claimed"
