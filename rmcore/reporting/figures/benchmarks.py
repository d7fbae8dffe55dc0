"""Scores on benchmarks with their intervals, next to that of the longer answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmcore.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERALL = "overall"
_ROW = 0.42  # inches


def benchmarks_figure(suites: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Dot plot of overall scores, one row a benchmark, with what the same rule gives to the longer answer.

    Args:
        suites: records of `rmcore.suites.record.benchmark_record` by name, at least one.
    """
    figure = style.new_figure(8.0, max(2.6, 1.9 + _ROW * len(suites)))
    ax = figure.subplots()
    for position, told in enumerate(suites.values()):
        _draw(ax, position, told)
    style.headline(figure, title(suites))
    style.dress(ax, title="each by its own rule; lines: 95 % intervals over prompts", x="overall score", y="")
    style.name_rows(ax, [told["title"] for told in suites.values()])
    style.percent_ticks(ax.xaxis)
    style.shared_legend(figure, 4)
    return figure


def title(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """Say on how many benchmarks the model is above the rule that the longer answer wins."""
    above = [told for told in suites.values() if (told["over_longer_wins"]["ci_low"] or 0) > 0]
    return f"Above “the longer answer wins” on {len(above)} of {len(suites)} benchmarks (each at 95 %)"


def _draw(ax: Any, position: int, told: Mapping[str, Any]) -> None:
    if told["longer_wins"] is not None:
        ax.plot(
            [told["longer_wins"]], [position], "D", color=style.MUTED, markersize=6, markerfacecolor="white",
            markeredgewidth=1.5, label=None if position else "the longer answer",
        )  # fmt: skip
    found = told["scores"][OVERALL]
    if found["value"] is None:
        return
    style.draw_interval(ax, position, found, style.BLUE)
    ax.plot([found["value"]], [position], "o", color=style.BLUE, markersize=8, label=None if position else "this model")
