"""The parts of readiness: measurements of a reward model on samples of the policy that will be optimised.

All of them are over one policy's samples of the same prompts, scored by the reward model and by the judge that counts
(the true reward, people, a stronger model). Each has a 95 % interval over prompts. Nothing here depends on the scale
or the offset of the rewards: no optimiser that ranks does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.evaluation.uncertainty import MetricValue, bounded_mean, cluster_bootstrap
from rmcore.policy.overoptimization import Method, overoptimization
from rmcore.policy.sampling.best_of_n import by_unit, reaching
from rmcore.readiness.rank import win_rates, without_length

DECIDING = 16
"""n of the win rate that decides; of fewer samples than one more than that, as many as there are opponents for."""
ACCURACIES = frozenset(("on_policy_accuracy", "hard_accuracy"))
_LEAST_CEILING = 0.5 + 1e-6
"""Ceiling of a judge that may be a coin: the corrected accuracy may be anything then, and its interval says so."""


@dataclass(frozen=True, slots=True)
class JudgedPools:
    """Samples of C prompts: what the reward model gives them, what the judge gives them, and how long they are.

    rewards, judged, lengths: one (K,) array a prompt, in logits, in the judge's unit, in characters or words; finite,
        and of four samples or more.
    """

    rewards: Sequence[FloatArray]
    judged: Sequence[FloatArray]
    lengths: Sequence[FloatArray]

    @property
    def num_samples(self) -> int:
        """In all."""
        return sum(len(pool) for pool in self.rewards)


def on_policy_parts(
    pools: JudgedPools,
    *,
    judge_ceiling: float = 1.0,
    judge_ceiling_error: float = 0.0,
    units: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, MetricValue]:
    """Measure everything that needs samples, by name.

    Args:
        pools: the samples.
        judge_ceiling: probability, in (0.5, 1], that the judge agrees with itself, or with the truth, on a pair; 1 for
            a judge without noise. Accuracy is corrected for it: (a - (1 - c)) / (2 c - 1), what it would be without
            the noise of independent wrong answers.
        judge_ceiling_error: standard error of judge_ceiling, which widens the intervals of what is corrected by it.
        units: number of each prompt's independent unit, the same for one topic; left out, each is one of its own.
        num_resamples: of the bootstrap over units.
        seed: of the bootstrap.

    Returns:
        on_policy_accuracy; win_rate_N for N of `DECIDING`, or the most that there are opponents for in the prompts that
        count (`reaching`); hard_accuracy.
    """
    ratios = {
        "on_policy_accuracy": accuracies_by_prompt(pools, only_hard=False),
        "hard_accuracy": accuracies_by_prompt(pools, only_hard=True),
    }
    sizes = [len(pool) for pool in pools.rewards]
    most = min(size for size, kept in zip(sizes, reaching(sizes, DECIDING + 1), strict=True) if kept)
    n = min(DECIDING, most - 1)
    ratios[f"win_rate_{n}"] = win_rates(pools.rewards, pools.judged, n)
    ratios = {name: (by_unit(top, units), by_unit(bottom, units)) for name, (top, bottom) in ratios.items()}

    # The ceiling of the point estimate, then one a resample: it was estimated from other pairs, so independently.
    drawn = judge_ceiling + judge_ceiling_error * np.random.default_rng([seed, 1]).standard_normal(num_resamples)
    ceilings = iter([judge_ceiling, *np.clip(drawn, _LEAST_CEILING, 1)])

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        values = {}
        ceiling = np.fromiter(islice(ceilings, len(weights)), dtype=np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            for name, (top, bottom) in ratios.items():
                values[name] = (weights @ top) / (weights @ bottom)
                if name in ACCURACIES:
                    # Without the judge's errors.
                    values[name] = np.clip((values[name] - (1 - ceiling)) / (2 * ceiling - 1), 0, 1)
        return values

    carrying = {name: int(np.count_nonzero(bottom)) for name, (_, bottom) in ratios.items()}
    num_units = len(ratios["hard_accuracy"][0])
    # Where all prompts say the same, a share has an exact interval; undoing a judge's noise leaves no share.
    shares = {name for name in ratios if name.startswith("win_rate_")}
    shares |= ACCURACIES if judge_ceiling == 1 and not judge_ceiling_error else frozenset()
    resampled = cluster_bootstrap(compute, num_units, num_resamples=num_resamples, seed=seed)
    parts = {
        name: MetricValue(None, None, None, 0, "no two samples of a prompt that the judge tells apart allow it")
        if math.isnan(value)
        else resampled.value(name, num_prompts=carrying[name], num_pairs=pools.num_samples, is_share=name in shares)
        for name, value in resampled.point.items()
    }
    return {
        name: _with_unseen_unit(value, *ratios[name], num_resamples, seed) if name.startswith("win_rate_") else value
        for name, value in parts.items()
    }


def gains_by_length(
    pools: JudgedPools,
    *,
    method: Method,
    planned_kl: float,
    units: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, MetricValue]:
    """Measure what of the gain at a plan is length: a judge that prefers length makes a model of it look good.

    Args:
        pools: the samples.
        method: of the plan.
        planned_kl: nats.
        units: see `on_policy_parts`.
        num_resamples: of the intervals.
        seed: of the intervals.

    Returns:
        gain_without_length, of the judge's scores less what log length explains (`without_length`), in their own
        standard deviations within prompts, and gain_of_longest, of choosing by length in place of the reward; neither
        where the samples of a prompt are as long as one another.
    """
    if not any(np.ptp(pool) > 0 for pool in pools.lengths):
        return {}

    def gain(proxy: Sequence[FloatArray], judged: Sequence[FloatArray]) -> MetricValue:
        return overoptimization(
            proxy, judged, method=method, planned_kl=planned_kl, units=units, num_resamples=num_resamples, seed=seed
        ).plan.gain

    try:
        controlled = without_length(pools.judged, pools.lengths)
        return {
            "gain_without_length": gain(pools.rewards, controlled),
            "gain_of_longest": gain(pools.lengths, pools.judged),
        }
    except ConfigError as error:  # scores that are nothing but length
        unmeasured = MetricValue(None, None, None, 0, str(error))
        return {"gain_without_length": unmeasured, "gain_of_longest": unmeasured}


def _with_unseen_unit(
    rate: MetricValue, wins: FloatArray, counted: FloatArray, num_resamples: int, seed: int
) -> MetricValue:
    """A win rate whose interval counts with one more unit where every choice loses, or wins (`bounded_means`).

    Where 3 % of prompts are disasters, a bootstrap over 50 held the rate in 91 % of the evaluations.
    """
    if rate.value is None or rate.ci_low is None or rate.ci_high is None:
        return rate
    rates = wins[counted > 0] / counted[counted > 0]  # (U,)
    low, high = bounded_mean(rates, 0.0, 1.0, num_resamples=num_resamples, seed=seed)
    return replace(rate, ci_low=min(rate.value, low), ci_high=max(rate.value, high))


def accuracies_by_prompt(pools: JudgedPools, *, only_hard: bool) -> tuple[FloatArray, FloatArray]:
    """By prompt: accuracy over pairs of samples that the judge tells apart, and whether there are any (1 or 0).

    Hard pairs are those whose better sample is the shorter one. Equal rewards are half right.
    """
    accuracies = np.zeros(len(pools.rewards))
    for index, (reward, judged, length) in enumerate(zip(pools.rewards, pools.judged, pools.lengths, strict=True)):
        better = judged[:, None] > judged[None, :]
        if only_hard:
            better &= length[:, None] < length[None, :]
        agreement = (1 + np.sign(reward[:, None] - reward[None, :])) / 2
        accuracies[index] = agreement[better].mean() if better.any() else np.nan
    known = ~np.isnan(accuracies)
    return np.where(known, accuracies, 0.0), known.astype(np.float64)
