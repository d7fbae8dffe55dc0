"""How well a model tells held-out judgements of any kind: nats, rankings, ties, grades; with intervals over prompts.

Nats say how much of a judgement the model foresees; next to them is what is lost by one who knows nothing of the
answers. Accuracies say whether the order is right.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.evaluation.calibration import BinnedCalibration
from rmcore.evaluation.ranking import PairMean, mean_statistic, ratio
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap

TIE_BINS = 10
_NO_VARIANCE = 1e-12  # of the mean square: float32 values that differ by rounding alone are one value
NOTHING = "there is none of its kind"
_Statistic = Callable[[FloatArray], FloatArray]
"""Prompt weights (B, C) -> one statistic (B,), NaN where undefined."""


@dataclass(frozen=True)
class Choices:
    """N judgements by ranks.

    Attributes:
        prompts: (N,) number of the prompt, from 0.
        kinds: (N,) name of the kind.
        nats: (N,) minus the log-likelihood.
        chance_nats: (N,) the same of one to whom all answers are alike, and who knows how often answers tie.
        top_is_best: (N,) share of the answers with the highest reward that were judged best: 0 or 1 without ties; NaN
            where all answers tie.
        gain: (N,) normalised discounted cumulative gain of three answers or more; NaN of fewer, and where all tie.
        tie_probability: (N,) that two answers are called equal; NaN where there are not two, or training had no ties.
        is_tie: (N,) whether they were.
    """

    prompts: IntArray
    kinds: Sequence[str]
    nats: FloatArray
    chance_nats: FloatArray
    top_is_best: FloatArray
    gain: FloatArray
    tie_probability: FloatArray
    is_tie: BoolArray


@dataclass(frozen=True)
class GradesOf:
    """M grades of one attribute.

    Attributes:
        prompts: (M,) number of the prompt, from 0.
        nats: (M,) minus the log-likelihood; of real grades in units of their standard deviation in training.
        chance_nats: (M,) the same of the grades' shares in training, or of a standard normal.
        said: (M,) what the model says of the answer.
        codes: (M,) number of the level, or the standardised grade.
        predicted: (M,) the most probable level; NaN of real grades.
        num_levels: 0 for real grades.
    """

    prompts: IntArray
    nats: FloatArray
    chance_nats: FloatArray
    said: FloatArray
    codes: FloatArray
    predicted: FloatArray
    num_levels: int


def discounted_gain(ranks: Sequence[int], rewards: Sequence[float]) -> float:
    """NDCG of one ranking by rewards; NaN where all answers tie, as then no order is better.

    The gain of an answer is how many ranks stand below its own; equal rewards share their places.

    Source:
        Järvelin and Kekäläinen 2002; as scikit-learn's `ndcg_score`, with its average over ties.
    """
    if min(ranks) == max(ranks):
        return math.nan
    gains, said = max(ranks) - np.array(ranks, dtype=np.float64), np.array(rewards, dtype=np.float64)
    discounts = 1 / np.log2(np.arange(len(ranks)) + 2)  # by place, from 0
    _, group = np.unique(-said, return_inverse=True)  # equal rewards are one group, the highest is group 0
    shared = np.bincount(group, gains) / np.bincount(group)
    return float(shared[np.sort(group)] @ discounts / (np.sort(gains)[::-1] @ discounts))


def top_is_best(ranks: Sequence[int], rewards: Sequence[float]) -> float:
    """Share of the answers with the highest reward that were judged best; NaN where all answers tie."""
    if min(ranks) == max(ranks):
        return math.nan
    top = [rank for rank, reward in zip(ranks, rewards, strict=True) if reward == max(rewards)]
    return sum(rank == min(ranks) for rank in top) / len(top)


def measure_choices(choices: Choices, *, num_prompts: int, num_resamples: int, seed: int) -> dict[str, MetricValue]:
    """Nats of each kind and in all, top-1 and NDCG of rankings, calibration of ties.

    Args:
        choices: the judgements.
        num_prompts: C, numbers of prompts are below.
        num_resamples: of the bootstrap over prompts.
        seed: of it.

    Returns:
        `nats`, `nats[KIND]`, `nats_gained` and `nats_gained[KIND]` (over chance), `top_accuracy` and `ndcg` (three
        answers or more), `tie_share`, `tie_probability`, `tie_ece` (expected calibration error over ten bins
        of equally many, debiased, with the interval of `BinnedCalibration`, which resampling cannot give).
    """
    kinds = np.array(choices.kinds)
    lists = np.isin(kinds, ("ranking", "best of K")) & ~np.isnan(choices.top_is_best)
    two = ~np.isnan(choices.tie_probability)
    means = [
        PairMean("top_accuracy", choices.top_is_best, lists, True, NOTHING),
        PairMean("ndcg", choices.gain, ~np.isnan(choices.gain), False, NOTHING),
        PairMean("tie_share", choices.is_tie.astype(np.float64), two, True, NOTHING),
        PairMean("tie_probability", choices.tie_probability, two, False, NOTHING),
    ]
    for name, some in {"": kinds != "", **{f"[{kind}]": kinds == kind for kind in sorted(set(choices.kinds))}}.items():
        means.append(PairMean(f"nats{name}", choices.nats, some, False, NOTHING))
        means.append(PairMean(f"nats_gained{name}", choices.chance_nats - choices.nats, some, False, NOTHING))
    measured = _means(means, choices.prompts, num_prompts, num_resamples, seed)
    if two.any():
        carrying, prompt = np.unique(choices.prompts[two], return_inverse=True)
        said, is_tie = choices.tie_probability[two], choices.is_tie[two]
        measured["tie_ece"] = BinnedCalibration.of_events(said, is_tie, prompt, len(carrying), TIE_BINS).value()
    return measured


def measure_grades(grades: GradesOf, *, num_prompts: int, num_resamples: int, seed: int) -> dict[str, MetricValue]:
    """Nats, and how well the order is told: AUC of two levels, quadratic kappa of more, correlation of real grades.

    Returns:
        `nats`, `nats_gained` (over the training shares), and of `auc`, `kappa`, `correlation` what applies.

    Source:
        AUC: Mann and Whitney 1947, ties count half. Kappa: Cohen 1968, quadratic weights.
    """
    common = {"num_prompts": num_prompts, "num_resamples": num_resamples, "seed": seed}
    nats = {"nats": grades.nats, "nats_gained": grades.chance_nats - grades.nats}
    measured = mean_over_prompts(nats, grades.prompts, **common)
    if not len(grades.nats):
        return measured
    if grades.num_levels == 2:
        computes = {"auc": _auc(grades)}
    elif grades.num_levels:
        computes = {"kappa": _kappa(grades, num_prompts)}
    else:
        computes = {"correlation": _correlation(grades, num_prompts)}
    places = dict.fromkeys(computes, grades.prompts)
    return measured | _resampled(computes, places, num_prompts, num_resamples, seed)


def mean_over_prompts(
    values: Mapping[str, FloatArray], prompts: IntArray, *, num_prompts: int, num_resamples: int, seed: int
) -> dict[str, MetricValue]:
    """Means of (N,) values by name, with intervals over the prompts that the N rows are of."""
    every = np.ones(len(prompts), dtype=bool)
    means = [PairMean(name, one, every, False, NOTHING) for name, one in values.items()]
    return _means(means, prompts, num_prompts, num_resamples, seed)


def _means(
    means: Sequence[PairMean], prompts: IntArray, num_prompts: int, num_resamples: int, seed: int
) -> dict[str, MetricValue]:
    """The means that any row counts for, by name."""
    used = [mean for mean in means if mean.mask.any()]
    computes = {mean.name: partial(mean_statistic, mean, prompts) for mean in used}
    places = {mean.name: prompts[mean.mask] for mean in used}
    shares = [mean.name for mean in used if mean.is_share]
    return _resampled(computes, places, num_prompts, num_resamples, seed, shares)


def _resampled(
    computes: Mapping[str, _Statistic],
    places: Mapping[str, IntArray],
    num_prompts: int,
    num_resamples: int,
    seed: int,
    shares: Sequence[str] = (),
) -> dict[str, MetricValue]:
    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        return {name: statistic(weights) for name, statistic in computes.items()}

    longest = max(map(len, places.values()), default=1)
    resampled = cluster_bootstrap(compute, num_prompts, num_resamples=num_resamples, seed=seed, row_size=longest)
    measured = {}
    for name, value in resampled.point.items():
        if math.isnan(value):
            measured[name] = MetricValue(None, None, None, len(places[name]), "undefined: all of one kind")
            continue
        carrying = len(np.unique(places[name]))
        measured[name] = resampled.value(
            name, num_prompts=carrying, num_pairs=len(places[name]), is_share=name in shares
        )
    return measured


def _auc(grades: GradesOf) -> _Statistic:
    order = np.argsort(grades.said, kind="stable")
    said, positive, prompts = grades.said[order], grades.codes[order] > 0, grades.prompts[order]
    # Of each run of equal values: its first place, so that what is below and what is equal can be told apart.
    first = np.flatnonzero(np.append(True, said[1:] != said[:-1]))

    def compute(weights: FloatArray) -> FloatArray:
        drawn = weights[:, prompts]  # (B, M)
        bad = np.add.reduceat(drawn * ~positive, first, axis=1)
        good = np.add.reduceat(drawn * positive, first, axis=1)
        below = np.cumsum(bad, axis=1) - bad
        return ratio((good * (below + bad / 2)).sum(1), good.sum(1) * bad.sum(1))

    return compute


def _kappa(grades: GradesOf, num_prompts: int) -> _Statistic:
    levels = grades.num_levels
    cells = np.zeros((num_prompts, levels * levels))
    np.add.at(cells, (grades.prompts, grades.codes.astype(int) * levels + grades.predicted.astype(int)), 1)
    apart = (np.arange(levels)[:, None] - np.arange(levels)) ** 2 / (levels - 1) ** 2

    def compute(weights: FloatArray) -> FloatArray:
        observed = (weights @ cells).reshape(-1, levels, levels)
        total = observed.sum((1, 2))
        expected = observed.sum(2)[:, :, None] * observed.sum(1)[:, None, :] / total[:, None, None]
        return 1 - ratio((apart * observed).sum((1, 2)), (apart * expected).sum((1, 2)))

    return compute


def _correlation(grades: GradesOf, num_prompts: int) -> _Statistic:
    # About their means: sums of squares of what is far from zero would leave rounding for a variance.
    x, y = grades.said - grades.said.mean(), grades.codes - grades.codes.mean()
    floor_x, floor_y = (_NO_VARIANCE * float(np.mean(values**2)) for values in (grades.said, grades.codes))
    moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)
    sums = np.stack(
        [np.bincount(grades.prompts, weights=column, minlength=num_prompts) for column in moments.T], axis=1
    )

    def compute(weights: FloatArray) -> FloatArray:
        count, sx, sy, sxx, syy, sxy = (weights @ sums).T
        variance_x, variance_y = (sxx - sx**2 / count) / count, (syy - sy**2 / count) / count
        varies = (variance_x > floor_x) & (variance_y > floor_y)
        covariance = (sxy - sx * sy / count) / count
        return ratio(covariance, np.where(varies, np.sqrt(np.maximum(variance_x * variance_y, 0)), 0.0))

    return compute
