"""How well rewards order the pairs: accuracies, margins, and the spread of rewards.

A tie (margin exactly 0) is half right, as a guess would be: left out, it would raise the accuracy of a model that ties
where it would be wrong. `tie_rate` is given with the accuracies.
All statistics are functions of prompt weights (see `rmcore.evaluation.uncertainty`); a weight w equals w copies of the
prompt. Axes: B resamples, C prompts, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import logit

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import MetricValue, Resampled, cluster_bootstrap

PERCENTILES = (5, 25, 50, 75, 95)
SIDE_THRESHOLDS = (0.3, 0.5, 0.7)
OVER_BASELINE = "accuracy_over_baseline"
"""The metric of `OverBaseline`."""
BY_PROMPT = "accuracy_by_prompt"
"""The metric of `PromptMean`."""
ROC_AUC = "roc_auc"
ALIKE = (BY_PROMPT, "within_prompt_reward_variance")
"""Metrics over all pairs in which each prompt counts alike, however many pairs it has."""


@dataclass(frozen=True, slots=True)
class PairMean:
    """A metric that is the mean of a per-pair value over some of the pairs, less that over others where there are."""

    name: str
    values: FloatArray
    """(P,)"""
    mask: BoolArray
    """(P,) pairs that count."""
    is_share: bool
    """Whether the values lie between 0 and 1, wrong and right."""
    undefined: str
    """Why there is no value, should no pair count."""
    is_difference: bool = False
    """Whether it may be below 0, down to -1."""
    other: BoolArray | None = None
    """(P,) pairs whose mean is taken off; None: nothing is."""


def pair_means(table: RewardTable) -> list[PairMean]:
    """The metrics of `table` that are means over pairs, subset accuracies included.

    - pairwise_accuracy: share of pairs with margin > 0, ties half. tie_rate: share of pairs with margin 0.
    - loss: mean of softplus(-beta * margin), nats. mean_margin: logits. negative_margin_rate: share with margin < 0.
    - brier: mean of (1 - sigmoid(beta * margin))^2, which is the same for either orientation of the pair.
    - length_matched_accuracy: accuracy where |chars difference| < 15 % of the longer side.
    - expected_accuracy: accuracy against fresh labels, where how likely these name either side is known of all pairs:
      the mean of that probability for the side with the higher reward, 0.5 of tied pairs. It expects what
      pairwise_accuracy does and has none of the scatter of drawn labels (Rao and Blackwell).
    - longer_wins_accuracy: baseline; share of chosen sides that are longer, pairs of equal length half.
    - pairwise_accuracy[s]: accuracy over the pairs of subset s.
    """
    margin, log_odds = table.margin, table.log_odds
    every = np.ones(table.num_pairs, dtype=bool)
    right = correctness(margin)
    longer = table.chosen_chars - table.rejected_chars
    means = [
        PairMean("pairwise_accuracy", right, every, True, ""),
        PairMean("tie_rate", (margin == 0).astype(np.float64), every, True, ""),
        PairMean("loss", softplus(-log_odds), every, False, ""),
        PairMean("mean_margin", margin, every, False, ""),
        PairMean("negative_margin_rate", (margin < 0).astype(np.float64), every, True, ""),
        PairMean("brier", np.exp(-2 * softplus(log_odds)), every, False, ""),
        PairMean("length_matched_accuracy", right, table.length_matched, True, "no pair is length-matched"),
        PairMean("longer_wins_accuracy", correctness(longer), every, True, ""),
    ]
    if (probability := table.chosen_probability) is not None:
        means.append(PairMean("expected_accuracy", 0.5 + np.sign(margin) * (probability - 0.5), every, False, ""))
    labelled = np.array([subset is not None for subset in table.subset])
    codes = np.full(table.num_pairs, -1)
    names, codes[labelled] = np.unique(table.subset[labelled].astype(str), return_inverse=True)
    for code, name in enumerate(names):
        means.append(PairMean(f"pairwise_accuracy[{name}]", right, codes == code, True, ""))
    return means


def correctness(margin: FloatArray) -> FloatArray:
    """How right each margin is: 1 above zero, 0 below, 0.5 at zero, where the model says nothing."""
    return np.asarray((1 + np.sign(margin)) / 2, dtype=np.float64)


def softplus(x: FloatArray) -> FloatArray:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0.0, x)


def mean_statistic(mean: PairMean, prompt: IntArray, weights: FloatArray) -> FloatArray:
    """(B,) weighted mean of one `PairMean` for weights (B, C); NaN where no pair counts."""
    involved, index = np.unique(prompt[mean.mask], return_inverse=True)
    sums = np.bincount(index, mean.values[mean.mask], minlength=len(involved))
    counts = np.bincount(index, minlength=len(involved)).astype(np.float64)
    used = weights if len(involved) == weights.shape[1] else weights[:, involved]
    values = ratio(used @ sums, used @ counts)
    if mean.other is None:
        return values
    return values - mean_statistic(replace(mean, mask=mean.other, other=None), prompt, weights)


def mean_value(mean: PairMean, prompt: IntArray, resampled: Resampled) -> MetricValue:
    """A `PairMean` of (P,) prompts with its interval; without a value, and with the reason, where no pair counts."""
    masks = [mask for mask in (mean.mask, mean.other) if mask is not None]
    if not all(mask.any() for mask in masks):
        return MetricValue(None, None, None, 0, mean.undefined)
    sizes = prompt_sizes(prompt[np.any(masks, axis=0)])
    num_pairs = sum(int(mask.sum()) for mask in masks)
    kind = {"is_share": mean.is_share, "is_difference": mean.is_difference}
    return resampled.value(mean.name, num_prompts=len(sizes), num_pairs=num_pairs, sizes=sizes, **kind)


def means_over_prompts(
    means: Sequence[PairMean], prompt: IntArray, *, num_prompts: int, num_resamples: int, seed: int
) -> dict[str, MetricValue]:
    """Means of (N,) rows of `num_prompts` prompts by name, of those that any row counts for, with their intervals."""
    used = [mean for mean in means if mean.mask.any()]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        return {mean.name: mean_statistic(mean, prompt, weights) for mean in used}

    resampled = cluster_bootstrap(
        compute, num_prompts, num_resamples=num_resamples, seed=seed, row_size=max(1, len(prompt))
    )
    return {
        mean.name: resampled.value(
            mean.name, num_prompts=len(np.unique(prompt[mean.mask])), num_pairs=int(mean.mask.sum())
        )
        for mean in used
    }


def prompt_sizes(prompt: IntArray) -> FloatArray:
    """(C,) pairs of each prompt that has some of (P,) pairs."""
    return np.unique(prompt, return_counts=True)[1].astype(np.float64)


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Element-wise quotient, NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


class OverBaseline:
    """accuracy_over_baseline as a function of prompt weights: accuracy minus the best baseline (chance or length).

    Over all pairs, ties half. Length is whichever of "the longer one" and "the shorter one" is right more often: chosen
    on the same pairs, it looks a little better than it is, which speaks against the model.
    """

    def __init__(self, table: RewardTable) -> None:
        def by_prompt(difference: FloatArray) -> FloatArray:
            """How often a difference is above zero, ties half: (C,) sums over the pairs of a prompt."""
            sums = np.bincount(table.prompt, correctness(difference), minlength=table.num_prompts)
            return sums.astype(np.float64)

        self._right = by_prompt(table.margin)
        self._longer = by_prompt(table.chosen_chars - table.rejected_chars)
        self._pairs = np.bincount(table.prompt, minlength=table.num_prompts).astype(np.float64)

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Give {"accuracy_over_baseline": (B,)} for weights (B, C)."""
        pairs = weights @ self._pairs
        longer = ratio(weights @ self._longer, pairs)
        return {OVER_BASELINE: ratio(weights @ self._right, pairs) - np.maximum(longer, 1 - longer)}


class PromptMean:
    """accuracy_by_prompt as a function of prompt weights: the accuracy of each prompt's pairs, each prompt alike."""

    def __init__(self, table: RewardTable) -> None:
        right = np.bincount(table.prompt, correctness(table.margin), minlength=table.num_prompts)
        self._accuracy = right / prompt_sizes(table.prompt)

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Give {"accuracy_by_prompt": (B,)} for weights (B, C)."""
        return {BY_PROMPT: weights @ self._accuracy / weights.sum(axis=1)}


class Spread:
    """margin_std, pooled and within-prompt reward variance as functions of prompt weights.

    margin_std and pooled_reward_variance are population moments (divided by the count). The within-prompt variance is
    the mean over prompts, each counted once, of the unbiased variance (divided by the count - 1) of its sides: with two
    sides a prompt the population form would be half of the truth. It is the quantity a policy gradient sees; see Razin
    et al. 2025, What makes a reward model a good teacher, arXiv:2503.15477.
    """

    def __init__(self, table: RewardTable) -> None:
        num = table.num_prompts
        margin = table.margin - table.margin.mean()  # moments are taken about the mean: no cancellation
        sides = np.concatenate([table.chosen, table.rejected])
        sides = sides - sides.mean()
        side_prompt = np.concatenate([table.prompt, table.prompt])
        self._pairs = np.bincount(table.prompt, minlength=num).astype(np.float64)
        self._margin = [np.bincount(table.prompt, margin**k, minlength=num) for k in (1, 2)]
        self._sides = [np.bincount(side_prompt, sides**k, minlength=num) for k in (1, 2)]
        centred = sides - (self._sides[0] / (2 * self._pairs))[side_prompt]
        self._within = np.bincount(side_prompt, centred**2, minlength=num) / (2 * self._pairs - 1)

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """(B, C) weights -> the three statistics, (B,) each."""
        pairs = weights @ self._pairs
        margin_1, margin_2 = (weights @ moment / pairs for moment in self._margin)
        sides_1, sides_2 = (weights @ moment / (2 * pairs) for moment in self._sides)
        return {
            "margin_std": np.sqrt(np.maximum(margin_2 - margin_1**2, 0)),
            "pooled_reward_variance": np.maximum(sides_2 - sides_1**2, 0),
            "within_prompt_reward_variance": weights @ self._within / weights.sum(axis=1),
        }


class MarginPercentiles:
    """margin_p05 to margin_p95 as functions of prompt weights: linear interpolation, numpy's default definition."""

    def __init__(self, table: RewardTable) -> None:
        order = np.argsort(table.margin, kind="stable")
        self._margin = table.margin[order]
        self._prompt = table.prompt[order]

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """(B, C) integer weights -> percentiles of the resampled margins, (B,) each."""
        cumulative = np.cumsum(weights[:, self._prompt], axis=1)
        position = np.array(PERCENTILES) / 100 * (cumulative[:, -1:] - 1)  # (B, Q) ranks from 0
        lower = np.floor(position)
        values = np.empty(position.shape)
        for row in range(len(weights)):
            ranks = np.concatenate([lower[row], np.minimum(lower[row] + 1, cumulative[row, -1] - 1)])
            ends = self._margin[np.searchsorted(cumulative[row], ranks, side="right")]
            low, high = ends[: len(PERCENTILES)], ends[len(PERCENTILES) :]
            values[row] = low + (position[row] - lower[row]) * (high - low)
        return {f"margin_p{percent:02d}": values[:, i] for i, percent in enumerate(PERCENTILES)}


class PooledSides:
    """roc_auc and tpr/fpr/fnr at thresholds, over the sides of all prompts pooled: secondary metrics.

    Bradley-Terry leaves an offset per prompt free, so comparing sides of different prompts also compares those offsets.
    roc_auc is the probability that a random chosen side has a higher reward than a random rejected side of any prompt,
    ties half (Mann-Whitney). For the thresholds rewards are first centred by their pooled mean, which removes the one
    global offset; a side is called good when sigmoid(beta * centred reward) >= t. tpr@t: share of chosen sides called
    good, fpr@t: share of rejected sides called good, fnr@t = 1 - tpr@t.
    """

    def __init__(self, table: RewardTable, thresholds: Sequence[float] = SIDE_THRESHOLDS) -> None:
        self._cuts = {threshold: logit(threshold) / table.beta for threshold in thresholds}
        chosen_order = np.argsort(table.chosen, kind="stable")
        rejected_order = np.argsort(table.rejected, kind="stable")
        self._chosen, self._chosen_prompt = table.chosen[chosen_order], table.prompt[chosen_order]
        self._rejected, self._rejected_prompt = table.rejected[rejected_order], table.prompt[rejected_order]
        self._below = np.searchsorted(self._rejected, self._chosen, side="left")
        self._not_above = np.searchsorted(self._rejected, self._chosen, side="right")
        self._sums = np.bincount(table.prompt, table.chosen + table.rejected, minlength=table.num_prompts)
        self._pairs = np.bincount(table.prompt, minlength=table.num_prompts).astype(np.float64)

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """(B, C) weights -> the statistics, (B,) each."""
        chosen_weights = weights[:, self._chosen_prompt]
        rejected = _cumulative(weights[:, self._rejected_prompt])
        pairs = weights @ self._pairs
        wins = np.einsum("bp,bp->b", chosen_weights, rejected[:, self._below])
        wins += np.einsum("bp,bp->b", chosen_weights, rejected[:, self._not_above])
        values = {ROC_AUC: wins / 2 / pairs**2}
        chosen = _cumulative(chosen_weights)
        mean = weights @ self._sums / (2 * pairs)
        rows = np.arange(len(weights))
        for threshold, above_mean in self._cuts.items():
            cut = mean + above_mean
            missed = chosen[rows, np.searchsorted(self._chosen, cut, side="left")] / pairs
            rejected_below = rejected[rows, np.searchsorted(self._rejected, cut, side="left")] / pairs
            values |= {
                f"tpr@{threshold}": 1 - missed,
                f"fpr@{threshold}": 1 - rejected_below,
                f"fnr@{threshold}": missed,
            }
        return values


def _cumulative(weights: FloatArray) -> FloatArray:
    """(B, P) -> (B, P + 1): total weight of the first k columns, k = 0 to P."""
    total = np.zeros((weights.shape[0], weights.shape[1] + 1))
    np.cumsum(weights, axis=1, out=total[:, 1:])
    return total
