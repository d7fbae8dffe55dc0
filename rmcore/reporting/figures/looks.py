"""The looks of an experiment: how the interval of each claim shrank as seeds were added, and where it was closed."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rmcore.reporting.experiment_schema import HypothesisResult, MetricInfo
from rmcore.reporting.figures import style
from rmcore.reporting.figures.claims import SEED_INTERVAL, VERDICTS, borders, claimed_span, subject

_WIDTH, _ROW = 10.0, 2.7  # inches
_COLUMNS = 2
_CLAIM = 58  # characters of a line of a claim


def looks_figure(
    hypotheses: Sequence[HypothesisResult], metrics: Mapping[str, MetricInfo], looks: Sequence[int]
) -> Figure:
    """One panel a claim: its value and 95 % interval at each look against the number of seeds.

    Args:
        hypotheses: at least one, each with the looks that were taken at it.
        metrics: what the hypotheses' metrics are.
        looks: the registered numbers of seeds.
    """
    num_rows = -(-len(hypotheses) // _COLUMNS)
    figure = style.new_figure(_WIDTH, 1.0 + num_rows * _ROW)
    axes = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for ax, item in zip(axes, hypotheses, strict=False):
        _panel(ax, item, metrics.get(item["metric"]), looks)
    for ax in axes[len(hypotheses) :]:
        ax.set_axis_off()
    taken = max(len(item["looks"]) for item in hypotheses)
    decided = sum(item["verdict"] != "inconclusive" for item in hypotheses)
    style.headline(figure, f"{decided} of {len(hypotheses)} claims decided after {taken} of {len(looks)} looks")
    style.shared_legend(figure, 4, side="left", handles=_key())
    return figure


def _panel(ax: Axes, item: HypothesisResult, info: MetricInfo | None, looks: Sequence[int]) -> None:
    unit, label = (info["unit"], info["label"]) if info else ("", item["metric"])
    comparison = item["comparison"]
    words, colour, marker = VERDICTS[item["verdict"]]
    style.dress(
        ax, title="", x="seeds", y=textwrap.fill(style.axis_label(f"{label}, {subject(item)}", unit, comparison), 26)
    )
    title = "\n".join(textwrap.wrap(f"{item['name']}: {item['claim']}", _CLAIM))
    ax.set_title(title, loc="left", fontsize=style.SMALL, color=style.INK, pad=16)
    ax.annotate(
        " · ".join(filter(None, (words, item["closed"]))), (0, 1), (0, 4), xycoords="axes fraction",
        textcoords="offset points", color=colour, fontsize=style.SMALL, va="bottom",
    )  # fmt: skip
    ax.yaxis.label.set_fontsize(style.SMALL)
    for look in item["looks"]:
        value, low, high = look["value"], look["ci_low"], look["ci_high"]
        if value is None:
            continue
        if low is not None and high is not None:
            ax.plot([look["num_seeds"]] * 2, [low, high], color=colour, linewidth=3, alpha=0.75, solid_capstyle="butt")
        face = "white" if low is None else colour
        ax.plot([look["num_seeds"]], [value], marker, color=colour, markersize=7, markerfacecolor=face)
    low, high = ax.get_ylim()
    claimed = borders(item)
    pad = 0.08 * (max(high, *claimed) - min(low, *claimed))
    ends = min(low, *claimed) - pad, max(high, *claimed) + pad
    ax.set_ylim(*ends)
    ax.axhspan(*claimed_span(item, *ends), color=style.GREEN, alpha=0.13, linewidth=0)
    for border in claimed:
        ax.axhline(border, color=style.INK, linewidth=1.2)
    ax.set_xlim(0, looks[-1] * 1.06)
    ax.set_xticks(list(looks))
    style.round_ticks(ax.yaxis, 6, 3)
    style.unit_ticks(ax.yaxis, unit, comparison)
    closed = item["looks"][-1]["num_seeds"]
    if closed < looks[-1] and item["closed"]:
        ax.axvspan(closed + 0.02 * looks[-1], looks[-1] * 1.06, color=style.MUTED, alpha=0.1, linewidth=0)


def _key() -> list[Any]:
    return [
        style.key_line(f"over all looks so far, {SEED_INTERVAL}", marker="o", linewidth=3, alpha=0.75),
        style.key_line("threshold, fixed before", linewidth=1.2),
        Patch(color=style.GREEN, alpha=0.2, label="what the claim names"),
        Patch(color=style.MUTED, alpha=0.15, label="closed: no further seeds"),
    ]
