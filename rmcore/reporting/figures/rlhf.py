"""Effects of training a policy on the reward model: proxy and true reward, win rate and length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import style
from rmcore.reporting.figures.numbers import finite
from rmcore.reporting.figures.overoptimization import REWARD_NAMES

REWARDS = (("proxy", style.BLUE, "s"), ("gold", style.ORANGE, "o"))
GAIN = "gain over the start (sd within prompts)"
_KL_TICKS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 800, 1200, 2000)
LONGEST_NAME = 24
"""Characters of a reward's name in a legend; the end of a path tells most."""
_TICKS_APART = 0.075  # of the axis, at least


def rlhf_curves_figure(record: Mapping[str, Any], best_of_n: Mapping[str, Any] | None = None) -> Figure:
    """Four panels: both rewards by step and by KL, win rate and length of the responses by step.

    With several rewards one more: what each gained, by step. Lines are means over seeds with 95 % intervals;
    where there are several seeds each has a faint line of its own.

    Args:
        record: `rlhf.json` of the stage grpo. What nobody judged or measured gives a panel that says so.
        best_of_n: the curve of best-of-n on the start policy's samples (of `overoptimization.json`), drawn at equal KL;
            its points may have no true reward.
    """
    several = record.get("several")
    figure = style.new_figure(11.0, 12.6 if several else 8.6)
    grid = figure.add_gridspec(3 if several else 2, 2)
    steps, distance, wins, lengths = (figure.add_subplot(grid[place // 2, place % 2]) for place in range(4))
    seeds = record["seeds"] if len(record["seeds"]) > 1 else []
    _by_step(steps, record, seeds)
    _by_kl(distance, record["curve"], best_of_n)
    _win_rate(wins, record["curve"], seeds)
    _length(lengths, record["curve"], seeds)
    if several:
        _several(figure.add_subplot(grid[2, :]), several)
    style.headline(figure, record["verdict"]["headline"])
    return figure


def _several(ax: Axes, several: Mapping[str, Any]) -> None:
    """Draw what each of several rewards gained on the samples trained on."""
    steps = several["steps"]
    style.dress(
        ax, title="each reward on what was trained on, since the first step",
        x="optimizer step of the policy", y="gain (sd within prompts at first)",
    )  # fmt: skip
    for place, (name, weight) in enumerate(zip(several["names"], several["weights"], strict=True)):
        colour = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.INK, style.MUTED)[place % 6]
        short = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
        label = f"{short}, weight {weight:g}"
        unit = next((one["spreads"][place] for one in steps if one["spreads"][place] > 0), float("nan"))
        first = steps[0]["means"][place]
        at = [one["step"] for one in steps]
        ax.plot(at, [(one["means"][place] - first) / unit for one in steps], color=colour, label=label)
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    _whole_steps(ax, steps)
    style.legend_below(ax)


def _by_step(ax: Axes, record: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]]) -> None:
    over = f"mean of {len(seeds)} seeds (faint: each)" if seeds else "one seed"
    style.dress(ax, title=f"reward by step · {over}, 95 % intervals", x="optimizer step of the policy", y=GAIN)
    drawn = [
        _line(ax, record["curve"], seeds, key, colour, marker, REWARD_NAMES[key]) for key, colour, marker in REWARDS
    ]
    if not any(drawn):
        style.note(ax, "no reward was measured")
        return
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    _whole_steps(ax, record["curve"])
    style.legend_below(ax)


def _by_kl(ax: Axes, curve: Sequence[Mapping[str, Any]], best_of_n: Mapping[str, Any] | None) -> None:
    """Rewards over the square root of the KL, with ticks in nats."""
    style.dress(
        ax, title="reward by distance from the start policy", x="KL from the start policy (nats, root scale)", y=GAIN
    )
    ends = [
        _along_kl(ax, points, key, colour, marker, method)
        for method, points in (("GRPO", curve), ("best-of-n", best_of_n["points"] if best_of_n else []))
        for key, colour, marker in REWARDS
    ]
    if max(ends) < 0:
        style.note(ax, "no distance was measured")
        return
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    ax.set_xscale("function", functions=(_signed(np.sqrt), _signed(np.square)))
    most = max(ends) or 1.0
    ax.set_xlim(-0.0015 * most, 1.06 * most)
    ticks = [0.0]
    for tick in _KL_TICKS:
        if tick <= 1.06 * most and tick**0.5 - ticks[-1] ** 0.5 >= _TICKS_APART * most**0.5:
            ticks.append(tick)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    style.legend_below(ax)


def _along_kl(ax: Axes, points: Sequence[Mapping[str, Any]], key: str, colour: str, marker: str, method: str) -> float:
    """Draw one reward in the order of its points; returns the largest KL drawn, -1 where there is nothing to draw."""
    distance = np.array([_value(point["kl"]) for point in points])
    values, low, high = _values(points, key)
    known = np.isfinite(distance) & np.isfinite(values)
    if not known.any():
        return -1.0
    distance = np.maximum(distance, 0.0)  # an estimate may fall below
    trained = method == "GRPO"
    look: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "markersize": 5,
        "label": f"{REWARD_NAMES[key]}, {method}",
    }
    if trained:
        ax.vlines(distance[known], low[known], high[known], color=colour, alpha=0.45, linewidth=1.2)
        ax.plot(distance[known], values[known], zorder=3, **look)
    else:
        ax.fill_between(distance[known], low[known], high[known], color=colour, alpha=0.08, linewidth=0)
        ax.plot(distance[known], values[known], linestyle="--", markerfacecolor="white", linewidth=1.1, **look)
    return float(distance[known].max())


def _win_rate(ax: Axes, curve: Sequence[Mapping[str, Any]], seeds: Sequence[Mapping[str, Any]]) -> None:
    style.dress(
        ax, title="win rate against the start policy, ties half",
        x="optimizer step of the policy", y="pairs won, as judged",
    )  # fmt: skip
    if not _line(ax, curve, seeds, "win_rate", style.BLUE, "o", "trained policy preferred"):
        style.note(ax, "Nobody judged the samples, so there is no true reward and no win rate")
        return
    ax.axhline(0.5, color=style.MUTED, linewidth=1.1, linestyle="--", label="no better than the start policy")
    style.percent_ticks(ax.yaxis)
    _whole_steps(ax, curve)
    style.legend_below(ax)


def _length(ax: Axes, curve: Sequence[Mapping[str, Any]], seeds: Sequence[Mapping[str, Any]]) -> None:
    style.dress(ax, title="length of the responses", x="optimizer step of the policy", y="tokens")
    _line(ax, curve, seeds, "num_tokens", style.PINK, "o", "tokens of a response")
    _whole_steps(ax, curve)
    ax.set_ylim(bottom=0.0)
    style.legend_below(ax)


def _line(
    ax: Axes,
    points: Sequence[Mapping[str, Any]],
    seeds: Sequence[Mapping[str, Any]],
    key: str,
    colour: str,
    marker: str,
    label: str,
) -> bool:
    """Draw one quantity by step: its mean with interval, each seed faint behind; False where there is no value."""
    steps = np.array([point["step"] for point in points])
    values, low, high = _values(points, key)
    known = np.isfinite(values)
    if not known.any():
        return False
    for seed in seeds:
        at = np.array([point["step"] for point in seed["points"]])
        ax.plot(at, _values(seed["points"], key)[0], color=colour, alpha=0.35, linewidth=0.9, zorder=2)
    if known.sum() > 1:
        ax.fill_between(steps[known], low[known], high[known], color=colour, alpha=0.16, linewidth=0)
    else:
        ax.vlines(steps[known], low[known], high[known], color=colour, alpha=0.6, linewidth=2)
    ax.plot(steps[known], values[known], color=colour, marker=marker, markersize=5, label=label, zorder=3)
    return True


def _values(points: Sequence[Mapping[str, Any]], key: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Value and both ends of the interval at each point, NaN where there is none; an end alone is none."""
    rows = []
    for point in points:
        item = point.get(key)
        value, low, high = ((finite(item.get(part)) if item else None) for part in ("value", "ci_low", "ci_high"))
        whole = None not in (value, low, high)
        rows.append((value, low if whole else None, high if whole else None))
    array = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 2]


def _value(item: Any) -> float:
    """Take the value of a number or of a value with interval; NaN where there is none."""
    number = finite(item.get("value") if isinstance(item, Mapping) else item)
    return float("nan") if number is None else number


def _whole_steps(ax: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Ticks at whole steps; one measurement alone has room on both sides."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = {point["step"] for point in points}
    if len(steps) == 1:
        (step,) = steps
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, step - 1), max(high, step + 1))
        ax.set_xticks([step])


def _signed(function: Callable[[FloatArray], FloatArray]) -> Callable[[FloatArray], FloatArray]:
    """`function` of the size with the sign of the value: a margin left of zero has a place too."""
    return lambda values: np.sign(values) * function(np.abs(values))
