"""Whether sigmoid(beta * margin) is a probability that can be believed: binned calibration error and the temperature.

Everything here reads log-odds, (P,): the margins times the beta of their reward model (`RewardTable.log_odds`).
Confidence is max(p, 1 - p) with p = sigmoid(log-odds), held against whether the pair is ordered right. (With p against
a target that is always 1, the error of a perfectly calibrated model would be 1 - mean p.) A tie has confidence 0.5 and
counts half right: what the mirrored orientation of the pair gives, and a gap of 0. Bins are of equal width over [0.5,
1].

The plug-in ECE adds up absolute values of noisy gaps and is therefore biased upwards: a perfectly calibrated model
reads 0.15 on 50 pairs. Reports and the gate take the debiased estimate of `BinnedCalibration`; the plug-in is left to
training, which compares checkpoints on the same pairs.
"""

import hashlib

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import expit, ndtr, stdtrit

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import ConfigError
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import (
    ONE_PROMPT,
    UNEVEN,
    MetricValue,
    effective_prompts,
    heaviest_tail,
    unseen_weight,
)

FOLD_TAU = 0.5
"""Share 1 / (1 + tau^2) = 4/5 of the evidence decides the sign of a gap, the rest measures it: five folds."""
FOLDED_SPREAD = 1.2
"""Standard deviation of a debiased gap whose truth is 0, in standard errors of the gap. Farther out it is up to 1.37,
where the mean falls short of the truth by more than that costs, and then 1."""
_GRID = np.exp(np.linspace(-3.0, 3.0, 193))  # factors of 1/T around the optimum for replicates, 3 % apart
NOT_SCALABLE_LOW = "the loss falls without end as T goes to 0: every untied fitting pair is ordered right"
NOT_SCALABLE_HIGH = "the loss falls without end as T grows: the mean margin of the fitting pairs is not positive"


def confidence_and_correctness(log_odds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(P,) confidence max(p, 1 - p) in [0.5, 1] and (P,) correctness: 1 right, 0 wrong, 0.5 tied."""
    return expit(np.abs(log_odds)), (np.sign(log_odds) + 1) / 2


def bin_of(confidence: FloatArray, num_bins: int) -> IntArray:
    """(P,) bin of each confidence: `num_bins` equal-width bins over [0.5, 1], upper edges belong to the next bin.

    Raises:
        ConfigError: num_bins is below 1.
    """
    if num_bins < 1:
        raise ConfigError(f"num_bins={num_bins} leaves no calibration bin; pass at least 1, usually 10.")
    return np.minimum(((confidence - 0.5) * 2 * num_bins).astype(np.int64), num_bins - 1)


def expected_calibration_error(log_odds: FloatArray, num_bins: int = 10) -> float:
    """Plug-in ECE: sum over bins of (share of pairs) x |accuracy - mean confidence|.

    Source:
        Guo et al. 2017, arXiv:1706.04599, equation 3 (10 bins by default).
    """
    confidence, correct = confidence_and_correctness(log_odds)
    gaps = np.bincount(bin_of(confidence, num_bins), correct - confidence, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(log_odds))


class BinnedCalibration:
    """The debiased calibration error as a function of prompt weights, and its interval.

    With d_b the gap (accuracy - mean confidence) of bin b, w_b its share of the pairs and s_b the standard error of
    d_b:

        plug-in      = sum_b w_b |d_b|
        ece_debiased = sum_b w_b ( d_b (2 Phi(d_b / (tau s_b)) - 1) - 2 (s_b / tau) phi(d_b / (tau s_b)) )

    |d_b| exceeds |true gap| by up to 0.8 s_b because sign and size come from the same noise. The debiased form is
    cross-fitting: the sign is learnt on a share 1 / (1 + tau^2) of the evidence and the size measured on the rest,
    which is independent, averaged over all such splits in closed form (Gaussian fission d + tau s Z, d - s Z / tau, Z
    integrated out). For normal errors its mean is 0 for a calibrated model, |true gap| where that is clear of the
    noise, and never above; between (a true gap near one s_b) it falls short by at most 0.37 s_b. It is not clipped, so
    that means over seeds stay honest: a small negative value reads as "no miscalibration found".

    s_b is robust to pairs of one prompt being right or wrong together (clustered sandwich with the m / (m - 1)
    correction for m prompts), and never below the binomial error under calibration, which guards small bins where all
    pairs happen to be right. Weights enter it squared: a prompt drawn twice is one prompt with double weight.

    Source:
        Upward bias: Kumar, Liang and Ma 2019, arXiv:1909.10155; Roelofs et al. 2022, arXiv:2012.08668. Fission:
        Leiner et al. 2023, arXiv:2112.11079. (Kumar's own debiasing by resampled labels keeps more than half of the
        bias of a calibrated model, so it is not used; their squared error is exact but is another quantity.)
    """

    def __init__(self, log_odds: FloatArray, prompt: IntArray, num_prompts: int, num_bins: int) -> None:
        confidence, correct = confidence_and_correctness(log_odds)
        self._sum_up(confidence, correct, bin_of(confidence, num_bins), prompt, (num_prompts, num_bins))

    @classmethod
    def of_events(
        cls, probability: FloatArray, happened: BoolArray, prompt: IntArray, num_prompts: int, num_bins: int
    ) -> "BinnedCalibration":
        """The same of any events: (P,) the probability that each was given, and whether it happened.

        Bins hold equally many events, by their probability: rare ones would share a single bin of equal width.
        """
        bins = np.empty(len(probability), dtype=np.int64)
        bins[np.argsort(probability, kind="stable")] = np.arange(len(probability)) * num_bins // len(probability)
        made = cls.__new__(cls)
        made._sum_up(probability, happened.astype(np.float64), bins, prompt, (num_prompts, num_bins))
        return made

    def _sum_up(
        self, confidence: FloatArray, correct: FloatArray, bins: IntArray, prompt: IntArray, shape: tuple[int, int]
    ) -> None:
        """Sums by prompt and bin, all that is kept of the pairs; `shape` is (C, bins)."""
        cell = prompt * shape[1] + bins

        def sums(values: FloatArray) -> FloatArray:
            totals = np.bincount(cell, values, minlength=shape[0] * shape[1])
            return totals.astype(np.float64).reshape(shape)

        self._count = sums(np.ones_like(confidence))  # (C, bins)
        self._gap = sums(correct - confidence)
        self._square = sums((correct - confidence) ** 2)
        self._right = sums(correct)
        self._binomial = sums(confidence * (1 - confidence))

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """(B, C) weights -> ece_debiased, (B,)."""
        gap, error, share = self._bins(weights)
        return {"ece_debiased": (share * _folded(gap, error)).sum(axis=1)}

    def value(self) -> MetricValue:
        """The error with its interval: an estimate below 0 says that none was found, and is shown as 0."""
        num_prompts, num_pairs = len(self._count), int(self._count.sum())
        # One row of weights, 1 for each prompt, is the estimate itself; (B, C) rows are a bootstrap's.
        error = max(0.0, float(self(np.ones((1, num_prompts)))["ece_debiased"][0]))
        interval = self.interval()
        if interval is None:
            return MetricValue(error, None, None, num_pairs, ONE_PROMPT if num_prompts < 2 else UNEVEN)
        return MetricValue(error, min(interval[0], error), max(interval[1], error), num_pairs)

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Interval of the true binned error sum_b P(b) |E[correct - confidence | b]|.

        None with one prompt, and where a few prompts hold most of the pairs (`heaviest_tail`); else it counts with the
        effective number of prompts, and holds what larger ones than were seen may say.

        It holds the truth at least as often as it says, also where that is 0 and where a prompt has several pairs.
        Resampling cannot give it: every resample folds noise into |gaps| once more, and at 0 nothing is normal.

        Lower end: ece_debiased never exceeds the truth on average, so it is that minus t standard errors; folding
        makes them up to `FOLDED_SPREAD` times those of the sum of |gaps|. Not below 0.
        Upper end: the largest truth that would give a plug-in as small as this one in (1 - level) / 2 of all cases,
        for the spread of that truth over bins which makes small ones likeliest: gaps in proportion to their standard
        errors, because the mean of a folded normal |N(x, 1)| is convex in x. A plug-in below what perfect calibration
        gives on average counts as that, so that luck does not shorten the interval (Cowan et al. 2011,
        arXiv:1105.3166). Not above 1, which a few prompts would not rule out.

        Standard errors are more conservative than those of the estimate: pairs of a prompt are taken to depend on each
        other in every bin as they do on average over bins, which one prompt in a bin cannot show; and no bin is surer
        than two more right and two more wrong answers would leave it (Agresti and Coull 1998), which guards bins where
        nothing was wrong yet.
        """
        sizes = self._count.sum(axis=1)
        sizes = sizes[sizes > 0]
        tail = heaviest_tail(sizes)
        if len(self._count) < 2 or tail >= 1:
            return None
        num_prompts, unseen = effective_prompts(sizes), unseen_weight(sizes, tail)
        gap, error, share = (values[0] for values in self._bins(np.ones((1, len(self._count)))))
        error = np.maximum(error, self._conservative_error(gap))
        plug_in, scale = float(share @ np.abs(gap)), float(share @ error)
        # The signed sum of gaps as one mean over pairs: what prompts and the sizes of bins do to all bins at once.
        scores = self._gap @ np.sign(gap) - plug_in * self._count.sum(axis=1)
        joint = (scores**2).sum() / self._count.sum() ** 2 * num_prompts / (num_prompts - 1)
        reach = float(stdtrit(num_prompts - 1, 0.5 + level / 2) * np.sqrt(max(joint, ((share * error) ** 2).sum())))
        low = max(0.0, float(share @ _folded(gap, error)) - FOLDED_SPREAD * reach)
        low = max(0.0, low * (1 - unseen) - unseen)  # unseen gaps may be opposite to those of their bins
        if scale == 0:  # every bin is sure of what it says, and right
            return low, plug_in + unseen * (1 - plug_in)
        seen = max(plug_in, scale * float(_mean_size(np.zeros(1))[0]))
        truths = np.linspace(0.0, (seen + reach) / scale, 1001)  # in standard errors; above, it would show for certain
        size = _mean_size(truths)
        spread = np.sqrt(np.maximum(1 + truths**2 - size**2, 0.0))
        last = int(np.flatnonzero(scale * size - reach * spread <= seen)[-1])
        high = min(1.0, scale * float(truths[min(last + 1, len(truths) - 1)]))
        return low, high + unseen * (1 - high)

    def _conservative_error(self, gap: FloatArray) -> FloatArray:
        """(bins,) standard errors of gaps that a bin alone, with few prompts or without a mistake, would not show."""
        count, prompts = self._count.sum(axis=0), (self._count > 0).sum(axis=0)
        several = prompts > 1
        together = ((self._gap - gap * self._count) ** 2).sum(axis=0) * prompts / np.maximum(prompts - 1, 1)
        apart = (self._square.sum(axis=0) - count * gap**2) * count / np.maximum(count - 1, 1)
        dependence = max(1.0, together[several].sum() / apart[several].sum()) if apart[several].sum() > 0 else 1.0
        safe = np.where(count > 0, count, 1.0)
        effective = safe / dependence
        shrunk = (self._right.sum(axis=0) / dependence + 2) / (effective + 4)
        variance = np.maximum(self._binomial.sum(axis=0) / safe, shrunk * (1 - shrunk)) / effective
        return np.where(count > 0, np.sqrt(variance), 0.0)

    def _bins(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(B, bins) gap, its standard error, and the share of the pairs."""
        count = weights @ self._count
        safe = np.where(count > 0, count, 1.0)
        gap = weights @ self._gap / safe
        squared = weights**2
        # sum_c w_c^2 (gap_c - gap n_c)^2, multiplied out so that it is three products instead of a (B, C, bins) array
        residual = squared @ self._gap**2 - 2 * gap * (squared @ (self._gap * self._count))
        residual += gap**2 * (squared @ self._count**2)
        prompts = (weights > 0).astype(np.float64) @ (self._count > 0).astype(np.float64)
        correction = np.where(prompts > 1, prompts / np.maximum(prompts - 1, 1), 0.0)
        variance = np.maximum(residual * correction, squared @ self._binomial) / safe**2
        return gap, np.sqrt(variance), count / count.sum(axis=1, keepdims=True)


def _folded(gap: FloatArray, error: FloatArray) -> FloatArray:
    """The size of a gap without the upward bias of its own noise, see `BinnedCalibration`; elementwise."""
    scale = FOLD_TAU * np.where(error > 0, error, 1.0)
    z = gap / scale
    # phi(z) = exp(-z^2 / 2) / sqrt(2 pi)
    folded = gap * (2 * ndtr(z) - 1) - 2 * scale / FOLD_TAU**2 * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(np.where(error > 0, folded, np.abs(gap)))


def _mean_size(x: FloatArray) -> FloatArray:
    """E|N(x, 1)|, the mean of the folded normal."""
    return np.asarray(x * (2 * ndtr(x) - 1) + 2 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi))


def reliability_bins(rewards: pd.DataFrame, num_bins: int = 10, *, beta: float = 1.0) -> pd.DataFrame:
    """The reliability diagram: accuracy against mean confidence in each bin that has pairs.

    Accuracy bounds are 95 % Wilson intervals on the effective number of pairs: the count divided by the design effect
    of pairs that share a prompt, or the number of prompts where all pairs of a bin are right or all wrong.

    Args:
        rewards: one row a pair, see `rmcore.evaluation.rewards.COLUMNS`.
        num_bins: equal-width bins over confidence [0.5, 1].
        beta: scale of the reward model's margins.

    Returns:
        Columns bin_low, bin_high, mean_confidence, accuracy, count, accuracy_low, accuracy_high; empty bins left out.

    Raises:
        DataError: a column is missing or a reward is not finite.
    """
    table = RewardTable.from_frame(rewards, beta=beta)
    confidence, correct = confidence_and_correctness(table.log_odds)
    bins = bin_of(confidence, num_bins)
    rows = []
    for index in np.unique(bins):
        inside = bins == index
        accuracy = float(correct[inside].mean())
        low, high = wilson(accuracy, _effective_count(correct[inside], table.prompt[inside]))
        rows.append(
            {
                "bin_low": 0.5 + 0.5 * index / num_bins,
                "bin_high": 0.5 + 0.5 * (index + 1) / num_bins,
                "mean_confidence": float(confidence[inside].mean()),
                "accuracy": accuracy,
                "count": int(inside.sum()),
                "accuracy_low": low,
                "accuracy_high": high,
            }
        )
    return pd.DataFrame(rows)


def _effective_count(correct: FloatArray, prompt: IntArray) -> float:
    """Independent pairs that would give the same standard error of the accuracy; between 1 and the number of pairs."""
    _, index = np.unique(prompt, return_inverse=True)
    residual = np.bincount(index, correct - correct.mean())
    variance = float((residual**2).sum()) / len(correct) ** 2
    binomial = float(correct.mean() * (1 - correct.mean()))
    if variance == 0 or binomial == 0:
        return float(len(residual))
    return float(np.clip(binomial / variance, 1.0, len(correct)))


def wilson(share: float, count: float) -> tuple[float, float]:
    """95 % score interval of a share over `count` independent draws (Wilson 1927, JASA 22)."""
    z2 = 1.959963984540054**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return float(max(centre - half, 0.0)), float(min(centre + half, 1.0))


def fit_temperature(log_odds: FloatArray) -> tuple[float | None, str | None]:
    """The T > 0 that minimises the mean of softplus(-log_odds / T), and None or the reason why there is none.

    The loss is convex in 1 / T, so the minimum is the one root of its derivative. Dividing all margins by T > 0 keeps
    every sign, so accuracy cannot change.

    Args:
        log_odds: (P,) beta times the margins of the pairs to fit on; ties carry no information about T.
    Source:
        Guo et al. 2017, arXiv:1706.04599, section 4.2.
    """
    untied = log_odds[log_odds != 0]
    if len(untied) == 0:
        return None, "every fitting pair is tied"
    if untied.mean() <= 0:
        return None, NOT_SCALABLE_HIGH
    if (untied > 0).all():
        return None, NOT_SCALABLE_LOW

    def slope(log_inverse: float) -> float:
        return float(np.mean(untied * expit(-untied * np.exp(log_inverse))))

    low = high = -float(np.log(np.abs(untied).mean()))
    while slope(low) <= 0:
        low -= 2.0
    while slope(high) >= 0:
        high += 2.0
    return float(np.exp(-brentq(slope, low, high, xtol=1e-12))), None


class TemperatureStatistic:
    """temperature as a function of prompt weights, around the fitted `temperature` of the same pairs.

    Newton steps for each of B resamples would touch B x P values; instead the derivative of the loss is summed by
    prompt on a grid of 1/T (factors e^-3 to e^3), one product gives it for all resamples, and its root is interpolated
    (relative error about 1e-4). Beyond the grid the replicate is 0 or infinite: such an end of an interval is not
    given.
    """

    def __init__(self, log_odds: FloatArray, prompt: IntArray, num_prompts: int, temperature: float) -> None:
        self._inverse = _GRID / temperature
        self._slope = np.stack(
            [np.bincount(prompt, log_odds * expit(-log_odds * b), minlength=num_prompts) for b in self._inverse], axis=1
        )

    def __call__(self, weights: FloatArray) -> dict[str, FloatArray]:
        """(B, C) weights -> temperature (B,)."""
        slope = weights @ self._slope  # (B, grid), falling along the grid
        after = (slope > 0).sum(axis=1)  # first grid point behind the root
        inner = np.clip(after, 1, slope.shape[1] - 1)
        rows = np.arange(len(weights))
        left, right = slope[rows, inner - 1], slope[rows, inner]
        with np.errstate(invalid="ignore", divide="ignore"):  # only outside of the grid, replaced below
            fraction = left / (left - right)
        inverse = self._inverse[inner - 1] * (self._inverse[inner] / self._inverse[inner - 1]) ** fraction
        inverse = np.where(after == 0, 0.0, np.where(after == slope.shape[1], np.inf, inverse))
        with np.errstate(divide="ignore"):
            return {"temperature": 1 / inverse}


def fitting_half(prompt_ids: pd.Series) -> BoolArray:
    """(P,) whether a pair's prompt falls into the half for fitting: by a hash, so stable over runs and row orders."""
    unique = {
        name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0
        for name in set(prompt_ids.astype(str))
    }
    return prompt_ids.astype(str).map(unique).to_numpy(dtype=bool)
