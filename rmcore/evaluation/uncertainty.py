"""How sure a number is: intervals and tests whose unit is the prompt, not the pair.

Pairs of one prompt share its difficulty, so they are not independent observations; resampling pairs gives intervals
that are too narrow (on 2,664 AlpacaEval pairs over 137 prompts by a factor of 1.7). Everything here therefore draws or
flips whole prompts. Statistics are functions of integer prompt weights, shape (B, C) for B resamples of C prompts:
weights of all ones give the point estimate, so a value and its interval come from the same code.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.progress import Report, silent

Compute = Callable[[FloatArray], dict[str, FloatArray]]
"""Prompt weights (B, C) -> named statistics (B,), NaN where undefined."""

_CHUNK_ELEMENTS = 2_000_000  # 16 MB per float64 temporary: bounded memory, and still long vectors
_ROUNDING = 1e-12  # of a value: sums in another order differ by less
_EXACT_LIMIT = 16  # 2^16 sign patterns are enumerated in milliseconds
ONE_PROMPT = "only one prompt: its pairs are not independent, so the spread over prompts cannot be estimated"
UNEVEN = (
    "a few prompts hold most of the pairs, so an unseen prompt with even more pairs could change the result; read "
    "accuracy_by_prompt, in which every prompt counts equally, or limit the pairs per prompt"
)
FEWEST_PROMPTS = 6
"""Fewest prompts for a plain percentile interval. No resample leaves the range of the C values, and for symmetric ones
that range holds the mean with a probability of only 1 - 2^(1 - C), below 95 % for fewer."""
FEWEST_SIZES = 10
"""Fewest prompts from which the tail of their sizes (pairs per prompt) is estimated."""
ORDINARY_SIZE = 8
"""Most pairs of a prompt that labelled sets are made of by design: up to there sizes are bounded, and have no tail."""
ALIKE_SIZES = 1.5
"""Largest ratio of two sizes at which fewer prompts than that still count as equally large."""
RARE_DISASTERS = 0.02
"""Share of prompts with large losses that the interval of a mean gain has to allow for."""
FEWEST_FOR_GAIN = math.ceil(math.log(0.05) / math.log(1 - RARE_DISASTERS))
"""149: so many prompts include a disaster of that share in 95 % of the evaluations. Of the 8 % of errors of an interval
that covers 92 %, 3 % remain for all other causes. (`unseen_share` of 149 prompts is `RARE_DISASTERS`.)"""
NO_INTERVAL = "too few prompts carry this metric: resamples leave it undefined or without bound"


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One number with its 95 % interval.

    `value` is None where the metric is undefined, the bounds are None where no interval can be given; `reason` then
    says why. `num` counts the pairs (or seeds) that the number is over.
    """

    value: float | None
    ci_low: float | None
    ci_high: float | None
    num: int
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: value, ci_low, ci_high, num, reason."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GainValue(MetricValue):
    """A mean gain over prompts; from few prompts its ends hold only if no prompt is a disaster, and are named so.

    A few prompts that lose much cancel the gain, and if none was drawn, nothing is known about their share. With
    `FEWEST_FOR_GAIN` prompts or more `ci_low` and `ci_high` are the interval; with fewer they are None, and the two
    fields below hold its ends.
    """

    low_if_no_disaster: float | None = None
    high_if_no_disaster: float | None = None

    @classmethod
    def of(cls, value: float, low: float, high: float, *, num: int, num_prompts: int) -> "GainValue":
        """A gain whose ends were measured on `num_prompts` independent prompts, `num` samples or pairs in all."""
        if num_prompts >= FEWEST_FOR_GAIN:
            return cls(value, low, high, num)
        reason = (
            f"up to {100 * unseen_share(num_prompts):.2g} % of all prompts may be disasters that these {num_prompts} "
            f"do not show; an interval takes {FEWEST_FOR_GAIN}, which leave {100 * RARE_DISASTERS:.2g} %"
        )
        return cls(value, None, None, num, reason, low, high)

    @classmethod
    def of_metric(cls, metric: MetricValue, num_prompts: int) -> MetricValue:
        """A value that `num_prompts` independent prompts gave, as a gain; as it is where it has no interval."""
        if metric.value is None or metric.ci_low is None or metric.ci_high is None:
            return metric
        return cls.of(metric.value, metric.ci_low, metric.ci_high, num=metric.num, num_prompts=num_prompts)

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Lower and upper end, whatever they are called."""
        return ends(self.to_dict())

    def at_most(self, highest: float) -> "GainValue":
        """The same with neither value nor ends above `highest`, which the gain cannot exceed."""
        record = self.to_dict()
        named = ("value", "ci_low", "ci_high", "low_if_no_disaster", "high_if_no_disaster")
        cut = {name: None if record[name] is None else min(highest, record[name]) for name in named}
        return GainValue(**record | cut)


def ends(item: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Ends of a record's interval; for a gain of few prompts, those that hold if no prompt is a disaster."""
    low, high = item["ci_low"], item["ci_high"]
    return item.get("low_if_no_disaster", low) if low is None else low, (
        item.get("high_if_no_disaster", high) if high is None else high
    )


def shown_gain(value: Mapping[str, Any], unit: str = "sd") -> str:
    """A gain with its interval, or its ends if no prompt is a disaster, as verdicts say it; or why there is none."""
    low, high = ends(value)
    if value["value"] is None:
        return f"not known ({value['reason']})"
    if low is None or high is None:
        return f"{value['value']:+.2f} {unit}"
    condition = " if no prompt is a disaster" if value["ci_low"] is None else ""
    return f"{value['value']:+.2f} {unit} ({low:+.2f} to {high:+.2f}{condition})"


@dataclass(frozen=True, slots=True)
class Resampled:
    """Point estimates and their (B,) bootstrap replicates, by name; no replicates where there is one prompt only."""

    point: Mapping[str, float]
    replicates: Mapping[str, FloatArray]

    def value(self, name: str, **options: Any) -> MetricValue:
        """One of them with its interval; options of `metric_value`."""
        return metric_value(self.point[name], self.replicates.get(name), **options)


def cluster_bootstrap(
    compute: Compute,
    num_prompts: int,
    *,
    num_resamples: int,
    seed: int,
    row_size: int | None = None,
    report: Report = silent,
) -> Resampled:
    """Bootstrap over prompts: a resample draws prompts with replacement, all pairs of a prompt together.

    The draw is a multinomial count per prompt, given to `compute` as weights in chunks of bounded memory.

    Args:
        compute: prompt weights (B, C) -> named statistics (B,).
        num_prompts: C, the number of clusters.
        num_resamples: B.
        seed: of the resampling; results do not depend on the chunking.
        row_size: longest row that `compute` allocates per resample, for example the number of pairs; default C.
        report: called with the resamples done and all of them after each chunk.

    Raises:
        ConfigError: num_prompts or num_resamples is below 1.
    Source:
        Field and Welsh 2007, Bootstrapping clustered data, JRSS B 69(3).
    """
    if num_prompts < 1 or num_resamples < 1:
        raise ConfigError(
            f"cluster_bootstrap got num_prompts={num_prompts}, num_resamples={num_resamples}: nothing can be drawn. "
            "Pass at least one prompt and one resample."
        )
    point = {name: float(values[0]) for name, values in compute(np.ones((1, num_prompts))).items()}
    if num_prompts == 1:
        return Resampled(point, {})
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // max(num_prompts, row_size or 0))
    parts: dict[str, list[FloatArray]] = {name: [] for name in point}
    for start in range(0, num_resamples, rows):
        for name, values in compute(_draw_weights(rng, min(rows, num_resamples - start), num_prompts)).items():
            parts[name].append(values)
        report(min(start + rows, num_resamples), num_resamples, "resamples")
    return Resampled(point, {name: np.concatenate(chunks) for name, chunks in parts.items()})


def _draw_weights(rng: np.random.Generator, rows: int, num_prompts: int) -> FloatArray:
    """(rows, C) multinomial counts. Counting uniform draws is several times faster than `Generator.multinomial`."""
    draws = rng.integers(num_prompts, size=(rows, num_prompts), dtype=np.int64)
    draws += np.arange(rows)[:, None] * num_prompts
    counts = np.bincount(draws.ravel(), minlength=rows * num_prompts)
    return counts.reshape(rows, num_prompts).astype(np.float64)


def percentile_interval(replicates: FloatArray, num_prompts: float, level: float = 0.95) -> tuple[float, float] | None:
    """Expanded percentile interval of bootstrap replicates; None where none of them is defined or an end is infinite.

    Plain percentile intervals are too short for few clusters: the bootstrap spread lacks the factor sqrt(C / (C - 1))
    and normal instead of t quantiles. The tail is widened to alpha' with z(alpha'/2) = sqrt(C / (C - 1))
    t_{C-1}(alpha/2), which vanishes for many prompts. Of prompts of unequal size C is their effective number
    (`effective_prompts`). NaN replicates (a resample without any pair of the metric) are
    left out.

    Source:
        Hesterberg 2015, What teachers should know about the bootstrap, The American Statistician 69(4),
        arXiv:1411.5279, "expanded percentile interval".
    """
    defined = np.sort(replicates[~np.isnan(replicates)])
    if num_prompts <= 1 or len(defined) == 0:
        return None
    quantile = special.stdtrit(num_prompts - 1, 0.5 - level / 2) * np.sqrt(num_prompts / (num_prompts - 1))
    tail = float(special.ndtr(quantile))
    last = len(defined) - 1
    # Order statistics, rounded outwards: no arithmetic between infinities, and never shorter than the interpolated
    # ones.
    low, high = defined[int(np.floor(tail * last))], defined[int(np.ceil((1 - tail) * last))]
    return (float(low), float(high)) if np.isfinite(low) and np.isfinite(high) else None


def interval_p(replicates: FloatArray | None, num_prompts: float) -> float | None:
    """Two-sided p value that a statistic is 0: the level at which `percentile_interval` begins to contain it.

    None where no interval can be given. At least that of one replicate in B beyond zero.
    """
    defined = np.empty(0) if replicates is None else replicates[~np.isnan(replicates)]
    if num_prompts <= 1 or len(defined) == 0:
        return None
    beyond = min(int((defined <= 0).sum()), int((defined >= 0).sum()))
    normal = special.ndtri(min(0.5, (1 + beyond) / (1 + len(defined))))
    return float(min(1.0, 2 * special.stdtr(num_prompts - 1, normal * np.sqrt((num_prompts - 1) / num_prompts))))


def effective_prompts(sizes: FloatArray) -> float:
    """Effective number of prompts of (C,) sizes: as many equal ones give the same variance; (sum w)^2 / sum w^2.

    Source:
        Kish 1965, Survey Sampling, section 8.2.
    """
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def heaviest_tail(sizes: FloatArray) -> float:
    """Upper 90 % limit of 1 / a, where (C,) sizes of prompts have a power-law tail of index a.

    If few prompts have most of the pairs, a sample that lacks the largest kind looks even, and a mean over pairs misses
    what those would contribute. Hill's estimate of 1 / a is the mean of the k = C / 5 exponential log excesses of the
    largest sizes, so 2 k of them over the estimate are chi-squared. At 1 and above no mean over pairs is shown to
    exist, at 1/2 and above no variance. 0 for sizes that have a bound: equal ones, none above `ORDINARY_SIZE`, or half
    of the k as large as the largest, which the continuous sizes of a power law never are. Infinite for fewer than
    `FEWEST_SIZES` unequal ones, because nothing finite covers for so few (simulated: a third to a half of the intervals
    miss at an index of 1.2 to 1.4).

    Source:
        Hill 1975, A simple general approach to inference about the tail of a distribution, Annals of Statistics 3(5).
    """
    falling = -np.sort(-sizes)
    if len(sizes) < FEWEST_SIZES:
        return 0.0 if falling[0] <= ALIKE_SIZES * falling[-1] else np.inf
    top = len(sizes) // 5
    if falling[0] <= ORDINARY_SIZE or falling[top // 2] == falling[0]:
        return 0.0
    excess = float(np.log(falling[:top] / falling[top]).sum())
    return 2 * excess / float(special.chdtri(2 * top, 0.9))  # chdtri inverts the upper tail


def unseen_weight(sizes: FloatArray, tail: float) -> float:
    """Share of all pairs that prompts larger than every one of (C,) prompts may have.

    With an index a = 1 / `tail`, on average one of C further prompts is larger than the largest of these, M, and has
    M a / (a - 1) pairs in expectation. If the variance exists (a above 2), resampling already shows part of the effect
    of such prompts, and more of it the faster sizes fall off. They then count 2 / a, so equal sizes add nothing.
    """
    beyond = min(1.0, 2 * tail) * float(sizes.max()) / (1 - tail)
    return beyond / (float(sizes.sum()) + beyond)


def metric_value(
    value: float,
    replicates: FloatArray | None,
    *,
    num_prompts: float,
    num_pairs: int,
    is_share: bool = False,
    is_difference: bool = False,
    is_across: bool = False,
    sizes: FloatArray | None = None,
) -> MetricValue:
    """A defined value with its interval from (B,) replicates, or with the reason why there is none.

    Resampling cannot show what was never seen: where all replicates are alike, an interval would have no width and seem
    sure. Shares and their differences get `with_unseen_prompts` there, and at both ends where there are fewer than
    `FEWEST_PROMPTS`. Other statistics of so few have the interval of Student's t at least; they may be alike by
    definition, as the gain of a policy over itself.

    Args:
        value: the point estimate.
        replicates: of the bootstrap over prompts; None where there was one prompt only.
        num_prompts: prompts that carry the metric, or their effective number if their weights differ.
        num_pairs: pairs that it is over.
        is_share: whether it is a mean of what lies between 0 and 1.
        is_difference: whether it is a difference of two shares, or a share minus the better of others.
        is_across: whether it is a share of comparisons between sides of any two prompts, as the area under the ROC
            curve is: one of the two may be a prompt that was not seen.
        sizes: (C,) pairs of each prompt that carries the metric, where it weighs prompts by them: the interval is
            expanded for their effective number, and that of a share or a difference holds what prompts larger than
            all of these may say, which is all wrong or all right. There is none where a few prompts hold most of the
            pairs: where no mean over pairs is shown to exist, and of what has no bounds, no variance (`heaviest_tail`).
    """
    if num_prompts <= 1 or replicates is None:
        return MetricValue(value, None, None, num_pairs, ONE_PROMPT)
    bounded, lowest = is_share or is_difference, -1.0 if is_difference else 0.0
    tail = 0.0 if sizes is None else heaviest_tail(sizes)
    if tail >= (1 if bounded else 1 / 2):
        return MetricValue(value, None, None, num_pairs, UNEVEN)
    effective = num_prompts if sizes is None else effective_prompts(sizes)
    interval = percentile_interval(replicates, effective)
    if interval is None:
        return MetricValue(value, None, None, num_pairs, NO_INTERVAL)
    low, high = interval
    few = effective < FEWEST_PROMPTS
    if few:  # Student's t: resamples have (C - 1) / C of the variance of the mean
        spread = np.nanstd(replicates) * np.sqrt(effective / (effective - 1))
        half = float(-special.stdtrit(effective - 1, 0.025) * spread)
        low, high = min(low, value - half), max(high, value + half)
        if not np.isfinite(half):
            return MetricValue(value, None, None, num_pairs, NO_INTERVAL)
    if bounded and (few or high - low <= _ROUNDING * max(abs(low), abs(high))):
        # Prompts that were not seen may be all wrong or all right.
        low, _ = with_unseen_prompts(max(low, lowest), effective, lowest)
        _, high = with_unseen_prompts(min(high, 1.0), effective, lowest)
    if bounded and sizes is not None:
        unseen = unseen_weight(sizes, tail)
        unseen = 1 - (1 - unseen) ** 2 if is_across else unseen
        low, high = low - unseen * (low - lowest), high + unseen * (1 - high)
    return MetricValue(value, low, high, num_pairs)


def with_unseen_prompts(value: float, num_prompts: float, lowest: float = 0.0) -> tuple[float, float]:
    """95 % interval of a mean that is the same in all of `num_prompts` prompts and lies between `lowest` and 1.

    With the prompt as the independent unit, prompts with another value make up to u = 1 - (alpha/2)^(1/C) of all,
    alpha being 0.05: a larger share would appear among C with a probability above 1 - alpha/2. Their values may lie at
    either bound. For a share of 0 or 1 this is the interval of Clopper and Pearson. A share minus the better of two
    complementary ones, max(l, 1 - l), lies within it, too: the maximum is convex, and moves by no more than u.

    Source:
        Clopper and Pearson 1934, Biometrika 26(4), the case of zero successes.
    """
    unseen = 1 - 0.025 ** (1 / num_prompts)
    return value - unseen * (value - lowest), value + unseen * (1 - value)


def unseen_share(num_prompts: int) -> float:
    """Largest share of prompts that may be of a kind of which none was seen among `num_prompts`: the rule of three.

    1 - 0.05^(1/C), the upper 95 % bound, about 3 / C: more would have shown with a probability of 95 %.

    Source:
        Hanley and Lippman-Hand 1983, If nothing goes wrong, is everything all right?, JAMA 249(13).
    """
    return float(1 - 0.05 ** (1 / num_prompts))


def unseen_prompts(num_prompts: int, gain: float | None) -> str:
    """The limit of a claim about a mean over prompts, as a part of its sentence: what none of them may have shown.

    If a share u of prompts loses L each and the others gain g, the total gain is zero at L = (1 - u) g / u.

    Args:
        num_prompts: that were judged, at least one.
        gain: that is claimed, in standard deviations, or a loss below 0; None: neither.
    """
    share = unseen_share(num_prompts)
    size = "" if gain is None else f"{(1 - share) / share * abs(gain):.2g} sd on each would cancel"
    if gain is not None and gain < 0:
        return (
            f"up to {100 * share:.2g} % of all prompts may gain far more than these {num_prompts} show; {size} the loss"
        )
    limit = f"up to {100 * share:.2g} % of all prompts may be disasters that these {num_prompts} do not show"
    return f"{limit}; a loss of {size} the gain" if size else limit


def bounded_means(
    values: FloatArray, lowest: FloatArray, highest: FloatArray, *, num_resamples: int, seed: int, level: float = 0.95
) -> tuple[FloatArray, FloatArray]:
    """Ends of the intervals of P means over C prompts whose values lie between known bounds, (P,) each.

    The bootstrap sees only what was drawn: if one prompt in 50 suffers a loss, 36 % of evaluations with 50 prompts do
    not contain it, and their intervals then exclude the truth. Here each resample weighs the prompts, and one more that
    was not seen, by a flat Dirichlet draw. The unseen one has the worst possible value for the lower ends and the best
    possible one for the upper ends. Its weight exceeds 1 - 0.025^(1/C) in one draw of 40, so for a loss that was never
    seen the interval includes what the rule of three leaves open, and for two values it is the interval of Clopper and
    Pearson.

    Args:
        values: (C, P) of independent prompts.
        lowest: (P,) that a value can be.
        highest: (P,) that a value can be.
        num_resamples: Dirichlet draws.
        seed: of the draws, which all means share.
        level: of the two-sided intervals.

    Source:
        Gaffke 2005, Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
        variable, Mathematical Methods of Statistics 14(4). Its level is proven for two values and was never seen to
        fail: Learned-Miller and Thomas 2019, arXiv:1905.06208.
    """
    num_prompts, rng = len(values), np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // (num_prompts + 1))
    means: list[tuple[FloatArray, FloatArray]] = []
    for start in range(0, num_resamples, rows):
        weights = rng.exponential(size=(min(rows, num_resamples - start), num_prompts + 1))
        weights /= weights.sum(axis=1, keepdims=True)
        seen, unseen = weights[:, :-1] @ values, weights[:, -1:]  # (B, P), (B, 1)
        means.append((seen + unseen * lowest, seen + unseen * highest))
    low, high = (np.sort(np.concatenate(side), axis=0) for side in zip(*means, strict=True))
    tail = int((1 - level) / 2 * (num_resamples - 1))  # rounded outwards
    return low[tail], high[-1 - tail]


def bounded_mean(
    values: FloatArray, lowest: float, highest: float, *, num_resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Ends of the interval of one mean over (C,) values, as `bounded_means` gives those of several."""
    bounds = np.array([lowest]), np.array([highest])
    low, high = bounded_means(values[:, None], *bounds, num_resamples=num_resamples, seed=seed, level=level)
    return float(low[0]), float(high[0])


def sign_flip_test(differences_by_prompt: npt.ArrayLike, *, num_permutations: int = 9_999, seed: int = 0) -> float:
    """Two-sided p value that paired differences are symmetric around 0, by flipping the sign of whole prompts.

    The statistic is |sum of differences|, so prompts with more pairs count for more, as in pairwise accuracy. All 2^C
    patterns are enumerated for up to 16 prompts with a non-zero difference (zeros do not matter); above that,
    `num_permutations` random patterns with p = (1 + hits) / (1 + num_permutations), which is valid, never 0.

    Args:
        differences_by_prompt: (C,) sum over the pairs of a prompt of (score of A - score of B).
        num_permutations: random sign patterns; p is then known to about 0.002 near 0.05.
        seed: of the patterns.

    Raises:
        DataError: a difference is not finite, or there are none.
    Source:
        Phipson and Smyth 2010, Permutation p-values should never be zero, arXiv:1603.05766.
    """
    differences = _finite_vector(differences_by_prompt, "sign_flip_test")
    nonzero = np.abs(differences[differences != 0])  # symmetric null: only magnitudes shape the distribution
    if len(nonzero) == 0:
        return 1.0
    observed = abs(float(differences.sum()))
    reached = observed - 1e-9 * float(nonzero.sum())  # equal sums must count as equal in spite of rounding
    if len(nonzero) <= _EXACT_LIMIT:
        patterns = (np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero))) & 1
        return float(np.mean(np.abs(patterns @ (2 * nonzero) - nonzero.sum()) >= reached))
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // len(nonzero))
    hits = 0
    for start in range(0, num_permutations, rows):
        shape = (min(rows, num_permutations - start), len(nonzero))
        patterns = rng.integers(2, size=shape, dtype=np.uint8)
        hits += int(np.sum(np.abs(patterns.astype(np.float64) @ (2 * nonzero) - nonzero.sum()) >= reached))
    return (1 + hits) / (1 + num_permutations)


def t_interval(values: Sequence[float] | FloatArray) -> MetricValue:
    """Mean of independent repetitions (seeds) with its 95 % Student t interval.

    For a handful of seeds a bootstrap undercovers badly; the t interval is right for about normal values.

    Raises:
        DataError: a value is not finite, or there are none.
    """
    sample = _finite_vector(values, "t_interval")
    mean = float(sample.mean())
    if len(sample) == 1:
        return MetricValue(mean, None, None, 1, "only one value: the spread over repetitions cannot be estimated")
    half = float(special.stdtrit(len(sample) - 1, 0.975) * sample.std(ddof=1) / np.sqrt(len(sample)))
    return MetricValue(mean, mean - half, mean + half, len(sample))


def _finite_vector(values: npt.ArrayLike, caller: str) -> FloatArray:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise DataError(
            f"{caller} got values of shape {vector.shape} with {int((~np.isfinite(vector)).sum())} not finite: "
            "it needs at least one finite number. Look for a failed or diverged run among the inputs."
        )
    return vector
