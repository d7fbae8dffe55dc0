"""Scores on benchmarks as people read them: in the report and in Markdown."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.benchmarks import OVERALL, YARDSTICKS, title, yardstick
from rmcore.reporting.figures.quantities import points
from rmcore.reporting.html.markdown import bullets, escape, text_table

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


def benchmark_rows(suites: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row a benchmark, as `HEADINGS`."""
    rows: list[tuple[str, ...]] = []
    for told in suites.values():
        overlap = told.get("overlap")
        seen = None if overlap is None else overlap["num_exact"] + overlap["num_near"]
        score = numbers.with_interval(told["scores"][OVERALL], "share")
        questions = numbers.count(told["num_questions"])
        rows.append((told["title"], questions, score, points(told["over_longer_wins"]), numbers.count(seen)))
    return rows


def benchmark_findings(suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
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


def benchmarks_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Gather the values that the report prints, numbers as text; None where no benchmark was named."""
    if found is None:
        return None
    suites = found["suites"]
    return {
        "title": TITLE,
        "headings": HEADINGS,
        "rows": benchmark_rows(suites),
        "parts": [(told["title"], _parts(told)) for told in suites.values()],
        "findings": benchmark_findings(suites),
    }


def benchmarks_markdown(found: Mapping[str, Any]) -> str:
    """Finding, table and rules; no line break at its end."""
    suites = found["suites"]
    lines = bullets(map(escape, benchmark_findings(suites)))
    return f"## {TITLE}\n\n{escape(title(suites))}.\n\n{text_table(HEADINGS, benchmark_rows(suites))}\n\n{lines}"


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
