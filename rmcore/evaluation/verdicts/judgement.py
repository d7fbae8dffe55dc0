"""Claims against estimates: supported, refuted or inconclusive, with one error rate for all of them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import special

from rmcore.core.errors import ConfigError
from rmcore.evaluation.verdicts.estimate import Estimate
from rmcore.evaluation.verdicts.intervals import POWER
from rmcore.evaluation.verdicts.sequential import information, look_levels, sequential_p

Direction = Literal["above", "below", "within"]


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
class Looks:
    """When an experiment is judged, as registered: the numbers of seeds, rising; one of them without interim looks."""

    num_seeds: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Shares of the error rate that may be spent up to each look: of the seeds."""
        return [number / self.num_seeds[-1] for number in self.num_seeds]

    def level(self, alpha: float, estimates: Sequence[Estimate]) -> float:
        """The level of the newest of the looks at a claim, of which `estimates` has one each; alpha without looks."""
        taken = len(estimates)
        if len(self.num_seeds) == 1:
            return alpha
        return look_levels(alpha, self.shares[:taken], information(estimates[-1], self.num_seeds[:taken]))[-1]

    def p_value(self, claim: Claim, estimates: Sequence[Estimate]) -> float | None:
        """P over all looks taken at a claim; None where the newest has no interval. An earlier one without says 1."""
        *earlier, newest = (claim.p_value(estimate) for estimate in estimates)
        if newest is None or len(self.num_seeds) == 1:
            return newest
        taken = len(estimates)
        p_values = [*(1.0 if p is None else p for p in earlier), newest]
        return sequential_p(p_values, self.shares[:taken], information(estimates[-1], self.num_seeds[:taken]))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a claim, with its numbers."""

    verdict: Literal["supported", "refuted", "inconclusive"]
    p: float | None
    """Two-sided, of quantity = threshold, over all looks; None: the estimate has no interval."""
    p_holm: float | None
    """Holm's adjustment over all claims that were judged together."""
    smallest_detectable: float | None
    """Distance from the threshold that would have been seen with 80 % power at Holm's strictest step, alpha / k."""
    reason: str
    interval: tuple[float, float] | None = None
    """At the newest look's own level: that of 95 % over all looks."""


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


def judge(
    claims: Mapping[str, tuple[Claim, Sequence[Estimate]]], looks: Looks, *, alpha: float = 0.05
) -> dict[str, Judgement]:
    """Verdicts of all claims of an experiment, by name.

    A claim is supported or refuted where its p value, over its looks and after Holm over all claims given, is below
    alpha, by the side on which the newest interval lies. Where that interval includes the border again, what an earlier
    look excluded decides nothing. The test is two-sided, because a claim may also turn out the other way round. A claim
    without an interval stays inconclusive but counts among the k: it was registered.

    Args:
        claims: each claim with the estimates of its quantity, one for each look that was taken at it.
        looks: when looks are taken.
        alpha: familywise error rate of wrong verdicts, over all looks.

    Raises:
        ConfigError: not 0 < alpha < 0.8, the power that smallest_detectable is for.
    """
    if not 0 < alpha < POWER:
        raise ConfigError(
            f"judge got alpha={alpha:g}: an error rate is a share such as 0.05. Pass 0 < alpha < {POWER}."
        )
    p_values = {name: looks.p_value(claim, estimates) for name, (claim, estimates) in claims.items()}
    adjusted = dict(zip(p_values, holm([1.0 if p is None else p for p in p_values.values()]), strict=True))
    return {
        name: _judgement(claim, estimates, looks, p_values[name], adjusted[name], alpha, len(claims))
        for name, (claim, estimates) in claims.items()
    }


def chance_to_decide(claim: Claim, estimates: Sequence[Estimate], looks: Looks, *, alpha: float) -> float:
    """How likely the last look decides a claim, by what has been seen so far.

    The last look's estimate scatters around today's by what news it brings, the difference of the two variances,
    whatever the truth is (predictive power under a flat prior). It decides where it lies farther from a border than its
    own interval at the last look's level reaches.

    Args:
        claim: what is claimed.
        estimates: of the looks taken at it.
        looks: all of them.
        alpha: Holm's strictest step for it.

    Source:
        Spiegelhalter, Freedman and Blackburn 1986, Monitoring clinical trials: conditional or predictive power?,
        Controlled Clinical Trials 7(1).
    """
    now = estimates[-1]
    if now.spread is None:
        return 1.0
    known = information(now, looks.num_seeds)
    level = look_levels(alpha, looks.shares, known)[-1]
    variance = sum(component.variance for component in now.spread.components)
    last = variance * known[len(estimates) - 1]  # known[-1] is 1
    news, reach = max(variance - last, 0.0) ** 0.5, -float(special.ndtri(level / 2)) * last**0.5

    def beyond(border: float) -> tuple[float, float]:
        """Chances that the last estimate lies farther than its reach below and above a border."""
        if news == 0:
            return float(now.value < border - reach), float(now.value > border + reach)
        below = float(special.ndtr((border - reach - now.value) / news))
        return below, float(special.ndtr((now.value - border - reach) / news))

    below, above = beyond(claim.threshold)
    if claim.direction != "within":
        return below + above
    far_below, inside = beyond(-claim.threshold)
    return far_below + above + max(0.0, inside + below - 1.0)


def _judgement(
    claim: Claim,
    estimates: Sequence[Estimate],
    looks: Looks,
    p: float | None,
    p_holm: float,
    alpha: float,
    num_claims: int,
) -> Judgement:
    estimate = estimates[-1]
    if p is None:
        return Judgement("inconclusive", None, None, None, f"No interval: {estimate.reason}.")
    detectable = estimate.smallest_detectable(alpha=looks.level(alpha / num_claims, estimates))
    interval = estimate.interval(looks.level(alpha, estimates))
    of_looks = f" over {len(estimates)} of {len(looks.num_seeds)} looks" if len(looks.num_seeds) > 1 else ""
    seen = f"The {100 * (1 - alpha):.4g} % interval{of_looks}"
    family = f"Holm's correction over {num_claims} hypotheses (p = {p_holm:.2g})"
    border = "an end of what is claimed" if claim.direction == "within" else "the threshold"
    if p >= alpha:
        return Judgement("inconclusive", p, p_holm, detectable, f"{seen} includes {border}.", interval)
    if interval is None or any(interval[0] <= end <= interval[1] for end in claim.borders):
        reason = f"An earlier look excluded {border}, and {seen[0].lower()}{seen[1:]} includes it again."
        return Judgement("inconclusive", p, p_holm, detectable, reason, interval)
    excluded = f"{seen} lies {_side(claim, estimate.value)}"
    if p_holm >= alpha:
        reason = f"{excluded}, but not after {family}."
        return Judgement("inconclusive", p, p_holm, detectable, reason, interval)
    reason = f"{excluded}, also after {family}." if num_claims > 1 else f"{excluded} (p = {p:.2g})."
    verdict: Literal["supported", "refuted"] = "supported" if claim.holds(estimate.value) else "refuted"
    return Judgement(verdict, p, p_holm, detectable, reason, interval)


def _side(claim: Claim, value: float) -> str:
    if claim.direction != "within":
        return f"{'above' if value > claim.threshold else 'below'} the threshold"
    return f"{'within' if claim.holds(value) else 'outside of'} what is claimed"
