"""One quantity over the seeds of an experiment: its mean, its interval, and in words how that was made.

A seed's number has two errors: another seed would have trained another model, and other test prompts would have asked
other questions. Where every seed has prompts of its own, both are in the spread over seeds. Where all seeds are
measured on the same prompts, which is the rule, the prompt error is the same for all of them: no number of seeds shows
it, and the more the seeds agree, the less a t interval over seeds alone covers, down to nothing.

Then an answer's error has three parts: of the seed, of the prompt, and of both together (this model on this prompt,
the largest of the three as a rule). The spread over seeds holds the first and the third, the spread over prompts the
second and the third; the third is estimated by itself and counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import NO_INTERVAL, ONE_PROMPT, UNEVEN
from rmcore.evaluation.verdicts.intervals import (
    Component,
    PercentileInterval,
    TInterval,
    smallest_detectable,
    spread_variance,
)

_NO_SPREAD = "one seed and nothing resampled: the spread cannot be estimated. Run more seeds"
_CONSTANT = "all seeds, or all resamples of prompts, gave one and the same value: the spread cannot be estimated"

FEW_SEEDS = 5
"""Fewer may agree by luck, so their variance is at least the part of it that the prompts show."""
AT_CHANCE = 0.03
"""An accuracy this far above one half is at chance, whatever its error over prompts."""
FAR_BELOW = 3.0
"""Deviations from the median that no seed of a normal spread has in one of 300."""
NORMAL_MAD = 1.4826
"""Standard deviations of a normal spread for one median absolute deviation."""


@dataclass(frozen=True, slots=True)
class SeedSample:
    """One seed's measurement of one quantity."""

    value: float
    replicates: FloatArray | None
    """(B,) bootstrap replicates over prompts; where seeds share their prompts, replicate b of every seed was drawn with
    the same prompt weights. None: there is no prompt-level error (a time, a size)."""
    num_prompts: float | None = None
    """Prompts that carry the quantity, of those resampled: of an accuracy of length-matched pairs, those with such a
    pair. The spread over prompts is known by so many, however many others are drawn next to them. Of prompts of unequal
    size, their effective number (`effective_prompts`); 0 where a few hold most of the pairs (`heaviest_tail`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds with its 95 % interval.

    The bounds are None where no interval can be given; `reason` then says why.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_seeds: int
    num_prompts: float | None
    method: str
    """One sentence or two for a report: how the interval was made and what is not in it."""
    reason: str | None
    spread: TInterval | PercentileInterval | None = field(repr=False, compare=False)
    """The data that the interval is made of; None where there is no interval."""
    condition: str | None = None
    """Condition that the interval holds under, as words that follow its ends: "if no training collapses"."""

    def p_value(self, threshold: float = 0.0) -> float | None:
        """Two-sided p that the quantity equals the threshold: below alpha where `spread.bounds(alpha)` exclude it."""
        return self.spread.p_value(threshold) if self.spread else None

    def smallest_detectable(self, alpha: float) -> float | None:
        """Distance from a threshold that an experiment of this size and spread shows with a power of 80 %."""
        return smallest_detectable(self.spread.components, alpha) if self.spread else None


def estimate_over_seeds(samples: Sequence[SeedSample], *, num_prompts: float | None, prompts_shared: bool) -> Estimate:
    """Mean over seeds with an interval for new seeds and new prompts.

    Own prompts, or nothing resampled: t interval over seeds with variance A = s^2 / S and S - 1 degrees of freedom; the
    prompt error, if there is one, is inside s^2.

    Shared prompts: A for the seeds, with the part of seed and prompt together; and for the prompts B - E. B is the
    variance over replicates of the mean over seeds, times C / (C - 1) (see `percentile_interval`), with C - 1 degrees
    of freedom, and E its part of seed and prompt together, which A has already (`shared_variances`). The half-widths
    are combined by MOVER. Satterthwaite's degrees of freedom for the sum would undercover: where s happens to be small
    among 3 seeds, they give the seeds' part the prompts' many degrees of freedom (simulated coverage down to 92 %).
    A bootstrap over seeds and prompts counts E up to three times.

    Fewer than five seeds: A is at least E.

    One seed: the interval over prompts alone. No replicates: seeds alone. A spread of exactly zero is a sign of too few
    observations (no training of three stopped early), and no interval is given.

    Args:
        samples: one a seed, in any order, their values finite; either all have replicates or none has.
        num_prompts: C, the prompts that carry each seed's replicates; None where the quantity has none.
        prompts_shared: whether all seeds were measured on the same prompts. Without replicates it does not matter.

    Source:
        Zou and Donner 2008, Statistics in Medicine 27(10) (MOVER). Owen 2007, The pigeonhole bootstrap, Annals of
        Applied Statistics 1(2) (the three parts). Field and Welsh 2007, Bootstrapping clustered data, JRSS B 69(3) (own
        prompts). Miller 2024, Adding error bars to evals, arXiv:2411.00640 (prompts as clusters, paired differences).
    """
    # Seeds have no order, to the last digit.
    ordered = sorted(
        samples, key=lambda sample: (sample.value, 0.0 if sample.replicates is None else sample.replicates.sum())
    )
    values = np.array([sample.value for sample in ordered])
    replicates = [sample.replicates for sample in ordered if sample.replicates is not None]
    # Own prompts need no replicates: their error is in the spread over seeds, except where there is one seed only.
    crossed = np.stack(replicates) if replicates and (prompts_shared or len(values) == 1) else None
    spread = _spread(values, crossed, num_prompts or 0)
    limits = spread if isinstance(spread, str) else _limits(spread)
    method = _method(len(values), num_prompts, shared=prompts_shared, resampled=bool(replicates))
    centre = _mean(values)
    if isinstance(spread, str) or isinstance(limits, str):
        return Estimate(centre, None, None, len(values), num_prompts, method, str(limits), None)
    return Estimate(centre, *limits, len(values), num_prompts, method, None, spread)


def collapsed(values: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Places of an arm's seeds that collapsed: at chance level, and far below what most of the arm's seeds reached.

    At chance: within two standard errors over prompts and `AT_CHANCE`, above. Far below: by more than
    `FAR_BELOW` median absolute deviations from the arm's median, those of a normal spread, and by more than
    `AT_CHANCE`. Where most seeds are at chance none stands out, and there are at least three.

    Args:
        values: (S,) accuracies.
        errors: (S,) standard errors over prompts, 0 where they are not known.
    """
    if len(values) < 3:
        return []
    accuracies = np.asarray(values, dtype=np.float64)
    median = float(np.median(accuracies))
    deviation = float(np.median(np.abs(accuracies - median))) * NORMAL_MAD
    low = median - accuracies > max(FAR_BELOW * deviation, AT_CHANCE)
    at_chance = accuracies <= 0.5 + np.maximum(2 * np.asarray(errors, dtype=np.float64), AT_CHANCE)
    return [int(place) for place in np.flatnonzero(low & at_chance)]


def shared_variances(crossed: FloatArray, num_prompts: float) -> tuple[float, float]:
    """B, the variance of the mean over seeds that comes from prompts, and E, its part of seed and prompt together.

    With variances p of the prompt's part and e of seed and prompt together, both for the whole set of prompts, the mean
    over seeds has B = p + e / S and one seed has p + e, so E = e / S = (mean over seeds of theirs - B) / (S - 1).
    E is at least 0 and at most B.

    Args:
        crossed: (S, B) replicates of each seed, drawn with common prompt weights, none of them NaN.
        num_prompts: C; both carry the factor C / (C - 1) that a bootstrap's variance lacks.
    """
    correction = num_prompts / (num_prompts - 1)
    of_mean = spread_variance(crossed.mean(axis=0)) * correction
    if len(crossed) == 1 or not np.isfinite(of_mean):
        return of_mean, 0.0
    of_one = float(np.mean([spread_variance(row) for row in crossed])) * correction
    return of_mean, min(max((of_one - of_mean) / (len(crossed) - 1), 0.0), of_mean)


def _spread(values: FloatArray, crossed: FloatArray | None, num_prompts: float) -> TInterval | PercentileInterval | str:
    """Return what the interval is made of, of (S,) values and their (S, B) replicates of C prompts, or why none is."""
    if crossed is None:
        return _NO_SPREAD if len(values) == 1 else TInterval(_mean(values), (_seed_component(values),))
    centre, defined = _mean(values), crossed[:, ~np.isnan(crossed).any(axis=0)]
    if num_prompts < 2 or defined.shape[1] < 2:
        return NO_INTERVAL if num_prompts >= 2 else ONE_PROMPT if num_prompts == 1 else UNEVEN
    if len(values) == 1:
        return PercentileInterval(centre, defined[0], num_prompts)
    of_prompts, together = shared_variances(defined, num_prompts)
    over_prompts = Component(of_prompts - together, num_prompts - 1)
    over_seeds = _seed_component(values)
    if len(values) < FEW_SEEDS:
        # Two seeds may agree to the last digit; seed and prompt together are in their part whatever they show.
        over_seeds = Component(max(over_seeds.variance, together), over_seeds.df)
    return TInterval(centre, (over_seeds, over_prompts))


def _seed_component(values: FloatArray) -> Component:
    return Component(spread_variance(values) / len(values), len(values) - 1)


def _limits(spread: TInterval | PercentileInterval) -> tuple[float, float] | str:
    """The 95 % interval, or why there is none: it has no bound, or no width."""
    bounds = spread.bounds(0.05)
    if bounds is None or not np.isfinite(bounds).all():
        return NO_INTERVAL
    return _CONSTANT if bounds[0] == bounds[1] else bounds


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if np.ptp(values) else float(values[0])  # equal values keep their last digit


def _method(num_seeds: int, num_prompts: float | None, *, shared: bool, resampled: bool) -> str:
    counted = "" if num_prompts is None else f"{round(num_prompts, 1):g}"
    if num_seeds == 1:
        if not resampled:
            return "One seed; no interval."
        return f"One seed; bootstrap over {counted} prompts. The spread over seeds is not in it."
    if resampled and shared:
        over_prompts = f"with a bootstrap over the {counted} prompts that they share (MOVER)"
        return f"Mean of {num_seeds} seeds; Student t over seeds {over_prompts}."
    over_seeds = f"Mean of {num_seeds} seeds; Student t interval over seeds"
    if resampled:
        return f"{over_seeds}, each with prompts of its own."
    return f"{over_seeds}." if num_prompts is None else f"{over_seeds}. The spread over prompts is not in it."
