"""Scores on benchmarks as people read them."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.benchmarks import OVERALL, title
from rmcore.reporting.html.blocks import Block, Table

TITLE = "Benchmarks"
CAPTIONS = {
    "benchmarks": "The diamond is what the same rule gives to the number of characters: the longer answer wins."
}
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
