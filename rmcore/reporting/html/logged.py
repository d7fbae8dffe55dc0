"""The model's choices among logged answers, as people read them: in the report and in Markdown."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.logged_answers import finding
from rmcore.reporting.figures.quantities import points
from rmcore.reporting.html.markdown import bullets, escape, text_table

CAPTIONS = {
    "logged_answers": "Exact over all draws of k answers and one more of the same prompt. Other prompts have enough "
    "answers at each k, so neighbouring points differ in their prompts too.",
}
TITLE = "Choosing among logged answers"
HEADINGS = (
    "k",
    "prompts",
    "win rate",
    "of the longest answer",
    "model minus longest",
    "of a perfect choice",
    "gain, sd",
    "of a perfect choice, sd",
)


def logged_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a k, as `HEADINGS`."""
    return [
        (
            str(row["k"]),
            numbers.count(row["num_prompts"]),
            numbers.with_interval(row["win_rate"], "share"),
            numbers.with_interval(row["longest_win_rate"], "share"),
            points(row["over_longest"]),
            numbers.percent(row["perfect_win_rate"]),
            numbers.with_interval(row["gain"]),
            numbers.decimal(row["perfect_gain"]),
        )
        for row in found["choices"]
    ]


def logged_findings(found: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: what passed, what it was taken on, and how far it goes."""
    passed = "none does" if found["best_k"] is None else f"all up to k = {found['best_k']} do"
    lines = [
        "a k passes where the lower ends of win rate and gain lie above chance and every k before it passed: "
        f"{passed}; what ended it: {found['stopped']}",
        *(_judged(found) if "judged" in found else _labelled(found)),
    ]
    lines.append(
        "logged answers are not a policy's samples, and are easier to tell apart; this does not say that a policy may "
        "be optimised against the model"
    )
    return lines


def _judged(found: Mapping[str, Any]) -> list[str]:
    """The judged answers of a file, and what of them was left out."""
    counts = f"{numbers.count(found['num_prompts'])}, with {numbers.count(found['num_answers'])} answers"
    return [f"prompts: {counts}; how good one is follows from the file's {found['judged']}", *found["left_out"]]


def _labelled(found: Mapping[str, Any]) -> list[str]:
    """The answers of held-out pairs, how far their pairs agree, and what was left out."""
    lines = [
        f"prompts: {numbers.count(found['num_prompts'])}, with {numbers.count(found['num_answers'])} answers, whose "
        f"strength was fitted by least squares to {numbers.count(found['num_pairs'])} pairs ({found['strength']}); "
        f"{numbers.percent(found['agreement'])} of the pairs are ordered as labelled, and "
        f"{numbers.count(found['num_loops'])} of them could have contradicted the others",
        f"prompts left out for fewer than four connected answers: {numbers.count(found['num_left_out'])}",
    ]
    if found["num_undecided"]:
        lines.append(f"prompts left out whose labels rate all answers alike: {numbers.count(found['num_undecided'])}")
    return lines


def logged_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Gather the values that the report prints, numbers as text; None where held-out prompts have too few answers."""
    if found is None:
        return None
    return {
        "title": TITLE,
        "finding": finding(found),
        "headings": HEADINGS,
        "rows": logged_rows(found),
        "findings": logged_findings(found),
    }


def logged_markdown(found: Mapping[str, Any]) -> str:
    """Finding, table and what it was taken on; no line break at its end."""
    lines = bullets(map(escape, logged_findings(found)))
    return f"## {TITLE}\n\n{escape(finding(found))}.\n\n{text_table(HEADINGS, logged_rows(found))}\n\n{lines}"
