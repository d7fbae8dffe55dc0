"""Scores on benchmarks with their intervals, beside those of rules that read little or nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import (
    BLUE,
    GRID,
    INK,
    MUTED,
    PALETTE,
    SMALL,
    dress,
    headline,
    new_figure,
    percent_ticks,
    shared_legend,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERALL = "overall"
YARDSTICKS = {
    "longer_wins": ("the longer answer", "D", MUTED),
    "more_markdown_wins": ("more Markdown", "s", MUTED),
    "bag_of_words": ("words of the training pairs", "^", PALETTE[5]),
}
_ROW = 0.42  # inches


def benchmarks_figure(suites: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Dot plot of overall scores, one row a benchmark, with what the same rule gives to yardsticks.

    Args:
        suites: records of `rmcore.suites.record.benchmark_record` by name.

    Raises:
        DataError: there is none.
    """
    if not suites:
        raise DataError("no benchmark was measured, so there is nothing to draw; name one in benchmark.suites.")
    figure = new_figure(8.0, max(2.6, 1.9 + _ROW * len(suites)))
    ax = figure.subplots()
    for position, told in enumerate(suites.values()):
        _draw(ax, position, told)
    headline(figure, title(suites))
    dress(ax, title="each by its own rule; lines: 95 % intervals over prompts", x="overall score", y="")
    ax.set_yticks(range(len(suites)), [told["title"] for told in suites.values()], fontsize=SMALL, color=INK)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(suites) - 0.4, -0.6)
    percent_ticks(ax.xaxis)
    shared_legend(figure, 4)
    return figure


def title(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """Say on how many benchmarks the model is above the rule that the longer answer wins."""
    above = [told for told in suites.values() if (told["over_longer_wins"]["ci_low"] or 0) > 0]
    return f"Above “the longer answer wins” on {len(above)} of {len(suites)} benchmarks (each at 95 %)"


def yardstick(told: Mapping[str, Any], name: str) -> float | None:
    """Score of a yardstick on a benchmark; None where it has none."""
    found = told.get(name)
    return numbers.finite(found["score"] if isinstance(found, Mapping) else found)


def _draw(ax: Any, position: int, told: Mapping[str, Any]) -> None:
    ax.axhline(position, color=GRID, linewidth=0.6, zorder=0)
    for name, (label, marker, colour) in YARDSTICKS.items():
        value = yardstick(told, name)
        if value is not None:
            ax.plot(
                [value], [position], marker, color=colour, markersize=6, markerfacecolor="white", markeredgewidth=1.5,
                label=None if position else label,
            )  # fmt: skip
    found = told["scores"][OVERALL]
    value, low, high = (numbers.finite(found[key]) for key in ("value", "ci_low", "ci_high"))
    if value is None:
        return
    if low is not None and high is not None:
        ax.plot([low, high], [position, position], color=BLUE, linewidth=2.5, solid_capstyle="round", alpha=0.75)
    ax.plot([value], [position], "o", color=BLUE, markersize=8, label=None if position else "this model")
