"""The outcome of a training against the reward model: its section, for a report and a terminal, and its figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.html.policy import EMPTY, REWARD_NAMES, number_or_reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[Mapping[str, Any]]
"""A point of a curve: `step`, and by the name of each quantity its value with an interval, or None."""

CAPTIONS = {
    "rlhf": "The proxy is what the policy is trained on, so it rises. Where the true reward no longer follows, "
    "training on does harm. The dashed curves are best-of-n by the same reward model: what the same KL buys without "
    "any training.",
    "watch": "What the watch knew, by few labels. Evidence above the dashed line convinces; each of the two that end a "
    "training is wrong in at most one of twenty by default, however often one looks. The curve on the left is a smooth "
    "guess; no alarm rests on it.",
}
REWARD_SOURCES = {"vllm": "a vLLM reward server", "local": "the reward model in the training's process"}
RLHF_HEADINGS = ("step", "KL, nats", "proxy gain, sd", "gain of the true reward, sd", "win rate", "tokens")
DIGITS = (("kl", 2), ("proxy", 2), ("gold", 2), ("win_rate", 2), ("num_tokens", 0))
"""Decimals of each column after the step."""
WATCH_HEADINGS = (
    "seed", "step", "KL, nats", "against step", "pairs", "difference", "turned, nats", "stopped, nats", "what follows"
)  # fmt: skip
REWARDS = (("proxy", style.BLUE, "s"), ("gold", style.ORANGE, "o"))
STEP_LABEL, GAIN_LABEL = "optimizer step of the policy", "gain over the start (sd within prompts)"
BETS = (
    ("turned", style.ORANGE, "the true reward has turned"),
    ("stopped", style.PINK, "the true reward has stopped gaining"),
    ("gained", style.GREEN, "gained"),
)
NORMAL_QUANTILE = 1.96
FEW_SEEDS = 2
"""Seeds whose bands can be told apart."""
_KL_TICKS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 800, 1200, 2000)
_TICKS_APART = 0.075  # of the axis, at least


def rlhf_block(record: Mapping[str, Any]) -> Block:
    """A training against the reward model: the curve, the watch's looks, examples.

    Args:
        record: of the stage grpo (`rmcore.stages.grpo`).
    """
    # What nobody judged is a dash.
    rows = [
        (str(point["step"]), *("-" if point[name] is None else _short(point[name], digits) for name, digits in DIGITS))
        for point in record["curve"]
    ]
    return Block(
        record["verdict"]["headline"],
        text=(
            "The policy was trained by GRPO to raise the reward model's reward (the proxy). Gains are over the policy "
            "as it began, in standard deviations within prompts, so they compare with best-of-n. The win rate is how "
            "often a sample of the trained policy is judged better than one of the start policy; ties count half.",
        ),
        figures=("rlhf",),
        tables=(Table(RLHF_HEADINGS, rows, left=()),),
        findings=_findings(record),
        parts=[*_watch_block(record), *_examples_block(record)],
    )


def _short(value: Mapping[str, Any], digits: int) -> str:
    """With few decimals, so that all columns fit on a page."""
    if value["value"] is None or value["ci_low"] is None:
        return number_or_reason(value)
    return f"{value['value']:.{digits}f} ({value['ci_low']:.{digits}f} to {value['ci_high']:.{digits}f})"


def _findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: first what speaks against the verdict."""
    num_seeds, cost = record["num_seeds"], record["cost"]
    intervals = (
        f"over {num_seeds} seeds and the prompts that they share" if num_seeds > 1 else "over prompts, not seeds"
    )
    penalties = [] if record["kl_beta"] == 0 else [f"KL penalty {record['kl_beta']:g}"]
    penalties += [] if record["length_penalty"] == 0 else [f"{record['length_penalty']:g} off for each token"]
    training = [
        f"GRPO with the loss {record['loss']}, {record['num_steps']} steps of {record['prompts_per_step']} prompts "
        f"with {record['group_size']} samples each, learning rate {record['learning_rate']:g}",
        *penalties,
    ]
    return [
        *record["verdict"]["reasons"],
        *(f"seed {seed['seed']} ended early: {seed['stopped']}" for seed in record["seeds"] if seed["stopped"]),
        *_kept(record),
        ", ".join(training),
        f"rewards: the reward model's own, from {REWARD_SOURCES[record['rewards']]}; the true reward: "
        f"{record['judge']}",
        *_moved_rewards(record.get("several")),
        _samples(record.get("parity")),
        f"measured on {record['num_prompts']} held-out prompts with {record['samples_per_prompt']} samples each, "
        f"against stored samples of the start policy; 95 % intervals {intervals}",
        f"{numbers.duration(cost['train_seconds'])} of training and measuring, {cost['tokens_per_second']:,.0f} "
        f"response tokens/s while training, {cost['peak_mib']:,.0f} MiB at most",
    ]


def _kept(record: Mapping[str, Any]) -> list[str]:
    watches = [(seed["seed"], seed["watch"]) for seed in record["seeds"] if seed.get("watch")]
    lines = []
    for seed, watch in watches:
        kept = "the start is kept" if not watch["kept_step"] else f"kept is step {watch['kept_step']}"
        lines.append(
            f"seed {seed}: {kept}, after {watch['labels']} labels on the way and {watch['final_labels']} for what was "
            "gained"
        )
    return lines + ([f"model/ is the policy of seed {record['saved_seed']}"] if len(watches) > 1 else [])


def _moved_rewards(several: Mapping[str, Any] | None) -> list[str]:
    """How each of several rewards moved on what was trained on; nothing where there was one."""
    if several is None:
        return []
    rewards = zip(
        several["names"], several["weights"], several["steps"][0]["means"], several["steps"][-1]["means"], strict=True
    )
    moves = [
        f"the mean of {name} (weight {weight:g}) went from {before:.3g} to {after:.3g}"
        for name, weight, before, after in rewards
    ]
    return [
        "several rewards, each normalised within its groups and then summed: " + "; ".join(moves),
        "the proxy and best-of-n are those of the reward model's own reward alone",
    ]


def _samples(parity: Mapping[str, Any] | None) -> str:
    """Who drew the samples, and how far its probabilities were from the trainer's."""
    if parity is None:
        return "samples: drawn in the training's process"
    return (
        "samples: drawn by a vLLM that has each step's own weights; over the "
        f"tokens of {parity['num_steps']} steps its log-probabilities are {parity['mean_difference']:.2g} nats from "
        f"the trainer's on average and {parity['max_difference']:.2g} at most, which truncated importance sampling "
        "corrects"
    )


def _watch_block(record: Mapping[str, Any]) -> list[Block]:
    """One row a look; no block where nobody watched."""
    rows: list[tuple[str, ...]] = []
    needed = 0.0
    for seed in record["seeds"]:
        looks = (seed.get("watch") or {"looks": []})["looks"]
        steps = [0, *(look["step"] for look in looks)]
        for look in looks:
            needed = needed or look["needed"]
            rows.append(
                (
                    str(seed["seed"]),
                    str(look["step"]),
                    f"{look['kl']:.2f}",
                    "the start" if look["reference"] == 0 else str(steps[look["reference"]]),
                    str(look["num_pairs"]),
                    "unreadable" if look["difference"] is None else f"{look['difference']:+.2f} ± {look['error']:.2f}",
                    f"{look['turned']:+.1f}",
                    f"{look['stopped']:+.1f}",
                    f"{look['action'].replace('_', ' ')}: {look['reason']}",
                )
            )
    if not rows:
        return []
    about = (
        "At each look the policy was compared with an earlier one on prompts that had not been used. Evidence of "
        f"{needed:.1f} nats convinces: that the true reward has turned, or that it gains less than is "
        "useful since half of its distance. A plateau is no alarm."
    )
    table = Table(WATCH_HEADINGS, rows, left=(len(WATCH_HEADINGS) - 1,))
    return [Block("What the judge's few labels said on the way", text=(about,), figures=("watch",), tables=(table,))]


def _examples_block(record: Mapping[str, Any]) -> list[Block]:
    """The first final prompts with the answers of the start and of the kept policy: not chosen for how they look."""
    watch = record["seeds"][0].get("watch") or {"final": None}
    final = watch["final"] or {"examples": []}
    if not final["examples"] or not watch["kept_step"]:
        return []
    rows = [
        (*(row[name] or EMPTY for name in ("prompt", "before", "after")), f"{row['difference']:+.2f} {watch['unit']}")
        for row in final["examples"]
    ]
    about = "The first prompts of the final measurement, whatever became of them, with the difference as judged."
    headings = ("prompt", "the start policy", "the kept policy", "after − before")
    return [Block("Before and after", text=(about,), tables=(Table(headings, rows, left=range(3)),))]


def rlhf_curves_figure(record: Mapping[str, Any], best_of_n: Mapping[str, Any] | None = None) -> "Figure":
    """Four panels: both rewards by step and by KL, win rate and length of the responses by step.

    Lines are means over seeds with 95 % intervals; where there are several seeds each has a faint line of its own.

    Args:
        record: `rlhf.json` of the stage grpo. What nobody judged or measured gives a panel that says so.
        best_of_n: the curve of best-of-n on the start policy's samples (of `overoptimization.json`), drawn at equal KL;
            its points may have no true reward.
    """
    figure = style.new_figure(11.0, 8.6)
    (steps, distance), (wins, lengths) = figure.subplots(2, 2)
    seeds = record["seeds"] if len(record["seeds"]) > 1 else []
    _by_step(steps, record["curve"], seeds)
    _by_kl(distance, record["curve"], best_of_n)
    _win_rate(wins, record["curve"], seeds)
    _length(lengths, record["curve"], seeds)
    style.headline(figure, record["verdict"]["headline"])
    return figure


def _by_step(ax: "Axes", curve: Points, seeds: Sequence[Mapping[str, Any]]) -> None:
    over = f"mean of {len(seeds)} seeds (faint: each)" if seeds else "one seed"
    style.dress(ax, title=f"reward by step · {over}, 95 % intervals", x=STEP_LABEL, y=GAIN_LABEL)
    drawn = [_line(ax, curve, seeds, key, colour, marker, REWARD_NAMES[key]) for key, colour, marker in REWARDS]
    if not any(drawn):
        style.note(ax, "no reward was measured")
        return
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    _whole_steps(ax, curve)
    style.legend_below(ax)


def _by_kl(ax: "Axes", curve: Points, best_of_n: Mapping[str, Any] | None) -> None:
    """Rewards over the square root of the KL, with ticks in nats."""
    title = "reward by distance from the start policy"
    style.dress(ax, title=title, x="KL from the start policy (nats, root scale)", y=GAIN_LABEL)
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


def _along_kl(ax: "Axes", points: Points, key: str, colour: str, marker: str, method: str) -> float:
    """Draw one reward in the order of its points; returns the largest KL drawn, -1 where there is nothing to draw."""
    distance = np.array([_value(point["kl"]) for point in points])
    values, low, high = _values(points, key)
    known = np.isfinite(distance) & np.isfinite(values)
    if not known.any():
        return -1.0
    distance = np.maximum(distance, 0.0)  # an estimate may fall below
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
    look["label"] = f"{REWARD_NAMES[key]}, {method}"
    if method == "GRPO":
        ax.vlines(distance[known], low[known], high[known], color=colour, alpha=0.45, linewidth=1.2)
        ax.plot(distance[known], values[known], zorder=3, **look)
    else:
        ax.fill_between(distance[known], low[known], high[known], color=colour, alpha=0.08, linewidth=0)
        ax.plot(distance[known], values[known], linestyle="--", markerfacecolor="white", linewidth=1.1, **look)
    return float(distance[known].max())


def _win_rate(ax: "Axes", curve: Points, seeds: Sequence[Mapping[str, Any]]) -> None:
    title = "win rate against the start policy, ties half"
    style.dress(ax, title=title, x=STEP_LABEL, y="pairs won, as judged")
    if not _line(ax, curve, seeds, "win_rate", style.BLUE, "o", "trained policy preferred"):
        style.note(ax, "Nobody judged the samples, so there is no true reward and no win rate")
        return
    ax.axhline(0.5, color=style.MUTED, linewidth=1.1, linestyle="--", label="no better than the start policy")
    style.percent_ticks(ax.yaxis)
    _whole_steps(ax, curve)
    style.legend_below(ax)


def _length(ax: "Axes", curve: Points, seeds: Sequence[Mapping[str, Any]]) -> None:
    style.dress(ax, title="length of the responses", x=STEP_LABEL, y="tokens")
    _line(ax, curve, seeds, "num_tokens", style.PINK, "o", "tokens of a response")
    _whole_steps(ax, curve)
    ax.set_ylim(bottom=0.0)
    style.legend_below(ax)


def _line(
    ax: "Axes", points: Points, seeds: Sequence[Mapping[str, Any]], key: str, colour: str, marker: str, label: str
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


def _values(points: Points, key: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Value and both ends of the interval at each point, NaN where there is none; an end alone is none."""
    rows = []
    for point in points:
        item = point.get(key)
        value, low, high = (
            (numbers.finite(item.get(part)) if item else None) for part in ("value", "ci_low", "ci_high")
        )
        whole = None not in (value, low, high)
        rows.append((value, low if whole else None, high if whole else None))
    array = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 2]


def _value(item: Any) -> float:
    """The value of a number or of a value with interval; NaN where there is none."""
    number = numbers.finite(item.get("value") if isinstance(item, Mapping) else item)
    return float("nan") if number is None else number


def _whole_steps(ax: "Axes", points: Points) -> None:
    """Ticks at whole steps; one measurement alone has room on both sides."""
    from matplotlib.ticker import MaxNLocator

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


def watch_figure(record: Mapping[str, Any]) -> "Figure":
    """Two panels of a watch: the gain by step, and the evidence by step.

    Args:
        record: `rlhf.json` of the stage grpo, of a training with a watch.
    """
    figure = style.new_figure(11.0, 5.2)
    gains, evidence = figure.subplots(1, 2)
    watches = [seed["watch"] for seed in record["seeds"]]
    looks = [look for watch in watches for look in watch["looks"]]
    _watched_gains(gains, record["seeds"])
    _evidence(evidence, watches, looks)
    style.headline(figure, record["verdict"]["headline"])
    return figure


def _watched_gains(ax: "Axes", seeds: Sequence[Mapping[str, Any]]) -> None:
    few = len(seeds) <= FEW_SEEDS
    title = "gain of the true reward, as far as the watch knows" + (" · bands: 95 % of its curve" if few else "")
    style.dress(ax, title=title, x=STEP_LABEL, y=f"gain over the start ({seeds[0]['watch']['unit']})")
    for number, seed in enumerate(seeds):
        watch, first = seed["watch"], number == 0
        looks = watch["looks"]
        if looks:
            steps = [0, *(look["step"] for look in looks)]
            mean, spread = np.array(looks[-1]["gains"]).T
            ax.plot(steps, mean, color=style.BLUE, marker="o", markersize=4, alpha=1.0 if first else 0.5,
                    label="watched, by few labels" if first else None)  # fmt: skip
            if few:
                low, high = mean - NORMAL_QUANTILE * spread, mean + NORMAL_QUANTILE * spread
                ax.fill_between(steps, low, high, color=style.BLUE, alpha=0.14, linewidth=0)
        true = [(point["step"], point["gold"]["value"]) for point in seed["points"] if point["gold"]]
        if true:
            ax.plot(*zip(*true, strict=True), "--", color=style.ORANGE, linewidth=1.1, alpha=0.8 if first else 0.4,
                    label="every sample judged, which the watch did not see" if first else None)  # fmt: skip
        star: dict[str, Any] = {"color": style.INK, "marker": "*", "markersize": 12, "zorder": 5}
        if not watch["kept_step"]:
            ax.plot([0], [0], linestyle="none", label="kept: the start" if first else None, **star)
        elif watch["final"] is not None:
            value, (low, high) = watch["final"]["value"], watch["final"]["interval"]
            ax.errorbar(
                [watch["kept_step"]], [value], [[value - low], [high - value]], capsize=3,
                label="kept, on fresh prompts" if first else None, **star,
            )  # fmt: skip
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    style.whole_ticks(ax.xaxis)
    style.legend_below(ax, columns=1)


def _evidence(ax: "Axes", watches: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]]) -> None:
    title = "evidence, which may be looked at after every pair"
    style.dress(ax, title=title, x=STEP_LABEL, y="evidence (nats)")
    for number, watch in enumerate(watches):
        steps = [0, *(look["step"] for look in watch["looks"])]
        for key, colour, label in BETS:
            values = [0.0, *(look[key] for look in watch["looks"])]
            ax.plot(steps, values, color=colour, marker="o", markersize=3.5, alpha=1.0 if number == 0 else 0.4,
                    label=label if number == 0 else None)  # fmt: skip
    if not looks:
        style.note(ax, "there was no look")
        return
    needed = max(look["needed"] for look in looks)
    ax.axhline(needed, color=style.INK, linestyle="--", linewidth=1.1, label=f"convinces ({needed:.1f})")
    style.whole_ticks(ax.xaxis)
    style.legend_below(ax, columns=1)
