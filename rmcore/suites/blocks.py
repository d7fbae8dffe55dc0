"""Scores on benchmarks as reports, cards and the terminal show them, next to that of the longer answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmcore.reporting.figures import numbers, style
from rmcore.reporting.html.blocks import ROUNDED, Block, Shown, Table, hub_result

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from matplotlib.figure import Figure

OVERALL = "overall"
TITLE = "Benchmarks"
_ROW = 0.42  # inches
HEADINGS = ("benchmark", "questions", "score", "above the longer answer")


def _rows(suites: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row a benchmark, as `HEADINGS`."""
    return [
        (
            told["title"],
            numbers.count(told["num_questions"]),
            numbers.with_interval(told["scores"][OVERALL], "share"),
            numbers.with_interval(told["over_longer_wins"], "points"),
        )
        for told in suites.values()
    ]


def _findings(suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences below the table: each benchmark's rule, missing and unreadable questions, prompts seen in training."""
    lines = []
    for told in suites.values():
        name, number, missing = told["title"], told["num_questions"], sum(told["missing"].values())
        lines.append(f"{name}: {told['rule']}; terms of the set: {told.get('terms') or 'not stated'}")
        if missing:
            whole = f"{numbers.count(missing)} of its {numbers.count(missing + number)} questions are missing"
            lines.append(f"{name}: {whole}, so its score does not compare with published ones")
        if unread := told["num_unreadable"]:
            lines.append(f"{name}: {numbers.count(unread)} answers could not be read by the model and count as wrong")
        lines.append(f"{name}: {_seen(told)}")
    lines.append(
        "a score says how well the model ranks answers that others wrote; whether a policy may be optimised against "
        "it is another question"
    )
    return lines


def num_seen(told: Mapping[str, Any]) -> int:
    """Prompts of a benchmark that training has seen; 0 where they were not compared."""
    return int(told.get("overlap", {}).get("num_seen", 0))


def _seen(told: Mapping[str, Any]) -> str:
    """Contamination in words: how many prompts training has seen, and the score without them."""
    overlap, seen, number = told.get("overlap"), num_seen(told), numbers.count(told["num_questions"])
    if overlap is None:
        return "not compared with the training pairs, so it is not known whether its prompts were seen in training"
    if not seen:
        return f"none of its {number} prompts was seen in training"
    without = "not known" if overlap["score_without"] is None else numbers.percent(overlap["score_without"])
    answers, pairs = (numbers.count(overlap[name]) for name in ("num_with_answer", "num_training_pairs"))
    return (
        f"{numbers.count(seen)} of its {number} prompts were seen in training ({answers} with an answer), by {pairs} "
        f"training pairs; score without them: {without}"
    )


def benchmarks_block(found: Mapping[str, Any]) -> Block:
    """The scores on public benchmarks, each with its rule and its parts.

    Args:
        found: record of `rmcore.suites.record.benchmark_record`.
    """
    suites = found["suites"]
    about = "Answers that others wrote, each benchmark by its own rule. Intervals are 95 % over prompts."
    parts = [Table(("", ""), _parts(told), title=f"{told['title']}: its parts") for told in suites.values()]
    return Block(
        TITLE,
        text=(f"{title(suites)}.", about),
        figures=("benchmarks",),
        tables=(Table(HEADINGS, _rows(suites)), *parts),
        findings=_findings(suites),
    )


def _parts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The scores that a benchmark's overall one is made of, and that of the longer answer."""
    parts = [
        (f"{name} ({numbers.count(value['num'])} questions)", numbers.with_interval(value, "share"))
        for name, value in told["scores"].items()
        if name != OVERALL
    ]
    return [*parts, ("the longer answer wins", numbers.percent(told["longer_wins"]))]


def benchmarks_figure(found: Mapping[str, Any]) -> "Figure":
    """Dot plot of overall scores, one row a benchmark, with what the same rule gives to the longer answer.

    Args:
        found: record of `rmcore.suites.record.benchmark_record`, with at least one benchmark.
    """
    suites = found["suites"]
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


def card(found: Mapping[str, Any]) -> tuple[tuple[Block], tuple["EvalResult", ...]]:
    """Show them on a card; a set of which questions are missing, or were seen in training, is not sent to the hub."""
    rule = "Score by the benchmark's own rule"
    results = [
        hub_result("Reward model benchmark", (told.get("hub") or name, told["title"]), rule, told["scores"][OVERALL])
        for name, told in found["suites"].items()
        if not sum(told["missing"].values()) and not num_seen(told) and told["scores"][OVERALL]["value"] is not None
    ]
    block = benchmarks_block(found)
    rounded = (ROUNDED,) if found.get("dtype") == "bfloat16" else ()
    return (block._replace(findings=(*block.findings, *rounded)),), tuple(results)


SHOWN = Shown(
    benchmarks_block,
    after="judgements",
    stage="benchmark",
    name="Benchmarks",
    in_summary=True,
    card=card,
    key_of_command="suites",
    captions={
        "benchmarks": "The diamond is what the same rule gives to the number of characters: the longer answer wins. A "
        "model left of the diamonds does less than counting characters."
    },
)
