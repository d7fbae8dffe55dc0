"""A search for settings: how its trials went, what mattered, and how much being chosen flattered the winner."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import (
    BLUE,
    GREEN,
    INK,
    LABEL,
    MUTED,
    ORANGE,
    SMALL,
    dress,
    headline,
    new_figure,
    note,
    percent_ticks,
    shared_legend,
)
from rmcore.reporting.schema import Metric
from rmcore.reporting.tuning_schema import FEWEST_FOR_IMPORTANCE, ArmRow, TrialRow, TuningResults

GIVEN_UP = "#b9c0c7"
_GOLDEN = 0.618  # multiples of it are spread evenly
_BUNDLE = 0.07  # height of the bundle of lines through a choice


def score_axis(axis: Any, results: TuningResults) -> None:
    """Tick labels of an axis with the objective on it."""
    axis.set_major_locator(MaxNLocator(nbins=7, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    if results["unit"] == "share":
        low, high = sorted(axis.get_view_interval())
        if high - low < 0.05:
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.1f} %"))
        else:
            percent_ticks(axis)


def score_label(results: TuningResults, on: str = "validation pairs") -> str:
    """Label of an axis with the objective on it."""
    unit = "" if results["unit"] == "share" else f", {results['unit']}"
    return f"{results['label']}{unit}, {on}"


def score_text(value: float | None, results: TuningResults) -> str:
    """A score in a sentence."""
    return numbers.percent(value) if results["unit"] == "share" else numbers.decimal(value)


def is_better(one: float, other: float, results: TuningResults) -> bool:
    """Whether a score beats another one."""
    return one > other if results["higher_is_better"] else one < other


def trials_history_figure(results: TuningResults) -> Figure:
    """Every trial by its scores at the end of its rungs, those that were given up grey, and the best so far.

    Args:
        results: with at least one trial that came to the end of a rung.
    """
    figure = new_figure(10.0, 4.6)
    ax = figure.subplots()
    dress(ax, title="one column a trial; larger points: later rungs", x="trial", y=score_label(results))
    best: float | None = None
    line: list[tuple[int, float]] = []
    for one in results["trials"]:
        _trial(ax, one)
        if one["state"] == "complete" and (best is None or is_better(one["values"][-1], best, results)):
            best = one["values"][-1]
        if best is not None:
            line.append((one["number"], best))
    if line:
        numbers_, bests = zip(*line, strict=True)
        ax.step(numbers_, bests, where="post", color=GREEN, linewidth=1.6, zorder=1)
    failed = [one["number"] for one in results["trials"] if one["state"] == "failed"]
    if failed:
        ax.plot(failed, np.full(len(failed), 0.02), "x", color=ORANGE, markersize=7, transform=ax.get_xaxis_transform())
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=15))
    ax.margins(x=0.03, y=0.08)
    score_axis(ax.yaxis, results)
    states = [one["state"] for one in results["trials"]]
    pruned = f", {states.count('pruned')} given up early" if "pruned" in states else ""
    chosen, selected = results["winner"]["trial"], score_text(results["winner"]["selected"], results)
    headline(
        figure,
        f"{len(states)} trials{pruned}; best on its validation pairs: trial {chosen} with {selected}",
    )
    shared_legend(figure, 5, side="left", handles=_history_key(bool(failed)))
    return figure


def _trial(ax: Axes, one: TrialRow) -> None:
    values = one["values"]
    if not values:
        return
    complete = one["state"] == "complete"
    colour = BLUE if complete else GIVEN_UP
    ax.plot([one["number"]] * len(values), values, color=colour, linewidth=1.0, alpha=0.6, zorder=2)
    for value, share in zip(values, one["shares"], strict=True):
        size = 3.0 + 5.5 * share
        face = colour if share == 1 else "white"
        ax.plot(one["number"], value, "o", color=colour, markersize=size, markerfacecolor=face, zorder=3)


def _history_key(has_failed: bool) -> list[Line2D]:
    key = [
        Line2D([], [], color=BLUE, marker="o", linestyle="", markersize=8.5, label="complete"),
        Line2D([], [], color=BLUE, marker="o", linestyle="", markersize=4, markerfacecolor="white", label="its rungs"),
        Line2D(
            [], [], color=GIVEN_UP, marker="o", linestyle="", markersize=5, markerfacecolor="white", label="given up"
        ),
        Line2D([], [], color=GREEN, linewidth=1.6, label="best so far"),
    ]
    return [*key, *([Line2D([], [], color=ORANGE, marker="x", linestyle="", label="failed")] if has_failed else [])]


def importance_figure(results: TuningResults) -> Figure:
    """Share of the spread of final scores that each setting explains, or why that cannot be told.

    Args:
        results: of the search.
    """
    found = results["importance"]
    figure = new_figure(8.0, 1.5 + 0.42 * len(found or [0] * 4))
    ax = figure.subplots()
    complete = sum(one["state"] == "complete" for one in results["trials"])
    if found is None:
        note(
            ax,
            f"too few trials: {complete} ran to their end with different scores, "
            f"and {FEWEST_FOR_IMPORTANCE} are needed",
        )
        for side in ax.spines.values():
            side.set_visible(False)
        headline(figure, "Which settings mattered cannot be told")
        return figure
    names = sorted(found, key=lambda name: found[name])
    dress(ax, title=f"fANOVA over {complete} complete trials", x="share of the spread of final scores", y="")
    ax.barh(range(len(names)), [found[name] for name in names], color=BLUE, height=0.62)
    for place, name in enumerate(names):
        ax.annotate(
            f"{100 * found[name]:.0f} %", (found[name], place), (5, 0), textcoords="offset points", va="center",
            fontsize=SMALL, color=INK,
        )  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=LABEL, color=INK)
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.12 * max(*found.values(), 0.05))
    percent_ticks(ax.xaxis)
    top = names[-1]
    much = "most" if found[top] > 0.5 else "the largest part"
    headline(figure, f"{top} explains {much} of what differed between trials: {100 * found[top]:.0f} %")
    return figure


def optimism_figure(results: TuningResults) -> Figure:
    """Winner and defaults: the score that it was chosen by, that of fresh seeds, and the test score, with intervals.

    Args:
        results: of the search.
    """
    arms: list[tuple[str, ArmRow, str]] = [("winner", results["winner"], BLUE)]
    if results["winner"]["trial"] != 0:
        arms.append(("defaults", results["defaults"], ORANGE))
    figure = new_figure(9.0, 4.4)
    ax = figure.subplots()
    seeds = len(results["seeds"])
    title = f"large: mean with 95 % interval; small: each of {seeds} fresh seeds"
    dress(ax, title=title, x="", y=score_label(results, "by what it is measured on"))
    ax.set_ylabel(score_label(results, "").rstrip(", "))
    for place, (name, arm, colour) in enumerate(arms):
        shift = 0.16 * (place - (len(arms) - 1) / 2) * 2
        ax.plot(shift, arm["selected"], "D", color=colour, markersize=9, markerfacecolor="white", markeredgewidth=1.8)
        for at, metric, values in ((1, arm["fresh"], arm["fresh_values"]), (2, arm["test"], arm["test_values"])):
            _interval(ax, at + shift, metric, values, colour)
        means = [arm["selected"], arm["fresh"]["value"], arm["test"]["value"]]
        known = [(at + shift, value) for at, value in enumerate(means) if value is not None]
        ax.plot(*zip(*known, strict=True), color=colour, linewidth=1.0, alpha=0.5, zorder=1, label=name)
    ax.set_xticks(
        [0, 1, 2],
        ["selected:\nvalidation pairs of its trial", "fresh seeds:\nvalidation pairs", "fresh seeds:\ntest pairs"],
    )
    ax.tick_params(axis="x", labelsize=LABEL, colors=INK)
    ax.set_xlim(-0.5, 2.5)
    ax.margins(y=0.1)
    score_axis(ax.yaxis, results)
    headline(figure, results["headline"])
    handles = [Line2D([], [], color=colour, marker="o", linewidth=2, label=name) for name, _, colour in arms]
    hollow = Line2D([], [], color=INK, marker="D", markerfacecolor="white", linestyle="", label="one number, chosen")
    shared_legend(figure, 3, side="left", handles=[*handles, hollow])
    return figure


def _interval(ax: Axes, at: float, metric: Metric, values: Sequence[float], colour: str) -> None:
    if metric["ci_low"] is not None and metric["ci_high"] is not None:
        ax.plot(
            [at] * 2,
            [metric["ci_low"], metric["ci_high"]],
            color=colour,
            linewidth=3,
            alpha=0.75,
            solid_capstyle="butt",
        )
    spots = at + np.linspace(0.05, 0.09, max(len(values), 1))[: len(values)]
    ax.plot(spots, values, "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
    if metric["value"] is not None:
        ax.plot(at, metric["value"], "o", color=colour, markersize=9, markeredgecolor="white", zorder=4)


def parallel_coordinates_figure(results: TuningResults) -> Figure:
    """One line a trial through the values of its settings to its score; the better, the darker.

    Args:
        results: of the search.
    """
    names = list(results["space"])
    trials = [one for one in results["trials"] if one["values"]]
    complete = [one for one in trials if one["state"] == "complete"]
    figure = new_figure(max(7.0, 1.5 * (len(names) + 1)), 5.0)
    ax = figure.subplots()
    scales = [_Scale(results, name) for name in names]
    scores = np.array([one["values"][-1] for one in complete])
    low, high = (float(scores.min()), float(scores.max())) if len(scores) else (0.0, 1.0)
    span = (high - low) or 1.0
    for one in sorted(trials, key=lambda trial: _order(trial, results)):
        ys = [scale.place(one["settings"].get(scale.name), one["number"]) for scale in scales]
        if any(y is None for y in ys):
            continue
        known = [y for y in ys if y is not None]
        if one["state"] != "complete":
            ax.plot(range(len(names)), known, color=GIVEN_UP, linewidth=0.6, alpha=0.6, zorder=1)
            continue
        share = (one["values"][-1] - low) / span
        depth = share if results["higher_is_better"] else 1 - share
        is_winner = one["number"] == results["winner"]["trial"]
        style: dict[str, Any] = {"color": GREEN if is_winner else BLUE, "zorder": 4 if is_winner else 3}
        width, alpha = (2.6, 1.0) if is_winner else (1.4, 0.15 + 0.75 * depth)
        ax.plot(range(len(names) + 1), [*known, share], linewidth=width, alpha=alpha, **style)
    for place, scale in enumerate(scales):
        _axis(ax, place, scale.ticks())
    _axis(ax, len(names), [(0.0, score_text(low, results)), (1.0, score_text(high, results))])
    _dress_axes(ax, [*(name.partition(".")[2] for name in names), results["label"]])
    headline(figure, f"The settings of {len(trials)} trials; the winner is trial {results['winner']['trial']}")
    key = [
        Line2D([], [], color=GREEN, linewidth=2.6, label="the winner"),
        Line2D([], [], color=BLUE, linewidth=1.6, label="complete, the better the darker"),
        Line2D([], [], color=GIVEN_UP, linewidth=1.0, label="given up"),
    ]
    shared_legend(figure, 3, side="left", handles=key)
    return figure


def _order(one: TrialRow, results: TuningResults) -> tuple[bool, float]:
    """The better is drawn the later, above the others."""
    value = one["values"][-1]
    return one["state"] == "complete", value if results["higher_is_better"] else -value


def _dress_axes(ax: Axes, names: Sequence[str]) -> None:
    ax.set_xticks(range(len(names)), [name.replace("_", "_\n") if len(name) > 14 else name for name in names])
    ax.tick_params(axis="x", labelsize=SMALL, colors=INK, length=0)
    ax.set_yticks([])
    ax.set_ylim(-0.08, 1.08)
    ax.set_xlim(-0.3, len(names) - 0.55)
    for side in ax.spines.values():
        side.set_visible(False)


def _axis(ax: Axes, place: int, ticks: Sequence[tuple[float, str]]) -> None:
    ax.plot([place, place], [0, 1], color=MUTED, linewidth=1.0, zorder=2)
    for y, text in ticks:
        ax.plot(place, y, "_", color=MUTED, markersize=6, zorder=2)
        style: dict[str, Any] = {
            "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
            "zorder": 6,
        }
        style |= {"fontsize": SMALL - 1, "color": INK, "va": "center"}
        ax.annotate(text, (place, y), (5, 0), textcoords="offset points", **style)


class _Scale:
    """Where the values of one setting lie on its axis, from 0 to 1."""

    def __init__(self, results: TuningResults, name: str) -> None:
        self.name = name
        declared = results["space"][name]
        values = [one["settings"][name] for one in results["trials"] if name in one["settings"]]
        self.choices: list[Any] | None = None
        if isinstance(declared, dict):
            # As they were: a factor by another setting may lead out of what was drawn.
            found = [float(value) for value in values if isinstance(value, int | float)] or [float(declared["low"])]
            self.log = bool(declared.get("log"))
            self.low, self.high = self._map(min(found)), self._map(max(found))
        else:
            self.choices = [*declared, *(value for value in dict.fromkeys(values) if value not in declared)]

    def _map(self, value: float) -> float:
        return float(np.log10(value)) if self.log else value

    def place(self, value: Any, number: int) -> float | None:
        """The place of a trial's value, of a choice a little beside it, so that bundles show; None: it has none."""
        if self.choices is not None:
            if value not in self.choices:
                return None
            beside = _BUNDLE * ((number * _GOLDEN) % 1 - 0.5)
            return self.choices.index(value) / max(1, len(self.choices) - 1) + beside
        if not isinstance(value, int | float):
            return None
        return (self._map(value) - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Places that are named."""
        if self.choices is not None:
            last = max(1, len(self.choices) - 1)
            return [(place / last, _text(value)) for place, value in enumerate(self.choices)]
        ends = [10**end if self.log else end for end in (self.low, (self.low + self.high) / 2, self.high)]
        return [(place / 2, _text(end)) for place, end in enumerate(ends)]


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)
