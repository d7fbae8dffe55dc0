"""One quantity over the seeds of an experiment: its mean, its interval, and in words how that was made.

A seed's number has two errors: another seed would have trained another model, and other test prompts would have asked
other questions. Where every seed has prompts of its own, both are in the spread over seeds. Where all seeds are
measured on the same prompts, which is the rule, the prompt error is the same for all of them: no number of seeds shows
it, and the more the seeds agree, the less a t interval over seeds alone covers, down to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.verdicts.intervals import (
    Component,
    PercentileInterval,
    TInterval,
    smallest_detectable,
    spread_variance,
)

BOOTSTRAP_FROM_SEEDS = 8
"""A percentile bootstrap over fewer seeds has too few distinct resamples, and Student's t is the better guess."""

_NO_SPREAD = "one seed and nothing resampled: the spread cannot be estimated. Run more seeds"
_ONE_PROMPT = "only one prompt: its pairs are not independent, so the spread over prompts cannot be estimated"
_UNBOUNDED = "too few prompts carry this metric: resamples leave it undefined or without bound"
_CONSTANT = "all seeds, or all resamples of prompts, gave one and the same value: the spread cannot be estimated"


@dataclass(frozen=True, slots=True)
class SeedSample:
    """One seed's measurement of one quantity."""

    value: float
    replicates: FloatArray | None
    """(B,) bootstrap replicates over prompts; where seeds share their prompts, replicate b of every seed was drawn with
    the same prompt weights. None: there is no prompt-level error (a time, a size)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds with its 95 % interval.

    The bounds are None where no interval can be given; `reason` then says why.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_seeds: int
    num_prompts: int | None
    method: str
    """One sentence or two for a report: how the interval was made and what is not in it."""
    reason: str | None
    spread: TInterval | PercentileInterval | None = field(repr=False, compare=False)
    """The data that the interval is made of; None where there is no interval."""

    def interval(self, alpha: float = 0.05) -> tuple[float, float] | None:
        """Ends of the 1 - alpha interval."""
        return self.spread.bounds(alpha) if self.spread else None

    def p_value(self, threshold: float = 0.0) -> float | None:
        """Two-sided p that the quantity equals the threshold: below alpha where `interval(alpha)` excludes it."""
        return self.spread.p_value(threshold) if self.spread else None

    def smallest_detectable(self, *, alpha: float, power: float = 0.8) -> float | None:
        """Distance from a threshold that an experiment of this size and spread shows with the given power.

        Raises:
            ConfigError: not 0 < alpha < power < 1.
        """
        return smallest_detectable(self.spread.components, alpha=alpha, power=power) if self.spread else None


def estimate_over_seeds(
    samples: Sequence[SeedSample],
    *,
    num_prompts: int | None,
    prompts_shared: bool,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Mean over seeds with an interval for new seeds and new prompts.

    2 to 7 seeds, own prompts each: t interval over seeds with variance A = s^2 / S and S - 1 degrees of freedom; the
    prompt error is inside s^2.

    2 to 7 seeds, shared prompts: A for the seeds, and B for the prompts: the variance over replicates of the mean over
    seeds, times C / (C - 1) (see `percentile_interval`), with C - 1 degrees of freedom. Their half-widths are combined
    by MOVER. Satterthwaite's degrees of freedom for A + B would undercover: where s happens to be small among 3 seeds,
    they give the seeds' part the prompts' many degrees of freedom (simulated coverage down to 92 %). The part of
    the error that belongs to one seed and one prompt together, such as the noise of single answers, is both in A and in
    B, which makes the interval slightly too wide.

    8 seeds or more: bootstrap with the expanded percentile interval for S clusters, or C if there are fewer prompts
    than seeds. Shared prompts: a resample draws seeds and, with one replicate index for all of them, prompts
    (pigeonhole bootstrap; it counts the part of seed and prompt together up to three times, which makes it wider than
    needed). Own prompts: a drawn seed brings its prompts along; to draw those again would count their error twice and
    widen the interval by up to a factor of 1.4.

    One seed: the interval over prompts alone. No replicates: seeds alone. A spread of exactly zero is a sign of too few
    observations (no training of three stopped early), and no interval is given.

    Args:
        samples: one a seed, in any order.
        num_prompts: C, the prompts behind each seed's replicates; None where the quantity has none.
        prompts_shared: whether all seeds were measured on the same prompts. Without replicates it does not matter.
        num_resamples: of the bootstrap over seeds. The expanded tails for 8 seeds hold 0.6 % of the resamples: 10,000
            leave 57 there, while with 2,000 the luck of the draw costs coverage.
        seed: of that bootstrap.

    Raises:
        DataError: no samples, values that are not finite, or replicates that do not fit together.
        ConfigError: replicates without num_prompts.
    Source:
        Zou and Donner 2008, Statistics in Medicine 27(10) (MOVER). Owen 2007, The pigeonhole bootstrap, Annals of
        Applied Statistics 1(2) (shared prompts). Field and Welsh 2007, Bootstrapping clustered data, JRSS B 69(3) (own
        prompts). Miller 2024, Adding error bars to evals, arXiv:2411.00640 (prompts as clusters, paired differences).
    """
    _check(samples, num_prompts, prompts_shared)
    ordered = sorted(samples, key=_order)  # the bootstrap draws positions, and seeds must have no order
    values = np.array([sample.value for sample in ordered])
    replicates = [sample.replicates for sample in ordered if sample.replicates is not None]
    # Own prompts need no replicates: their error is in the spread over seeds, except where there is one seed only.
    crossed = np.stack(replicates) if replicates and (prompts_shared or len(values) == 1) else None
    spread = _spread(values, crossed, num_prompts or 0, num_resamples, seed)
    limits = spread if isinstance(spread, str) else _limits(spread)
    method = _method(len(values), num_prompts, shared=prompts_shared, resampled=bool(replicates))
    centre = _mean(values)
    if isinstance(spread, str) or isinstance(limits, str):
        return Estimate(centre, None, None, len(values), num_prompts, method, str(limits), None)
    return Estimate(centre, *limits, len(values), num_prompts, method, None, spread)


def _spread(
    values: FloatArray, crossed: FloatArray | None, num_prompts: int, num_resamples: int, seed: int
) -> TInterval | PercentileInterval | str:
    """Compute what the interval is made of, or say why there is none.

    Args:
        values: (S,) of the seeds.
        crossed: (S, B) replicates with common prompt weights; None where the spread over seeds says everything.
        num_prompts: C behind `crossed`.
        num_resamples: of the bootstrap over seeds.
        seed: of that bootstrap.
    """
    if crossed is None:
        return _over_seeds(values, num_resamples, seed)
    num_seeds, centre = len(values), _mean(values)
    bootstrap = num_seeds >= BOOTSTRAP_FROM_SEEDS
    replicates = _defined(_draw(crossed, num_resamples, seed) if bootstrap else crossed.mean(axis=0))
    if num_prompts < 2 or len(replicates) < 2:
        return _ONE_PROMPT if num_prompts < 2 else _UNBOUNDED
    if num_seeds == 1 or bootstrap:
        return PercentileInterval(centre, replicates, min(num_prompts, num_seeds) if bootstrap else num_prompts)
    over_prompts = Component(spread_variance(replicates) * num_prompts / (num_prompts - 1), num_prompts - 1)
    return TInterval(centre, (_seed_component(values), over_prompts))


def _over_seeds(values: FloatArray, num_resamples: int, seed: int) -> TInterval | PercentileInterval | str:
    if len(values) == 1:
        return _NO_SPREAD
    if len(values) < BOOTSTRAP_FROM_SEEDS or np.ptp(values) == 0:
        return TInterval(_mean(values), (_seed_component(values),))
    return PercentileInterval(_mean(values), _draw(values[:, None], num_resamples, seed), len(values))


def _seed_component(values: FloatArray) -> Component:
    return Component(spread_variance(values) / len(values), len(values) - 1)


def _limits(spread: TInterval | PercentileInterval) -> tuple[float, float] | str:
    """The 95 % interval, or why there is none: it has no bound, or no width."""
    bounds = spread.bounds(0.05)
    if bounds is None or not np.isfinite(bounds).all():
        return _UNBOUNDED
    return _CONSTANT if bounds[0] == bounds[1] else bounds


def _draw(crossed: FloatArray, num_resamples: int, seed: int) -> FloatArray:
    """(num_resamples,) means of S drawn seeds, all under one drawn replicate of the prompts: (S, B) -> (R,)."""
    num_seeds, num_replicates = crossed.shape
    rng = np.random.default_rng(seed)
    seeds = rng.integers(num_seeds, size=(num_resamples, num_seeds))
    prompts = rng.integers(num_replicates, size=(num_resamples, 1))
    drawn: FloatArray = crossed[seeds, prompts].mean(axis=1)
    return drawn


def _defined(replicates: FloatArray) -> FloatArray:
    return replicates[~np.isnan(replicates)]


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if np.ptp(values) else float(values[0])  # equal values keep their last digit


def _order(sample: SeedSample) -> tuple[float, float]:
    return sample.value, 0.0 if sample.replicates is None else float(sample.replicates.sum())


def _check(samples: Sequence[SeedSample], num_prompts: int | None, prompts_shared: bool) -> None:
    undefined = sum(not np.isfinite(sample.value) for sample in samples)
    if not samples or undefined:
        raise DataError(
            f"estimate_over_seeds got {len(samples)} seeds, {undefined} of them with a value that is not finite: a "
            "mean over seeds needs a defined number of each. Look for a failed run, or leave those seeds out."
        )
    lengths = [None if sample.replicates is None else len(sample.replicates) for sample in samples]
    if (None in lengths and any(lengths)) or (prompts_shared and len(set(lengths)) > 1):
        raise DataError(
            f"estimate_over_seeds got seeds with {lengths} replicates over prompts (None: without): seeds can only be "
            "combined where all of them have replicates or none, and equally many where they share prompts. Resample "
            "every seed with the same call."
        )
    if any(lengths) and num_prompts is None:
        raise ConfigError(
            "estimate_over_seeds got replicates over prompts but num_prompts=None: the interval depends on how many "
            "prompts there are. Pass the number of prompts that were resampled."
        )


def _method(num_seeds: int, num_prompts: int | None, *, shared: bool, resampled: bool) -> str:
    if num_seeds == 1:
        if not resampled:
            return "One seed; no interval."
        return f"One seed; bootstrap over {num_prompts} prompts. The spread over seeds is not in it."
    bootstrap = num_seeds >= BOOTSTRAP_FROM_SEEDS
    mean = f"Mean of {num_seeds} seeds; "
    if resampled and shared:
        if bootstrap:
            return f"{mean}two-level bootstrap over seeds and the {num_prompts} prompts that they share."
        return f"{mean}Student t over seeds with a bootstrap over the {num_prompts} prompts that they share (MOVER)."
    over_seeds = f"{mean}{'bootstrap' if bootstrap else 'Student t interval'} over seeds"
    if resampled:
        return f"{over_seeds}, each with prompts of its own."
    return f"{over_seeds}." if num_prompts is None else f"{over_seeds}. The spread over prompts is not in it."
