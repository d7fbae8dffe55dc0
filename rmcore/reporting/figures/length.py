"""Reward against answer length: whether the model has learned that longer is better."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import BLUE, INK, ORANGE, dress, headline, legend, new_figure

_MOST_POINTS = 3000  # more only make the cloud opaque
_MOST_BINS = 10
_WIDE_RANGE = 50.0  # ratio of lengths, or of rewards to their bulk, from which an axis is logarithmic


def reward_by_length_figure(rewards: pd.DataFrame) -> Figure:
    """All 2P sides as reward (logits) over completion length (characters), with means of equally filled length bins.

    The interval of a bin's mean is a t interval with a standard error clustered by `prompt_id` where the frame has it,
    else by pair: sides of one prompt are not independent (Cameron and Miller 2015, J. Human Resources 50(2), eq. 11).
    The correlation is Spearman's, which neither a log axis nor an outlier changes.

    Args:
        rewards: P > 0 rows with reward_chosen, reward_rejected, chosen_chars, rejected_chars, and optionally prompt_id.
    """
    reward = np.concatenate([rewards[f"reward_{side}"].to_numpy(np.float64) for side in ("chosen", "rejected")])
    length = np.concatenate([rewards[f"{side}_chars"].to_numpy(np.float64) for side in ("chosen", "rejected")])
    groups = rewards["prompt_id"].astype(str).to_numpy() if "prompt_id" in rewards else np.arange(len(rewards))
    cluster = np.unique(np.concatenate([groups, groups]), return_inverse=True)[1]
    figure = new_figure(8.0, 4.6)
    ax = figure.subplots()
    is_chosen = np.arange(len(reward)) < len(rewards)
    drawn = np.random.default_rng(0).permutation(len(reward))[:_MOST_POINTS]
    for side, colour, mask in (("chosen", BLUE, is_chosen), ("rejected", ORANGE, ~is_chosen)):
        points = drawn[mask[drawn]]
        alpha = 0.35 if len(drawn) > 300 else 0.7
        ax.scatter(length[points], reward[points], s=9, alpha=alpha, color=colour, linewidths=0, label=f"{side} side")
    bins = binned_means(length, reward, cluster)
    bars = np.nan_to_num(bins[["half_width"]].to_numpy(dtype=np.float64)[:, 0])
    look: Any = {"color": INK, "marker": "o", "markersize": 5, "linewidth": 1.4, "capsize": 3}
    ax.errorbar(bins["length"], bins["mean"], yerr=bars, label="mean of a length bin, 95 % interval", **look)
    if length.min() > 0 and length.max() / length.min() > _WIDE_RANGE:
        ax.set_xscale("log")
    central = float(np.percentile(np.abs(reward), 97.5))
    if central > 0 and np.abs(reward).max() > _WIDE_RANGE * central:
        ax.set_yscale("symlog", linthresh=central)
    headline(figure, _title(length, reward))
    shown = f"{numbers.count(len(reward))} sides, {numbers.count(len(drawn))} drawn"
    dress(ax, title=shown, x="length of the completion (characters)", y="reward (logits)")
    legend(ax)
    return figure


def _title(length: FloatArray, reward: FloatArray) -> str:
    if len(np.unique(length)) < 3 or len(np.unique(reward)) < 3:
        return "Reward against length: too few different lengths or rewards for a correlation"
    rho = float(stats.spearmanr(length, reward).statistic)
    trend = "hardly depends on" if abs(rho) < 0.1 else "rises with" if rho > 0 else "falls with"
    return f"Reward {trend} length: rank correlation {rho:+.2f} (Spearman)".replace("-", "−")


def binned_means(length: FloatArray, reward: FloatArray, cluster: npt.NDArray[np.intp]) -> pd.DataFrame:
    """Mean reward of up to ten equally filled length bins: columns length (median), mean, half_width (NaN: unknown)."""
    cuts = np.unique(np.quantile(length, np.linspace(0, 1, min(_MOST_BINS, max(1, len(length) // 8)) + 1)))
    index = np.clip(np.searchsorted(cuts, length, side="right") - 1, 0, max(0, len(cuts) - 2))
    rows = []
    for number in np.unique(index):
        inside = index == number
        rows.append((np.median(length[inside]), reward[inside].mean(), _half_width(reward[inside], cluster[inside])))
    return pd.DataFrame(rows, columns=["length", "mean", "half_width"])


def _half_width(values: FloatArray, cluster: npt.NDArray[np.intp]) -> float:
    """Half of the 95 % t interval of a mean with G clusters: t_{G-1} sqrt(G/(G-1) sum_g (sum_i r_i)^2) / n."""
    residual_sums = np.bincount(cluster, values - values.mean())
    num_clusters = len(np.unique(cluster))
    if num_clusters < 2:
        return float("nan")
    variance = num_clusters / (num_clusters - 1) * float((residual_sums**2).sum()) / len(values) ** 2
    return float(stats.t.ppf(0.975, num_clusters - 1) * np.sqrt(variance))
