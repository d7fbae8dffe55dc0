"""The trials of a search by accuracy and cost: which of them no other beats in both."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from rmcore.reporting.figures.style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    SMALL,
    dress,
    headline,
    legend,
    new_figure,
    note,
)
from rmcore.reporting.figures.tuning import is_better, score_axis, score_label, score_text
from rmcore.reporting.tuning_schema import TrialRow, TuningResults


def accuracy_cost_figure(results: TuningResults) -> Figure:
    """Complete trials by training time and score, with the front of those that no other beats in both.

    Args:
        results: of the search.
    """
    figure = new_figure(8.0, 4.4)
    ax = figure.subplots()
    better = "up" if results["higher_is_better"] else "down"
    title = f"complete trials only; better: left and {better}"
    dress(ax, title=title, x="training time, seconds in optimizer steps", y=score_label(results))
    complete = [one for one in results["trials"] if one["state"] == "complete"]
    if not complete:
        note(ax, "no trial ran to its end")
        headline(figure, "What accuracy costs cannot be told")
        return figure
    front = pareto_front(complete, results)
    ax.plot(
        [one["train_seconds"] for one in front], [one["values"][-1] for one in front], color=GREEN, linewidth=1.4,
        drawstyle="steps-post", zorder=1, label="front: none is better in both",
    )  # fmt: skip
    winner = results["winner"]["trial"]
    for one in complete:
        named = {0: ("defaults", ORANGE, "D"), winner: ("winner", GREEN, "o")}.get(one["number"])
        if named is None:
            ax.plot(
                one["train_seconds"], one["values"][-1], "o", color=BLUE, markersize=6, alpha=0.6, markeredgewidth=0
            )
            ax.annotate(
                str(one["number"]), (one["train_seconds"], one["values"][-1]), (5, 4), textcoords="offset points",
                fontsize=SMALL - 1, color=MUTED,
            )  # fmt: skip
            continue
        name, colour, marker = named
        style: dict[str, Any] = {"color": colour, "markersize": 9, "markeredgecolor": "white"}
        ax.plot(
            one["train_seconds"], one["values"][-1], marker, label=f"{name}, trial {one['number']}", zorder=4, **style
        )
    ax.set_xlim(left=0)
    ax.margins(x=0.08, y=0.12)
    score_axis(ax.yaxis, results)
    legend(ax, loc="best")
    cheapest = front[0]
    headline(
        figure,
        f"{len(front)} of {len(complete)} complete trials are beaten by no other in both score and time; the fastest "
        f"of them has {score_text(cheapest['values'][-1], results)} in {cheapest['train_seconds']:.3g} s",
    )
    return figure


def pareto_front(trials: Sequence[TrialRow], results: TuningResults) -> list[TrialRow]:
    """Trials that no other beats in score and time, the fastest first."""
    front: list[TrialRow] = []
    sign = 1 if results["higher_is_better"] else -1
    for one in sorted(trials, key=lambda trial: (trial["train_seconds"], -sign * trial["values"][-1])):
        if not front or is_better(one["values"][-1], front[-1]["values"][-1], results):
            front.append(one)
    return front
