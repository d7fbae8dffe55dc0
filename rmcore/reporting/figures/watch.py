"""The outcome of a watch over a training: the gain as far as it is known, the evidence, the labels, the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmcore.reporting.figures import style
from rmcore.reporting.figures.served import draw_gains

BETS = (
    ("turned", style.ORANGE, "the true reward has turned"),
    ("stopped", style.PINK, "the true reward has stopped gaining"),
    ("gained", style.GREEN, "gained"),
)
BAND = 1.96
FEW = 2
"""Seeds whose bands can be told apart."""


def watch_figure(record: Mapping[str, Any]) -> Figure:
    """Four panels: gain by step, evidence by step, labels by step, and the final gain as its pairs are judged.

    Args:
        record: `rlhf.json` of the stage grpo, of a training with a watch.
    """
    figure = style.new_figure(11.0, 8.6)
    (gains, evidence), (labels, final) = figure.subplots(2, 2)
    seeds = record["seeds"]
    _gains(gains, seeds)
    _evidence(evidence, seeds)
    _labels(labels, seeds)
    _final(final, seeds)
    style.headline(figure, record["verdict"]["headline"])
    return figure


def _gains(ax: Axes, seeds: Sequence[Mapping[str, Any]]) -> None:
    unit = seeds[0]["watch"]["unit"]
    few = len(seeds) <= FEW
    style.dress(
        ax, title="gain of the true reward, as far as the watch knows" + (" · bands: 95 % of its curve" if few else ""),
        x="optimizer step of the policy", y=f"gain over the start ({unit})",
    )  # fmt: skip
    for number, seed in enumerate(seeds):
        watch, first = seed["watch"], number == 0
        looks = watch["looks"]
        if looks:
            steps = [0, *(look["step"] for look in looks)]
            mean, spread = np.array(looks[-1]["gains"]).T
            ax.plot(steps, mean, color=style.BLUE, marker="o", markersize=4, alpha=1.0 if first else 0.5,
                    label="watched, by few labels" if first else None)  # fmt: skip
            if few:
                low, high = mean - BAND * spread, mean + BAND * spread
                ax.fill_between(steps, low, high, color=style.BLUE, alpha=0.14, linewidth=0)
        true = [(point["step"], point["gold"]["value"]) for point in seed["points"] if point["gold"]]
        if true:
            ax.plot(*zip(*true, strict=True), "--", color=style.ORANGE, linewidth=1.1, alpha=0.8 if first else 0.4,
                    label="every sample judged, which the watch did not see" if first else None)  # fmt: skip
        ended = watch["final"]
        if not watch["kept_step"]:
            ax.plot([0], [0], color=style.INK, marker="*", markersize=12, linestyle="none", zorder=5,
                    label="kept: the start" if first else None)  # fmt: skip
        elif ended is not None:
            low, high = ended["interval"]
            ax.errorbar(
                [watch["kept_step"]], [ended["value"]], [[ended["value"] - low], [high - ended["value"]]],
                color=style.INK, marker="*", markersize=12, capsize=3, zorder=5,
                label="kept, on fresh prompts" if first else None,
            )  # fmt: skip
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    style.whole_ticks(ax.xaxis)
    style.legend_below(ax)


def _evidence(ax: Axes, seeds: Sequence[Mapping[str, Any]]) -> None:
    style.dress(
        ax, title="evidence, which may be looked at after every pair",
        x="optimizer step of the policy", y="evidence (nats)",
    )  # fmt: skip
    needed = to_stop = 0.0
    for number, seed in enumerate(seeds):
        looks = seed["watch"]["looks"]
        for key, colour, label in BETS:
            values = [0.0, *(look[key] for look in looks)]
            steps = [0, *(look["step"] for look in looks)]
            ax.plot(steps, values, color=colour, marker="o", markersize=3.5, alpha=1.0 if number == 0 else 0.4,
                    label=label if number == 0 else None)  # fmt: skip
        needed = max([needed, *(look["needed"] for look in looks)])
        to_stop = max([to_stop, *(look["needed_to_stop"] for look in looks)])
    if not needed:
        style.note(ax, "there was no look")
        return
    ax.axhline(needed, color=style.INK, linestyle="--", linewidth=1.1, label=f"convinces ({needed:.1f})")
    if to_stop > needed:
        label = f"convinces that it has stopped ({to_stop:.1f})"
        ax.axhline(to_stop, color=style.PINK, linestyle="--", linewidth=1.1, label=label)
    style.whole_ticks(ax.xaxis)
    style.legend_below(ax)


def _labels(ax: Axes, seeds: Sequence[Mapping[str, Any]]) -> None:
    style.dress(ax, title="pairs judged at each look", x="optimizer step of the policy", y="pairs")
    looks = [look for seed in seeds for look in seed["watch"]["looks"]]
    if not looks:
        style.note(ax, "there was no look")
        return
    steps = sorted({look["step"] for look in looks})
    means = [float(np.mean([look["num_pairs"] for look in looks if look["step"] == step])) for step in steps]
    width = 0.7 * min(np.diff(steps), default=1)
    used = [seed["watch"]["labels"] + seed["watch"]["final_labels"] for seed in seeds]
    ax.bar(
        steps, means, width=width, color=style.BLUE, alpha=0.75, label=f"labels in all: {np.mean(used):,.0f} a training"
    )
    style.whole_ticks(ax.xaxis)
    style.legend_below(ax)


def _final(ax: Axes, seeds: Sequence[Mapping[str, Any]]) -> None:
    unit = seeds[0]["watch"]["unit"]
    style.dress(
        ax, title="gain of what is kept, on prompts that nothing was decided on",
        x="pairs judged", y=f"gain over the start ({unit})",
    )  # fmt: skip
    known = [seed["watch"]["final"] for seed in seeds if seed["watch"]["final"] is not None]
    if not known:
        style.note(ax, "the start was kept, or no final label was allowed")
        return
    draw_gains(ax, known)
    style.legend_below(ax)
