"""Choosing among logged answers: the win rate of the model's best of k, between the longest answer and the best one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmcore.reporting.figures import style
from rmcore.reporting.figures.numbers import bound, finite, percent, with_interval

if TYPE_CHECKING:  # a report needs the words and numbers of this module, and draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def logged_answers_figure(found: Mapping[str, Any]) -> "Figure":
    """Win rate against k with 95 % intervals over prompts, the labels' own choice and the longest answer.

    Args:
        found: record of `rmcore.readiness.logged_answers.logged_answers`.
    """
    from matplotlib.ticker import MaxNLocator

    figure = style.new_figure(9.5, 4.6)
    ax = figure.subplots()
    choices = found["choices"]
    at = list(range(len(choices)))  # one step each time k doubles
    ax.plot(
        at, [row["perfect_win_rate"] for row in choices], color=style.GREEN, linestyle="--", marker="^", markersize=5,
        label="perfect choice, by the labels",
    )  # fmt: skip
    _line(ax, [row["win_rate"] for row in choices], -0.03, style.BLUE, "o", "this model")
    _line(ax, [row["longest_win_rate"] for row in choices], 0.03, style.ORANGE, "s", "the longest answer")
    ax.axhline(0.5, color=style.MUTED, linewidth=0.9, linestyle=":", label="blind choice")
    ax.set_xticks(at, [f"{row['k']}\n{_prompts(row['num_prompts'])}" for row in choices])
    ax.set_xlim(-0.4, len(choices) - 0.6)
    ax.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], min_n_ticks=3))  # 2.5 points would be rounded
    style.percent_ticks(ax.yaxis)
    title = f"{found['num_answers']:,} labelled answers of {_prompts(found['num_prompts'])} held out, 95 % over prompts"
    if any(row["win_rate"].get("low_if_no_disaster") is not None for row in choices):
        title += " if none is a disaster"
    style.dress(ax, title=title, x="k, answers that the best is chosen from", y="win rate over another logged answer")
    style.legend(ax, loc="center left", bbox_to_anchor=(1.01, 0.5))
    style.headline(figure, finding(found))
    return figure


def finding(found: Mapping[str, Any]) -> str:
    """Say in one sentence what the choices show, never more than that logged answers are told apart."""
    best = next((row for row in found["choices"] if row["k"] == found["best_k"]), None)
    if best is None:
        first = found["choices"][0]
        if found["outcome"] == "too_few":
            return "Too few prompts with several labelled answers to say whether the model picks better ones"
        if found["outcome"] == "refuted":
            shown = f"best of {first['k']} wins {with_interval(first['win_rate'], 'share')}"
            return f"The model picks the worse answers among logged ones: {shown}"
        return "It is not certain that the model picks better answers among logged ones"
    won = f"Up to k = {best['k']} the model picks better answers among logged ones"
    shown = f"best of {best['k']} wins {with_interval(best['win_rate'], 'share')}"
    longest = percent(best["longest_win_rate"]["value"])
    low, high = (finite(bound(best["over_longest"], end)) for end in ("ci_low", "ci_high"))
    if low is not None and low > 0:
        return f"{won}: {shown}, more than the longest answer ({longest})"
    if high is not None and high < 0:
        return f"{won}: {shown}, yet less than the longest answer ({longest})"
    return f"{won}: {shown}, which cannot be told from taking the longest answer ({longest})"


def _prompts(num: int) -> str:
    return f"{num:,} prompt{'' if num == 1 else 's'}"


def _line(ax: "Axes", values: list[Mapping[str, Any]], shift: float, colour: str, marker: str, label: str) -> None:
    """Values with their intervals, shifted a little so that both can be seen."""
    at = [place + shift for place in range(len(values))]
    for x, value in zip(at, values, strict=True):
        ax.plot(
            [x, x], [bound(value, "ci_low"), bound(value, "ci_high")],
            color=colour, linewidth=2.5, alpha=0.6, solid_capstyle="butt",
        )  # fmt: skip
    ax.plot(at, [value["value"] for value in values], color=colour, marker=marker, markersize=6, label=label)
