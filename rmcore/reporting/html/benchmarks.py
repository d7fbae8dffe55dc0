"""Scores on benchmarks as people read them."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.benchmarks import OVERALL, YARDSTICKS, title, yardstick
from rmcore.reporting.figures.quantities import points
from rmcore.reporting.html.blocks import Block, Table

TITLE = "Benchmarks"
CAPTIONS = {
    "benchmarks": "Yardsticks are what the same rule gives to the number of characters, to the number of Markdown "
    "marks, and to a bag of words that learnt from this run's training pairs.",
}
HEADINGS = (
    "benchmark",
    "questions",
    "score",
    "above the longer answer",
    "prompts seen in training",
)


def _rows(suites: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row a benchmark, as `HEADINGS`."""
    rows: list[tuple[str, ...]] = []
    for told in suites.values():
        overlap = told.get("overlap")
        seen = None if overlap is None else overlap["num_exact"] + overlap["num_near"]
        score = numbers.with_interval(told["scores"][OVERALL], "share")
        questions = numbers.count(told["num_questions"])
        rows.append((told["title"], questions, score, points(told["over_longer_wins"]), numbers.count(seen)))
    return rows


def _findings(suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences below the table: each benchmark's rule, what is missing of it, and what could not be read."""
    lines = []
    for told in suites.values():
        line = f"{told['title']}: {told['rule']}"
        if missing := sum(told["missing"].values()):
            line += f"; {numbers.count(missing)} questions are missing, so it is no published score's equal"
        if told["num_unreadable"]:
            line += f"; {numbers.count(told['num_unreadable'])} have an answer that the model cannot read: not right"
        lines.append(line)
    lines.append(
        "a score says how well the model ranks answers that others wrote; whether a policy may be optimised against "
        "it is another question"
    )
    return lines


def benchmarks_block(found: Mapping[str, Any]) -> Block:
    """The scores on public benchmarks, each with its rule, its parts and its yardsticks.

    Args:
        found: record of `rmcore.suites.record.benchmark_record`.
    """
    suites = found["suites"]
    about = "Answers that others wrote, each benchmark by its own rule. Intervals are 95 % over prompts."
    parts = [
        Table(("", ""), _parts(told), title=f"{told['title']}: its parts and yardsticks") for told in suites.values()
    ]
    return Block(
        TITLE,
        text=(f"{title(suites)}.", about),
        figures=("benchmarks",),
        tables=(Table(HEADINGS, _rows(suites)), *parts),
        findings=_findings(suites),
    )


def _parts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The scores that a benchmark's overall one is made of, and its yardsticks."""
    parts = [(name, numbers.with_interval(value, "share")) for name, value in told["scores"].items() if name != OVERALL]
    learnt = told.get("bag_of_words")
    above = [] if learnt is None else [("this model minus those words", points(learnt["above"]))]
    yardsticks = [
        (f"yardstick: {label}", numbers.percent(yardstick(told, name))) for name, (label, _, _) in YARDSTICKS.items()
    ]
    alike = [("answers of about one length", numbers.with_interval(told["length_matched"], "share"))]
    without = told.get("overlap", {}).get("score_without")
    unseen = [] if without is None else [("without the prompts seen in training", numbers.percent(without))]
    return [*parts, *alike, *unseen, *yardsticks, *above]
