"""The model's choices among logged answers: their section and their figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmcore.reporting.figures import numbers, style
from rmcore.reporting.html.blocks import Block, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTIONS = {
    "logged_answers": "Exact over all draws of k answers and one more of the same prompt. Other prompts have enough "
    "answers at each k, so neighbouring points differ in their prompts too."
}
TITLE = "Choosing among logged answers"
HEADINGS = (
    *("k", "prompts", "win rate", "of the longest answer", "model minus longest", "of a perfect choice"),
    *("gain, sd", "of a perfect choice, sd"),
)


def logged_block(record: Mapping[str, Any]) -> Block:
    """The choices of the model among logged answers, by k.

    Args:
        record: of `rmcore.readiness.logged_answers.logged_answers`.
    """
    about = (
        "Held-out prompts that have several labelled answers: the model chooses the best of k of them, and the labels "
        "judge it against another answer of the same prompt. A blind choice wins 50 %. Gains are in standard "
        "deviations of the labelled strength within prompts, intervals are 95 % over prompts."
    )
    rows = [
        (
            str(row["k"]),
            numbers.count(row["num_prompts"]),
            numbers.with_interval(row["win_rate"], "share"),
            numbers.with_interval(row["longest_win_rate"], "share"),
            numbers.with_interval(row["over_longest"], "points"),
            numbers.percent(row["perfect_win_rate"]),
            numbers.with_interval(row["gain"]),
            numbers.decimal(row["perfect_gain"]),
        )
        for row in record["choices"]
    ]
    passed = "none does" if record["best_k"] is None else f"all up to k = {record['best_k']} do"
    findings = [
        "a k passes where the lower ends of win rate and gain lie above chance and every k before it passed: "
        f"{passed}; what ended it: {record['stopped']}",
        *(_of_judged_file(record) if "judged" in record else _of_pairs(record)),
        "logged answers are not a policy's samples, and are easier to tell apart; this does not say that a policy may "
        "be optimised against the model",
    ]
    return Block(
        TITLE,
        text=(f"{logged_finding(record)}.", about),
        figures=("logged_answers",),
        tables=(Table(HEADINGS, rows, left=()),),
        findings=findings,
    )


def _of_judged_file(record: Mapping[str, Any]) -> list[str]:
    counts = f"{numbers.count(record['num_prompts'])}, with {numbers.count(record['num_answers'])} answers"
    return [f"prompts: {counts}; how good one is follows from the file's {record['judged']}", *record["left_out"]]


def _of_pairs(record: Mapping[str, Any]) -> list[str]:
    lines = [
        f"prompts: {numbers.count(record['num_prompts'])}, with {numbers.count(record['num_answers'])} answers, whose "
        f"strength was fitted by least squares to {numbers.count(record['num_pairs'])} pairs ({record['strength']}); "
        f"{numbers.percent(record['agreement'])} of the pairs are ordered as labelled, and "
        f"{numbers.count(record['num_loops'])} of them could have contradicted the others",
        f"prompts left out for fewer than four connected answers: {numbers.count(record['num_left_out'])}",
    ]
    if record["num_undecided"]:
        lines.append(f"prompts left out whose labels rate all answers alike: {numbers.count(record['num_undecided'])}")
    return lines


def logged_finding(record: Mapping[str, Any]) -> str:
    """Say what the choices show, in one sentence, never more than that logged answers are told apart."""
    best = next((row for row in record["choices"] if row["k"] == record["best_k"]), None)
    if best is None:
        first = record["choices"][0]
        won = f"best of {first['k']} wins {numbers.with_interval(first['win_rate'], 'share')}"
        outcomes = {
            "too_few": "Too few prompts with several labelled answers to say whether the model picks better ones",
            "refuted": f"The model picks the worse answers among logged ones: {won}",
        }
        uncertain = "It is not certain that the model picks better answers among logged ones"
        return outcomes.get(record["outcome"], uncertain)
    better = f"Up to k = {best['k']} the model picks better answers among logged ones"
    won = f"best of {best['k']} wins {numbers.with_interval(best['win_rate'], 'share')}"
    longest = numbers.percent(best["longest_win_rate"]["value"])
    low, high = (numbers.finite(numbers.bound(best["over_longest"], end)) for end in ("ci_low", "ci_high"))
    if low is not None and low > 0:
        return f"{better}: {won}, more than the longest answer ({longest})"
    if high is not None and high < 0:
        return f"{better}: {won}, yet less than the longest answer ({longest})"
    return f"{better}: {won}, which cannot be told from taking the longest answer ({longest})"


def logged_answers_figure(record: Mapping[str, Any]) -> "Figure":
    """Win rate against k with 95 % intervals over prompts, the labels' own choice and the longest answer."""
    from matplotlib.ticker import MaxNLocator  # here: a report needs the words of this module, and draws nothing

    figure = style.new_figure(9.5, 4.6)
    ax = figure.subplots()
    choices = record["choices"]
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
    counts = f"{record['num_answers']:,} labelled answers of {_prompts(record['num_prompts'])} held out"
    is_conditional = any(row["win_rate"].get("low_if_no_disaster") is not None for row in choices)
    title = f"{counts}, 95 % over prompts{' if none is a disaster' if is_conditional else ''}"
    style.dress(ax, title=title, x="k, answers that the best is chosen from", y="win rate over another logged answer")
    style.legend(ax, loc="center left", bbox_to_anchor=(1.01, 0.5))
    style.headline(figure, logged_finding(record))
    return figure


def _prompts(num: int) -> str:
    return f"{num:,} prompt{'' if num == 1 else 's'}"


def _line(ax: "Axes", values: Sequence[Mapping[str, Any]], shift: float, colour: str, marker: str, label: str) -> None:
    """Values with their intervals, shifted a little so that both can be seen."""
    at = [position + shift for position in range(len(values))]
    for x, value in zip(at, values, strict=True):
        ends = [numbers.bound(value, "ci_low"), numbers.bound(value, "ci_high")]
        ax.plot([x, x], ends, color=colour, linewidth=2.5, alpha=0.6, solid_capstyle="butt")
    ax.plot(at, [value["value"] for value in values], color=colour, marker=marker, markersize=6, label=label)
