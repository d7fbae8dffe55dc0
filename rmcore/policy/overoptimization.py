"""Over-optimisation curves: what the true reward does while a policy moves towards the proxy.

As the optimisation grows stronger, the proxy's reward rises by construction. The true reward rises with it at first;
where the proxy is flawed it turns (Gao, Schulman and Hilton 2023, arXiv:2210.10760). The strength is measured by KL, so
that best-of-n, the KL-regularised optimum and a trained policy share one axis.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.evaluation.uncertainty import ONE_PROMPT, GainValue, MetricValue, bounded_means, cluster_bootstrap
from rmcore.policy.sampling.best_of_n import (
    best_of_n_kl,
    best_of_n_weights,
    by_unit,
    largest_kl,
    nominal_kl,
    pool_kl,
    pooled_deviation,
    reaching,
    samples_needed,
    strength_for,
    tilted_weights,
)

Method = Literal["best_of_n", "kl_optimum"]
METHODS: tuple[Method, ...] = ("best_of_n", "kl_optimum")
KL_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""KL of the points of the KL-regularised optimum, as shares of the largest of best-of-n."""

WITHIN_REACH = 0.9
"""Share of the largest KL among the samples that is asked of the optimum: beyond it one sample a prompt decides."""
LET_PASS = 1.01
"""Times the root of the KL that samples reach, up to which a plan is judged there: its rounding."""


@dataclass(frozen=True)
class CurvePoint:
    """One strength of optimisation.

    Attributes:
        setting: n of best-of-n, or the strength 1 / beta of the optimum (in 1 / reward).
        kl: nats from the policy that drew the samples, averaged over prompts; ties are taken into account.
        nominal_kl: log n - (n - 1) / n; None for the optimum.
        proxy: gain of the proxy's reward over the policy, in its standard deviations within prompts.
        gold: the same of the true reward, in its own. Its interval counts with one more prompt that was not seen, which
            loses or gains as much as the worst or the best judged sample of all (`bounded_means`); of few prompts it
            holds if no prompt is a disaster (`GainValue`).
    """

    setting: float
    kl: float
    nominal_kl: float | None
    proxy: MetricValue
    gold: GainValue


@dataclass(frozen=True)
class OptimizationPlan:
    """The gain and the fall that a curve predicts for an optimisation up to `kl` nats.

    Attributes:
        kl: planned, in nats.
        reached: nats that the plan is judged at: `kl`, or where rewards tie those of the curve's end, because best-of-n
            of as many samples as the plan needs goes no further. None where there are too few samples.
        gain: gain of the true reward there, between the points of the curve; without a value where there are too few
            samples. Its interval is that of `CurvePoint.gold`.
        fall: that gain minus the highest one before it, at most 0; with an interval that excludes zero the true reward
            turned before the plan. The highest was chosen on the same prompts, as in `Overoptimization.fall`.
        worst: deviations by which the worst judged sample is below its prompt's mean; what a disaster that was not
            seen is taken to lose at most.
        num_telling: independent units of prompts whose samples the judge tells apart.
        num_short: prompts that were left out because they have fewer samples than the plan needs.
        by_prompt: the prompts' gains at the plan, in the order of the pools; None of those left out.
    """

    kl: float
    reached: float | None
    gain: GainValue
    fall: GainValue
    worst: float
    num_telling: int
    num_short: int
    by_prompt: tuple[float | None, ...]


@dataclass(frozen=True)
class Overoptimization:
    """A curve, and whether the true reward turned within it.

    Attributes:
        method: how the policy was optimised.
        points: from weak to strong.
        best: index of the point of the highest gain of the true reward.
        fall: gain of the true reward at the last point minus that at `best`; with an interval that excludes zero the
            true reward turned. `best` was chosen on the same prompts, so the fall looks a little larger than it is.
        num_prompts: prompts that the curve is of: those that have the samples that the plan needs.
        num_samples: samples in all.
        plan: what the curve says of the planned KL.
    """

    method: Method
    points: tuple[CurvePoint, ...]
    best: int
    fall: MetricValue
    num_prompts: int
    num_samples: int
    plan: OptimizationPlan

    @property
    def turned(self) -> bool:
        """Whether the true reward fell for certain (95 %) from its highest point to the last."""
        return self.fall.ci_high is not None and self.fall.ci_high < 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"turned": self.turned}


def overoptimization(
    proxy: Sequence[FloatArray],
    gold: Sequence[FloatArray],
    *,
    planned_kl: float,
    method: Method = "best_of_n",
    units: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Overoptimization:
    """The curve of one proxy on pools of samples, of the prompts that have those which the plan needs (`reaching`).

    Args:
        proxy: rewards of the samples of each prompt by the reward model, one array a prompt, of four or more, finite.
        gold: rewards of the same samples by the judge that counts.
        planned_kl: nats that the policy is to be moved by.
        method: best of 1, 2, 4 ... n samples of a prompt, or the KL-regularised optimum at the same range of KL.
        units: number of each prompt's independent unit, the same for one topic; left out, each is one of its own.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Raises:
        ConfigError: no sample of any prompt differs from the others.
    """
    # 1. The prompts that have the samples which the plan needs, in units of their own.
    needed, sizes = samples_needed(planned_kl), [len(pool) for pool in proxy]
    kept = reaching(sizes, min(max(sizes), needed))
    proxy, gold = ([pool for pool, is_kept in zip(pools, kept, strict=True) if is_kept] for pools in (proxy, gold))
    scaled, judged = _scaled(proxy, "proxy"), _scaled(gold, "gold")
    of_unit = None if units is None else np.asarray(units)[kept]

    # 2. What each prompt adds to the averages over prompts at each strength.
    counts = _counts(min(map(len, proxy)))
    path = (_best_of_n_path if method == "best_of_n" else _optimum_path)(scaled, counts)
    gains = [_gains_along(path.weights, pools) for pools in (scaled, judged)]
    apart = [pool - pool.mean() for pool in judged]
    curve = _Curve(
        kl=by_unit(path.kl, of_unit),
        proxy=by_unit(gains[0], of_unit),
        gold=by_unit(gains[1], of_unit),
        bounds=(min(float(pool.min()) for pool in apart), max(float(pool.max()) for pool in apart)),
        num_samples=sum(map(len, proxy)),
        num_resamples=num_resamples,
        seed=seed,
    )

    # 3. The plan, between two points of the curve.
    telling = by_unit(np.array([float(np.ptp(pool) > 0) for pool in gold]), of_unit)
    at = curve.line_at(planned_kl, is_bound=counts[-1] >= needed)
    by_prompt = iter([] if at is None else (gains[1] @ at).tolist())
    plan = OptimizationPlan(
        kl=planned_kl,
        reached=None if at is None else min(planned_kl, float(curve.kl.mean(axis=0)[-1])),
        **curve.planned(planned_kl, at),
        worst=-curve.bounds[0],
        num_telling=int(np.count_nonzero(telling)),
        num_short=int(np.count_nonzero(~kept)),
        by_prompt=tuple(next(by_prompt, None) if is_kept else None for is_kept in kept),
    )
    return curve.measured(method, path.settings, path.nominal_kl, len(proxy), plan)


class _Path(NamedTuple):
    """How pools are re-weighted at P strengths, from none to the largest.

    settings: (P,) see `CurvePoint.setting`.
    weights: by strength those of each pool's samples.
    kl: (prompts, P) nats.
    nominal_kl: (P,) see `CurvePoint.nominal_kl`.
    """

    settings: list[float]
    weights: list[list[FloatArray]]
    kl: FloatArray
    nominal_kl: list[float | None]


def _best_of_n_path(pools: Sequence[FloatArray], counts: Sequence[int]) -> _Path:
    return _Path(
        [float(n) for n in counts],
        [[best_of_n_weights(pool, n) for pool in pools] for n in counts],
        np.array([[best_of_n_kl(pool, n) for n in counts] for pool in pools]),
        [nominal_kl(n) for n in counts],
    )


def _optimum_path(pools: Sequence[FloatArray], counts: Sequence[int]) -> _Path:
    """The KL-regularised optimum over the range of KL that best-of-n has."""
    most = float(np.mean([best_of_n_kl(pool, counts[-1]) for pool in pools]))
    most = min(most, WITHIN_REACH * largest_kl(pools))
    settings = [0.0, *(strength_for(pools, share * most) for share in KL_SHARES)]
    weights = [[tilted_weights(pool, strength) for pool in pools] for strength in settings]
    kl = np.array([[pool_kl(weight) for weight in row] for row in weights]).T
    return _Path(settings, weights, kl, [None] * len(settings))


def _gains_along(weights: Sequence[Sequence[FloatArray]], pools: Sequence[FloatArray]) -> FloatArray:
    """Gains over the policy, (prompts, P)."""
    gains = np.array(
        [[weight @ pool - pool.mean() for weight, pool in zip(row, pools, strict=True)] for row in weights]
    ).T
    gains[:, 0] = 0.0  # of the policy itself, up to rounding
    return gains


@dataclass(frozen=True)
class _Curve:
    """The parts that each of U independent units adds to the averages at P points, (U, P) each.

    bounds: deviations of the worst and the best judged sample from the mean of their prompts: what a unit's gain is
        between.
    num_resamples, seed: of its intervals.
    """

    kl: FloatArray
    proxy: FloatArray
    gold: FloatArray
    bounds: tuple[float, float]
    num_samples: int
    num_resamples: int
    seed: int

    def measured(
        self,
        method: Method,
        settings: Sequence[float],
        nominal: Sequence[float | None],
        num_prompts: int,
        plan: OptimizationPlan,
    ) -> Overoptimization:
        """The curve with its points."""
        best = int(np.argmax(self.gold.mean(axis=0)))

        def statistics(weights: FloatArray) -> dict[str, FloatArray]:
            weights = weights / weights.sum(axis=1, keepdims=True)
            mean_proxy, mean_gold = weights @ self.proxy, weights @ self.gold
            values = {f"proxy {i}": mean_proxy[:, i] for i in range(len(settings))}
            values["fall"] = mean_gold[:, -1] - mean_gold[:, best]
            return values

        drawn = cluster_bootstrap(statistics, len(self.kl), num_resamples=self.num_resamples, seed=self.seed)

        def value(name: str) -> MetricValue:
            return drawn.value(name, num_prompts=len(self.kl), num_pairs=self.num_samples)

        golds = self._gains(self.gold)
        points = tuple(
            CurvePoint(setting, float(self.kl[:, i].mean()), nominal[i], value(f"proxy {i}"), golds[i])
            for i, setting in enumerate(settings)
        )
        return Overoptimization(method, points, best, value("fall"), num_prompts, self.num_samples, plan)

    def line_at(self, planned_kl: float, *, is_bound: bool) -> FloatArray | None:
        """Weights (P,) of the points in a gain at the planned KL, by a straight line in its root; None beyond the end.

        Args:
            planned_kl: nats.
            is_bound: whether there are as many samples as the plan needs, so that ties alone keep the curve from it,
                and its end is as far as the plan goes.
        """
        distance, planned = np.sqrt(self.kl.mean(axis=0)), math.sqrt(planned_kl)
        if planned >= LET_PASS * distance[-1] and not is_bound:
            return None
        position = np.interp(planned, distance, np.arange(len(distance)))
        return np.maximum(0.0, 1 - np.abs(np.arange(len(distance)) - position))

    def planned(self, planned_kl: float, at: FloatArray | None) -> dict[str, GainValue]:
        """Gain and fall of a plan of so many nats; `at` is of `line_at`."""
        mean_kl, mean_gold = self.kl.mean(axis=0), self.gold.mean(axis=0)
        if at is None:
            short = f"the samples reach {float(mean_kl[-1]):.3g} nats, {planned_kl:g} are planned; draw more of each"
            none = GainValue(None, None, None, self.num_samples, short)
            return {"gain": none, "fall": none}
        before = mean_kl < planned_kl
        highest = int(np.argmax(np.where(before, mean_gold, -np.inf)))  # the policy itself is always before it
        there = self.gold @ at
        gain, fall = self._gains(np.column_stack([there, there - self.gold[:, highest]]))
        return {"gain": gain, "fall": fall.at_most(0.0)}

    def _gains(self, gains: FloatArray) -> list[GainValue]:
        """Means of gains (U, Q) with their intervals; of a gain that is none by definition it has no width."""
        is_none = ~gains.any(axis=0)
        lowest, highest = (np.where(is_none, 0.0, bound) for bound in self.bounds)
        low, high = bounded_means(gains, lowest, highest, num_resamples=self.num_resamples, seed=self.seed)
        return [
            GainValue(value, None, None, self.num_samples, ONE_PROMPT)
            if len(gains) < 2
            else GainValue.of(value, float(low[i]), float(high[i]), num=self.num_samples, num_prompts=len(gains))
            for i, value in enumerate(gains.mean(axis=0).tolist())
        ]


def _scaled(pools: Sequence[FloatArray], name: str) -> list[FloatArray]:
    """Rewards in standard deviations within prompts."""
    try:
        deviation = pooled_deviation(pools)
    except ConfigError as error:
        raise ConfigError(f"the {name} rewards: {error}") from error
    return [pool / deviation for pool in pools]


def _counts(most: int) -> list[int]:
    """1, 2, 4, 8 ... and the largest."""
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return powers if powers[-1] == most else [*powers, most]
