"""How many labels a choice saved: label-efficiency curves, where they reach a target, and the saving over seeds.

An accuracy measured after each round goes up and down by chance, so a curve's first crossing of a target would be
early by luck. The curve is therefore replaced by the non-decreasing one nearest to it, and read between its points. The
saving of a choice against random is taken within a seed, where both have the same pool, seed set, validation and test
pairs and learn the same label of the same pair, and averaged over seeds as a ratio:

    saving = 1 - exp(-mean over seeds of log(n_random / n_active))

where exchanging the two only changes the sign of the logarithm; a mean of 1 - n_active / n_random would call either of
two equal choices worse. A target that a curve never reaches has no label count: it is counted as
censored and no number is put in its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from rmcore.config.active import ActiveConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.verdicts.estimate import Estimate, SeedSample, estimate_over_seeds
from rmcore.evaluation.verdicts.judgement import ONE_LOOK, Claim, Judgement, judge

MIN_SEEDS = 10
"""Paired seeds below which no saving is claimed."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Held-out accuracy by number of labels, of one choice under one seed.

    num_labels: (R,) all labels paid for, those of validation pairs too; increasing.
    accuracy: (R,) in [0, 1].
    """

    num_labels: FloatArray
    accuracy: FloatArray

    def __post_init__(self) -> None:
        n, a = self.num_labels, self.accuracy
        if n.ndim != 1 or n.shape != a.shape or len(n) < 2 or not np.isfinite(a).all() or not (np.diff(n) > 0).all():
            raise DataError(
                f"a curve of {n.shape} label counts and {a.shape} accuracies: two points or more with increasing "
                "counts and finite accuracies make one. Run more rounds."
            )

    def fitted(self) -> FloatArray:
        """The non-decreasing values nearest to the accuracies in squares, (R,).

        Source:
            Ayer et al. 1955, An empirical distribution function for sampling with incomplete information (pool adjacent
            violators).
        """
        return np.asarray(isotonic_regression(self.accuracy).x, dtype=np.float64)

    def labels_to(self, target: float) -> float | None:
        """Labels at which the fitted curve reaches `target`, between two points by a straight line.

        None where it does not, or where its first point is there already: then fewer labels might do, and how many is
        not known either.
        """
        values = self.fitted()
        if not values[0] < target <= values[-1]:
            return None
        after = int(np.argmax(values >= target))
        share = (target - values[after - 1]) / (values[after] - values[after - 1])
        return float(self.num_labels[after - 1] + share * (self.num_labels[after] - self.num_labels[after - 1]))


@dataclass(frozen=True, slots=True)
class Saving:
    """Share of labels saved against random choice: 0.4 means that 60 labels do what 100 random ones do."""

    value: float | None
    """None where a seed is censored, or there are no seeds."""
    ci_low: float | None
    ci_high: float | None
    num_seeds: int
    num_censored_active: int
    """Seeds whose curve never reaches the target."""
    num_censored_random: int
    reason: str | None
    """Why there is no value, or no interval."""
    log_ratio: Estimate | None
    """Estimate of log(n_random / n_active), on which claims are judged: above 0 where labels are saved."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        names = ("value", "ci_low", "ci_high", "num_seeds", "num_censored_active", "num_censored_random", "reason")
        return {name: getattr(self, name) for name in names}


def saving(active: Sequence[float | None], random: Sequence[float | None]) -> Saving:
    """The saving of a choice over S paired seeds, with its 95 % interval for new seeds.

    Args:
        active: (S,) labels that the choice took to the target under each seed; None where it never got there.
        random: (S,) the same of random choice, under the same seeds in the same order.

    Raises:
        DataError: the seeds are not paired, or there are none.
    """
    if len(active) != len(random) or not active:
        raise DataError(
            f"{len(active)} seeds of a choice and {len(random)} of random choice: a saving is taken within a seed. "
            "Run both under the same seeds."
        )
    missing = sum(one is None for one in active), sum(one is None for one in random)
    if any(missing):
        reason = (
            f"the target is not reached from below in {missing[0]} of {len(active)} seeds by this choice and in "
            f"{missing[1]} by random choice, and a mean over the others would be one over the lucky ones"
        )
        return Saving(None, None, None, len(active), *missing, reason, None)
    ratios = [math.log(b / a) for a, b in zip(active, random, strict=True) if a is not None and b is not None]
    found = estimate_over_seeds([SeedSample(one, None) for one in ratios], num_prompts=None, prompts_shared=False)
    low, high = (None if end is None else 1 - math.exp(-end) for end in (found.ci_low, found.ci_high))
    return Saving(1 - math.exp(-found.value), low, high, len(active), 0, 0, found.reason, found)


def targets_between(start: float, end: float, shares: Sequence[float]) -> list[float | None]:
    """Target accuracies at shares of the way from `start` to `end`; None for all where `end` is not above `start`.

    Args:
        start: accuracy on the seed set, which all choices share.
        end: accuracy on the labels of the whole pool, which no choice moves: a target that one of the compared curves
            defined would favour it or its rival.
        shares: in (0, 1].
    """
    return [start + share * (end - start) if end > start else None for share in shares]


@dataclass(frozen=True, slots=True)
class SavingClaim:
    """A statement that is registered before the study runs."""

    name: str
    acquisition: str
    noise: float
    share: float
    """Share of the way from the seed set's accuracy to the whole pool's."""
    threshold: float
    """Saving that is claimed to be exceeded."""

    @property
    def text(self) -> str:
        """The claim in a sentence."""
        where = (
            f"{self.share:.0%} of the way to the whole pool's accuracy, {self.noise:.0%} of the labels turned around"
        )
        if self.threshold == 0:
            return f"{self.acquisition} needs fewer labels than random choice ({where})."
        return f"{self.acquisition} saves more than {self.threshold:.0%} of random choice's labels ({where})."


def registered_claims(acquisitions: Sequence[str], *, noise: float, share: float, claimed: float) -> list[SavingClaim]:
    """For each choice but random: it saves more than `claimed`, and it saves anything at all.

    Raises:
        ConfigError: `claimed` is not in [0, 1).
    """
    if not 0 <= claimed < 1:
        raise ConfigError(f"a claimed saving of {claimed}: it is a share of the labels; choose 0 to below 1.")
    return [
        SavingClaim(f"{name} > {threshold:.0%}", name, noise, share, threshold)
        for name in acquisitions
        if name != "random"
        for threshold in sorted({claimed, 0.0}, reverse=True)
    ]


def claims_of(config: ActiveConfig) -> list[SavingClaim]:
    """List the claims that are registered before the study runs."""
    return registered_claims(
        config.acquisitions, noise=config.noise[0], share=config.claimed_target, claimed=config.claimed_saving
    )


def judge_savings(claims: Sequence[SavingClaim], savings: Mapping[str, Saving]) -> dict[str, Judgement]:
    """Verdicts by claim, with one error rate for all of them; without `MIN_SEEDS` seeds or an estimate: inconclusive.

    Args:
        claims: as registered.
        savings: the saving that each claim is about, by its name.
    """
    estimates = {}
    for claim in claims:
        found = savings[claim.name]
        reason = found.reason
        if found.num_seeds < MIN_SEEDS:
            reason = f"{found.num_seeds} seeds, and below {MIN_SEEDS} no saving is claimed"
        known = found.log_ratio if found.num_seeds >= MIN_SEEDS else None
        estimate = known or Estimate(0.0, None, None, found.num_seeds, None, "", reason, None)
        estimates[claim.name] = (Claim(claim.name, "above", -math.log1p(-claim.threshold)), [estimate])
    return judge(estimates, ONE_LOOK)
