"""Reliability diagram: how often the model is right where it says that it is sure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import BLUE, MUTED, ORANGE, dress, headline, legend, new_figure, note


def reliability_diagram_figure(bins: pd.DataFrame, ece: Mapping[str, Any]) -> Figure:
    """Accuracy over mean confidence of each bin with its interval, and how many pairs each bin holds beneath.

    Confidence is max(p, 1 - p) with p = sigmoid(beta * margin). Above the diagonal the model is too modest, below it
    too sure.

    Args:
        bins: one row a bin: bin_low, bin_high, mean_confidence, accuracy, count, accuracy_low, accuracy_high. Rows with
            count 0 may hold nulls; they are left out, as may be the rows.
        ece: the expected calibration error {value, ci_low, ci_high} for the title.
    """
    filled = bins[bins["count"] > 0]
    figure = new_figure(6.4, 6.2)
    top, bottom = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
    low = 0.0 if (bins["bin_low"] < 0.5).any() else 0.5
    headline(figure, _title(filled, ece))
    pairs = numbers.count(int(bins["count"].sum()))
    dress(top, title=f"{pairs} held-out pairs", x="", y="share ranked as labelled (accuracy)")
    dress(bottom, title="", x="confidence of the model, max(p, 1 − p)", y="pairs")
    if filled.empty:
        note(top, "no pair to draw")
    else:
        top.plot([low, 1], [low, 1], color=MUTED, linestyle="--", linewidth=1.2, label="confidence = accuracy")
        _points(top, filled)
        widths = filled["bin_high"] - filled["bin_low"]
        bottom.bar(filled["bin_low"] + widths / 2, filled["count"], width=widths * 0.92, color=BLUE, alpha=0.7)
        legend(top, loc="lower right")
    margin = 0.03 * (1 - low)
    top.set_xlim(low - margin, 1 + margin)
    lowest = min([low, *filled["accuracy"], *filled["accuracy_low"].dropna()])
    top.set_ylim(max(-0.03, lowest - 0.08), 1.03)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    return figure


def _points(ax: Any, filled: pd.DataFrame) -> None:
    """Accuracy of each filled bin, with whiskers where the interval is known."""
    confidence, accuracy = (filled[name].to_numpy(dtype=np.float64) for name in ("mean_confidence", "accuracy"))
    bounds = [
        filled[end].astype(float).fillna(filled["accuracy"]).to_numpy() for end in ("accuracy_low", "accuracy_high")
    ]
    whiskers = np.maximum(0.0, np.stack([accuracy - bounds[0], bounds[1] - accuracy]))
    ax.vlines(
        confidence, np.minimum(accuracy, confidence), np.maximum(accuracy, confidence), color=ORANGE, alpha=0.45, lw=5
    )
    label = "accuracy in a bin, 95 % interval"
    ax.errorbar(
        confidence, accuracy, yerr=whiskers, color=BLUE, marker="o", markersize=6, linewidth=1.3, capsize=3, label=label
    )
    ax.plot([], [], color=ORANGE, alpha=0.45, linewidth=5, label="gap")


def _title(filled: pd.DataFrame, ece: Mapping[str, Any]) -> str:
    if filled.empty:
        return "Calibration: no pair was evaluated"
    value, bounds = numbers.estimate("ece_debiased", ece, "")
    interval = f" (95 %: {bounds})" if bounds else ""
    if numbers.nothing_found("ece_debiased", ece):  # what the bins are off by is then what chance gives
        return f"No error of its probabilities was found: calibration error (ECE) {value}{interval}"
    weights = filled["count"] / filled["count"].sum()
    gap = float((weights * (filled["mean_confidence"] - filled["accuracy"])).sum())
    side = "about right on average" if abs(gap) < 0.01 else "too sure" if gap > 0 else "too modest"
    by = f" by {100 * abs(gap):.1f} points on average" if abs(gap) >= 0.01 else ""
    return f"Confidence is {side}{by}: calibration error (ECE) {value}{interval}"
