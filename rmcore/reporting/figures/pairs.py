"""Figures of held-out pairs: accuracy in context, calibration, and reward against length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers, style

_CONTEXT_LOOK = {
    "model": (style.BLUE, "o", 8),
    "reference": (style.MUTED, "D", 6),
    "subset": (style.BLUE, "o", 5),
    "ood": (style.ORANGE, "s", 6),
}
_CONTEXT_HEADINGS = {"subset": "this model, by subset", "ood": "this model, out of distribution"}
_CONTEXT_ROW = 0.3  # inches
_LONGEST_NAME = 40  # characters
_MOST_POINTS = 3000  # more only make the cloud opaque
_MOST_LENGTH_BINS = 10
_WIDE_RANGE = 50.0  # ratio of lengths, or of rewards to their bulk, from which an axis is logarithmic


def accuracy_in_context_figure(items: Sequence[Mapping[str, Any]]) -> Figure:
    """Dot plot of accuracies: model and yardsticks in order of size, then subsets, then out-of-distribution.

    Args:
        items: at least one, see rmcore.reporting.schema.ContextItem; values are shares, bounds may be None. Items
            without a value are named with a dash. The first item of kind "model" gives the title.
    """
    rows = _context_rows(items)
    height = max(2.4, 1.3 + _CONTEXT_ROW * len(rows))
    figure = style.new_figure(8.0, height)
    ax = figure.subplots()
    for position, (_, item) in enumerate(rows):
        if item is not None:
            _draw_accuracy(ax, position, item)
    style.headline(figure, _context_title(items))
    style.dress(ax, title="lines: 95 % intervals; diamonds and dotted lines: yardsticks", x="pairwise accuracy", y="")
    bold = [row for row, (_, item) in enumerate(rows) if item is None or item["kind"] == "model"]
    style.name_rows(ax, [label for label, _ in rows], bold)
    low, high = _context_limits(items)
    ax.set_xlim(low, high)
    style.percent_ticks(ax.xaxis)
    for item in items:
        value = numbers.finite(item["value"])
        if item["kind"] == "reference" and value is not None:
            ax.axvline(value, color=style.MUTED, linewidth=0.9, linestyle=":", zorder=0)
    return figure


def _context_rows(items: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """(label, item) from top to bottom; headings have no item."""

    def size(item: Mapping[str, Any]) -> float:
        value = numbers.finite(item["value"])
        return -np.inf if value is None else value

    top = [item for item in items if item["kind"] in ("model", "reference")]
    rows: list[tuple[str, Mapping[str, Any] | None]] = [
        (_context_label(item), item) for item in sorted(top, key=size, reverse=True)
    ]
    for kind, heading in _CONTEXT_HEADINGS.items():
        group = sorted((item for item in items if item["kind"] == kind), key=size, reverse=True)
        if group:
            rows.append((heading, None))
            rows += [(_context_label(item), item) for item in group]
    return rows


def _context_label(item: Mapping[str, Any]) -> str:
    return style.short(" ".join(str(item["name"]).split()), _LONGEST_NAME)


def _draw_accuracy(ax: Any, position: int, item: Mapping[str, Any]) -> None:
    colour, marker, size = _CONTEXT_LOOK[item["kind"]]
    value = numbers.finite(item["value"])
    bounds = numbers.interval(item, "share")
    text = numbers.percent(value) + (f"  ({bounds})" if bounds else "")
    weight = "bold" if item["kind"] == "model" else "normal"
    look = {"va": "center", "ha": "left", "fontsize": style.SMALL, "color": style.INK, "fontweight": weight}
    ax.text(1.02, position, text, transform=ax.get_yaxis_transform(), **look)
    if value is None:
        return
    style.draw_interval(ax, position, item, colour)
    hollow = "white" if item["kind"] == "reference" else colour
    ax.plot([value], [position], marker, color=colour, markersize=size, markerfacecolor=hollow, markeredgewidth=1.5)


def _context_limits(items: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Axis from a little below the smallest to a little above the largest number, at least ten points wide."""
    values = [numbers.finite(item.get(key)) for item in items for key in ("value", "ci_low", "ci_high")]
    known = [value for value in values if value is not None] or [0.5]
    low, high = min(known), max(known)
    pad = max(0.02, 0.06 * (high - low), (0.1 - (high - low)) / 2)
    return max(low - pad, min(low, 0) - 0.02), min(high + pad, max(high, 1) + 0.02)


def _context_title(items: Sequence[Mapping[str, Any]]) -> str:
    known = [item for item in items if numbers.finite(item["value"]) is not None]
    value = next((float(item["value"]) for item in known if item["kind"] == "model"), None)
    if value is None:
        return "Accuracies on the held-out pairs"
    references = sorted((item for item in known if item["kind"] == "reference"), key=lambda item: item["value"])
    below = [item for item in references if item["value"] < value]
    above = references[len(below) :]
    text = f"Held-out accuracy {numbers.percent(value)}"
    if below:
        text += f": {100 * (value - below[-1]['value']):.1f} points above “{_context_label(below[-1])}”"
    if above:
        text += f"{',' if below else ':'} {100 * (above[0]['value'] - value):.1f} below “{_context_label(above[0])}”"
    return text


def reliability_diagram_figure(bins: pd.DataFrame, ece: Mapping[str, Any]) -> Figure:
    """Accuracy over mean confidence of each bin with its interval, and how many pairs each bin holds beneath.

    Confidence is max(p, 1 - p) with p = sigmoid(beta * margin). Above the diagonal the model is too modest, below it
    too sure.

    Args:
        bins: at least one, as `rmcore.evaluation.calibration.reliability_bins` gives them.
        ece: the expected calibration error {value, ci_low, ci_high} for the title.
    """
    figure = style.new_figure(6.4, 6.2)
    top, bottom = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
    style.headline(figure, _reliability_title(bins, ece))
    pairs = numbers.count(int(bins["count"].sum()))
    style.dress(top, title=f"{pairs} held-out pairs", x="", y="share ranked as labelled (accuracy)")
    style.dress(bottom, title="", x="confidence of the model, max(p, 1 − p)", y="pairs")
    names = ("mean_confidence", "accuracy", "accuracy_low", "accuracy_high")
    confidence, accuracy, low, high = (bins[name].to_numpy(dtype=np.float64) for name in names)
    top.plot([0.5, 1], [0.5, 1], color=style.MUTED, linestyle="--", linewidth=1.2, label="confidence = accuracy")
    lower, upper = np.minimum(accuracy, confidence), np.maximum(accuracy, confidence)
    top.vlines(confidence, lower, upper, color=style.ORANGE, alpha=0.45, lw=5)
    whiskers = np.maximum(0.0, np.stack([accuracy - low, high - accuracy]))
    look: Any = {"color": style.BLUE, "marker": "o", "markersize": 6, "linewidth": 1.3, "capsize": 3}
    top.errorbar(confidence, accuracy, yerr=whiskers, label="accuracy in a bin, 95 % interval", **look)
    top.plot([], [], color=style.ORANGE, alpha=0.45, linewidth=5, label="gap")
    style.legend(top, loc="lower right")
    top.set_xlim(0.485, 1.015)
    top.set_ylim(max(-0.03, min(0.5, accuracy.min(), low.min()) - 0.08), 1.03)
    widths = bins["bin_high"] - bins["bin_low"]
    bottom.bar(bins["bin_low"] + widths / 2, bins["count"], width=widths * 0.92, color=style.BLUE, alpha=0.7)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    return figure


def _reliability_title(bins: pd.DataFrame, ece: Mapping[str, Any]) -> str:
    value, bounds = numbers.estimate("ece_debiased", ece, "")
    interval = f" (95 %: {bounds})" if bounds else ""
    if numbers.nothing_found("ece_debiased", ece):  # what the bins are off by is then what chance gives
        return f"No error of its probabilities was found: calibration error (ECE) {value}{interval}"
    weights = bins["count"] / bins["count"].sum()
    gap = float((weights * (bins["mean_confidence"] - bins["accuracy"])).sum())
    side = "about right on average" if abs(gap) < 0.01 else "too sure" if gap > 0 else "too modest"
    by = f" by {100 * abs(gap):.1f} points on average" if abs(gap) >= 0.01 else ""
    return f"Confidence is {side}{by}: calibration error (ECE) {value}{interval}"


def reward_by_length_figure(rewards: pd.DataFrame) -> Figure:
    """All 2P sides as reward (logits) over completion length (characters), with means of equally filled length bins.

    The interval of a bin's mean is a t interval with a standard error clustered by prompt, whose sides are not
    independent (Cameron and Miller 2015, J. Human Resources 50(2), eq. 11). The correlation is Spearman's, which
    neither a log axis nor an outlier changes.

    Args:
        rewards: P > 0 rows with prompt_id, reward_chosen, reward_rejected, chosen_chars, rejected_chars.
    """
    reward = np.concatenate([rewards[f"reward_{side}"].to_numpy(np.float64) for side in ("chosen", "rejected")])
    length = np.concatenate([rewards[f"{side}_chars"].to_numpy(np.float64) for side in ("chosen", "rejected")])
    prompts = rewards["prompt_id"].astype(str).to_numpy()
    cluster = np.unique(np.concatenate([prompts, prompts]), return_inverse=True)[1]
    figure = style.new_figure(8.0, 4.6)
    ax = figure.subplots()
    is_chosen = np.arange(len(reward)) < len(rewards)
    drawn = np.random.default_rng(0).permutation(len(reward))[:_MOST_POINTS]
    for side, colour, mask in (("chosen", style.BLUE, is_chosen), ("rejected", style.ORANGE, ~is_chosen)):
        points = drawn[mask[drawn]]
        alpha = 0.35 if len(drawn) > 300 else 0.7
        ax.scatter(length[points], reward[points], s=9, alpha=alpha, color=colour, linewidths=0, label=f"{side} side")
    bins = binned_means(length, reward, cluster)
    bars = np.nan_to_num(bins[["half_width"]].to_numpy(dtype=np.float64)[:, 0])
    look: Any = {"color": style.INK, "marker": "o", "markersize": 5, "linewidth": 1.4, "capsize": 3}
    ax.errorbar(bins["length"], bins["mean"], yerr=bars, label="mean of a length bin, 95 % interval", **look)
    if length.min() > 0 and length.max() / length.min() > _WIDE_RANGE:
        ax.set_xscale("log")
    central = float(np.percentile(np.abs(reward), 97.5))
    if central > 0 and np.abs(reward).max() > _WIDE_RANGE * central:
        ax.set_yscale("symlog", linthresh=central)
    style.headline(figure, _length_title(length, reward))
    title = f"{numbers.count(len(reward))} sides, {numbers.count(len(drawn))} drawn"
    style.dress(ax, title=title, x="length of the completion (characters)", y="reward (logits)")
    style.legend(ax)
    return figure


def _length_title(length: FloatArray, reward: FloatArray) -> str:
    if len(np.unique(length)) < 3 or len(np.unique(reward)) < 3:
        return "Reward against length: too few different lengths or rewards for a correlation"
    rho = float(stats.spearmanr(length, reward).statistic)
    trend = "hardly depends on" if abs(rho) < 0.1 else "rises with" if rho > 0 else "falls with"
    return f"Reward {trend} length: rank correlation {rho:+.2f} (Spearman)".replace("-", "−")


def binned_means(length: FloatArray, reward: FloatArray, cluster: npt.NDArray[np.intp]) -> pd.DataFrame:
    """Mean reward of up to ten equally filled length bins: columns length (median), mean, half_width (NaN: unknown)."""
    cuts = np.unique(np.quantile(length, np.linspace(0, 1, min(_MOST_LENGTH_BINS, max(1, len(length) // 8)) + 1)))
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
