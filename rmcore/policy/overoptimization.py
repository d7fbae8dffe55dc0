"""Over-optimisation curves: what the gold reward does while a policy moves towards the proxy.

As the optimisation grows stronger, the proxy's reward rises by construction. The gold reward rises with it at first;
where the proxy is flawed it turns (Gao, Schulman and Hilton 2023, arXiv:2210.10760). The strength is measured by KL, so
that best-of-n, the KL-regularised optimum and a trained policy share one axis.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, metric_value
from rmcore.policy.sampling.best_of_n import (
    best_of_n_kl,
    best_of_n_weights,
    largest_kl,
    nominal_kl,
    pool_kl,
    pooled_deviation,
    strength_for,
    tilted_weights,
)

Method = Literal["best_of_n", "kl_optimum"]
METHODS: tuple[Method, ...] = ("best_of_n", "kl_optimum")
KL_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""KL of the points of the KL-regularised optimum, as shares of the largest of best-of-n."""

WITHIN_REACH = 0.9
"""Share of the largest KL among the samples that is asked of the optimum: beyond it one sample a prompt decides."""
HEADROOM_CAP = 2.0
"""A fitted peak at twice the planned distance, or none before it, counts as this."""
_SHARES = np.linspace(0.0, HEADROOM_CAP, 201)


@dataclass(frozen=True)
class CurvePoint:
    """One strength of optimisation.

    Attributes:
        setting: n of best-of-n, or the strength 1 / beta of the optimum (in 1 / reward).
        kl: nats from the policy that drew the samples, averaged over prompts; ties are taken into account.
        nominal_kl: log n - (n - 1) / n; None for the optimum.
        proxy: gain of the proxy's reward over the policy, in its standard deviations within prompts.
        gold: the same of the gold reward, in its own.
    """

    setting: float
    kl: float
    nominal_kl: float | None
    proxy: MetricValue
    gold: MetricValue


@dataclass(frozen=True)
class Fit:
    """R(d) = d (alpha - beta d), or d (alpha - beta log d), to the gold gains; d is the root of the KL.

    Attributes:
        form: square or logarithm.
        alpha, beta: coefficients.
        peak: d at which R is largest; without a value where the fitted gain never turns.
        error: root mean square of what the fit leaves, in standard deviations.
    """

    form: Literal["square", "logarithm"]
    alpha: MetricValue
    beta: MetricValue
    peak: MetricValue
    error: float


@dataclass(frozen=True)
class OptimizationPlan:
    """The gain and the fall that a curve predicts for an optimisation up to `kl` nats.

    Attributes:
        kl: planned, in nats.
        gain: gold gain there, between the points of the curve; without a value where the curve ends before.
        fall: that gain minus the highest one before it, at most 0; with an interval that excludes zero the gold reward
            turned before the plan. The highest was chosen on the same prompts, as in `Overoptimization.fall`.
        headroom: d at which the fitted gain is largest over the planned d: below 1 the plan goes beyond the peak, 0 is
            a gold reward that falls from the start. Looked for up to `HEADROOM_CAP`, beyond the curve by the fit. Its
            interval knows nothing of how well either form fits, so it shows no turn: `fall` does.
    """

    kl: float
    gain: MetricValue
    fall: MetricValue
    headroom: MetricValue


@dataclass(frozen=True)
class Overoptimization:
    """A curve, its fits, and whether the gold reward turned within it.

    Attributes:
        method: how the policy was optimised.
        points: from weak to strong.
        fits: both forms.
        best: index of the point of the highest gold gain.
        fall: gold gain at the last point minus that at `best`; with an interval that excludes zero the gold reward
            turned. `best` was chosen on the same prompts, which makes the fall look a little larger than it is.
        num_prompts: prompts with samples.
        num_samples: samples in all.
        plan: what the curve says of a planned KL, where one was named.
    """

    method: Method
    points: tuple[CurvePoint, ...]
    fits: tuple[Fit, ...]
    best: int
    fall: MetricValue
    num_prompts: int
    num_samples: int
    plan: "OptimizationPlan | None" = None

    @property
    def turned(self) -> bool:
        """Whether the gold reward fell for certain (95 %) from its highest point to the last."""
        return self.fall.ci_high is not None and self.fall.ci_high < 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"turned": self.turned}


def overoptimization(
    proxy: Sequence[FloatArray],
    gold: Sequence[FloatArray],
    *,
    method: Method = "best_of_n",
    max_n: int = 64,
    planned_kl: float | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Overoptimization:
    """The curve of one proxy on pools of samples.

    Args:
        proxy: rewards of the samples of each prompt by the reward model, one array a prompt.
        gold: rewards of the same samples by the judge that counts.
        method: best of 1, 2, 4 ... n, or the KL-regularised optimum at the same range of KL.
        max_n: largest n; at most the samples of the smallest pool.
        planned_kl: nats that the policy is to be moved by; left out, `plan` stays empty.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Raises:
        DataError: the pools do not fit each other, hold fewer than four samples or a reward that is not finite.
        ConfigError: no sample of any prompt differs from the others.
    """
    _check(proxy, gold)
    scaled, judged = _scaled(proxy, "proxy"), _scaled(gold, "gold")
    counts = _counts(min(max_n, *map(len, proxy)))
    if method == "best_of_n":
        settings = [float(n) for n in counts]
        weights = [[best_of_n_weights(pool, n) for pool in scaled] for n in counts]
        nominal: list[float | None] = [nominal_kl(n) for n in counts]
        kl = np.array([[best_of_n_kl(pool, n) for n in counts] for pool in scaled])
    else:
        most = float(np.mean([best_of_n_kl(pool, counts[-1]) for pool in scaled]))
        most = min(most, WITHIN_REACH * largest_kl(scaled))
        settings = [0.0, *(strength_for(scaled, share * most) for share in KL_SHARES)]
        weights = [[tilted_weights(pool, strength) for pool in scaled] for strength in settings]
        nominal = [None] * len(settings)
        kl = np.array([[pool_kl(one) for one in row] for row in weights]).T
    # kl and gains are (prompts, points): what each prompt adds to the averages over prompts.
    gains = [
        np.array([[one @ pool - pool.mean() for one, pool in zip(row, pools, strict=True)] for row in weights]).T
        for pools in (scaled, judged)
    ]
    for gain in gains:
        gain[:, 0] = 0.0  # of the policy itself, up to rounding
    return _curve(
        method, settings, nominal, kl, gains[0], gains[1], sum(map(len, proxy)), planned_kl, num_resamples, seed
    )


def _curve(
    method: Method,
    settings: Sequence[float],
    nominal: Sequence[float | None],
    kl: FloatArray,
    proxy: FloatArray,
    gold: FloatArray,
    num_samples: int,
    planned_kl: float | None,
    num_resamples: int,
    seed: int,
) -> Overoptimization:
    best = int(np.argmax(gold.mean(axis=0)))
    planned = None if planned_kl is None else math.sqrt(planned_kl)
    before = np.sqrt(kl.mean(axis=0)) < planned if planned is not None else np.zeros(len(settings), dtype=bool)
    highest = int(np.argmax(np.where(before, gold.mean(axis=0), -np.inf)))  # the policy itself is always before it

    def statistics(weights: FloatArray) -> dict[str, FloatArray]:
        weights = weights / weights.sum(axis=1, keepdims=True)
        mean_kl, mean_proxy, mean_gold = weights @ kl, weights @ proxy, weights @ gold
        found = {f"proxy {i}": mean_proxy[:, i] for i in range(len(settings))}
        found |= {f"gold {i}": mean_gold[:, i] for i in range(len(settings))}
        found["fall"] = mean_gold[:, -1] - mean_gold[:, best]
        for form in ("square", "logarithm"):
            found |= {f"{form} {name}": values for name, values in _fit(form, np.sqrt(mean_kl), mean_gold).items()}
            if planned is not None:
                found[f"{form} headroom"] = _headroom(form, found, planned)
        if planned is not None:
            found["planned gain"] = _between(np.sqrt(mean_kl), mean_gold, planned)
            found["planned fall"] = np.minimum(0.0, found["planned gain"] - mean_gold[:, highest])
        return found

    drawn = cluster_bootstrap(statistics, len(kl), num_resamples=num_resamples, seed=seed)

    def value(name: str, if_none: str = "the fitted gold reward never turns") -> MetricValue:
        point = drawn.point[name]
        if not math.isfinite(point):
            return MetricValue(None, None, None, num_samples, if_none)
        return metric_value(point, drawn.replicates.get(name), num_prompts=len(kl), num_pairs=num_samples)

    points = tuple(
        CurvePoint(setting, float(kl[:, i].mean()), nominal[i], value(f"proxy {i}"), value(f"gold {i}"))
        for i, setting in enumerate(settings)
    )
    forms: tuple[Literal["square", "logarithm"], ...] = ("square", "logarithm")
    fits = tuple(
        Fit(form, value(f"{form} alpha"), value(f"{form} beta"), value(f"{form} peak"), drawn.point[f"{form} error"])
        for form in forms
    )
    plan = None
    if planned_kl is not None:
        better = min(fits, key=lambda fit: fit.error).form
        short = (
            f"the samples reach {float(kl.mean(axis=0)[-1]):.3g} nats, {planned_kl:g} are planned; draw more of each"
        )
        gain, fall = value("planned gain", short), value("planned fall", short)
        plan = OptimizationPlan(planned_kl, gain, fall, value(f"{better} headroom"))
    return Overoptimization(method, points, fits, best, value("fall"), len(kl), num_samples, plan)


def _between(distance: FloatArray, gains: FloatArray, planned: float) -> FloatArray:
    """Gains (B, points) at one distance, by straight lines between the points; NaN beyond the last one.

    A resample's curve may end a hair before the plan where the whole one does not: a hundredth is let pass.
    """
    found = [
        np.interp(planned, d, g, right=g[-1] if planned < 1.01 * d[-1] else np.nan)
        for d, g in zip(distance, gains, strict=True)
    ]
    return np.array(found)


def _headroom(form: str, found: dict[str, FloatArray], planned: float) -> FloatArray:
    """Where a fitted gain (B,) is largest between 0 and `HEADROOM_CAP` times the planned distance, as a share of it."""
    d = np.maximum(_SHARES * planned, 1e-12)
    damping = np.log(d) if form == "logarithm" else d
    gains = d * (found[f"{form} alpha"][:, None] - found[f"{form} beta"][:, None] * damping)
    return np.asarray(_SHARES[np.argmax(gains, axis=1)])


def _fit(form: str, distance: FloatArray, gains: FloatArray) -> dict[str, FloatArray]:
    """Least squares through the origin for each row (B, points); the peak is infinite where nothing turns."""
    d = np.maximum(distance, 1e-12)
    damping: Callable[[FloatArray], FloatArray] = np.log if form == "logarithm" else np.asarray
    first, second = d, -d * damping(d)
    aa, ab, bb = (first * first).sum(1), (first * second).sum(1), (second * second).sum(1)
    ay, by = (first * gains).sum(1), (second * gains).sum(1)
    determinant = aa * bb - ab * ab
    alpha, beta = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    left = gains - alpha[:, None] * first - beta[:, None] * second
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        peak = np.exp(alpha / beta - 1) if form == "logarithm" else alpha / (2 * beta)
    return {
        "alpha": alpha,
        "beta": beta,
        "peak": np.where((beta > 0) & (peak > 0), peak, np.inf),
        "error": np.sqrt((left**2).mean(axis=1)),
    }


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


def _check(proxy: Sequence[FloatArray], gold: Sequence[FloatArray]) -> None:
    if not proxy or [len(pool) for pool in proxy] != [len(pool) for pool in gold]:
        raise DataError("every sample needs a reward of the proxy and one of the gold judge, and there must be some.")
    smallest = min(map(len, proxy))
    if smallest < 4:
        raise DataError(
            f"a prompt has {smallest} sample(s), and a curve needs at least 4 of each prompt; draw more, or leave that "
            "prompt out."
        )
    for name, pools in (("proxy", proxy), ("gold", gold)):
        bad = sum(int(np.count_nonzero(~np.isfinite(pool))) for pool in pools)
        if bad:
            raise DataError(f"{bad} of the {name} rewards are not finite numbers; score these samples again.")
