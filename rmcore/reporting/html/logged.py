"""The model's choices among logged answers, as people read them."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.logged_answers import finding
from rmcore.reporting.html.blocks import Block, Table

CAPTIONS = {
    "logged_answers": "Exact over all draws of k answers and one more of the same prompt. Other prompts have enough "
    "answers at each k, so neighbouring points differ in their prompts too."
}
TITLE = "Choosing among logged answers"
HEADINGS = (
    *("k", "prompts", "win rate", "of the longest answer", "model minus longest", "of a perfect choice"),
    *("gain, sd", "of a perfect choice, sd"),
)


def _rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a k, as `HEADINGS`."""
    return [
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
        for row in found["choices"]
    ]


def _findings(found: Mapping[str, Any]) -> list[str]:
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


def logged_block(found: Mapping[str, Any]) -> Block:
    """The choices of the model among logged answers, by k."""
    about = (
        "Held-out prompts that have several labelled answers: the model chooses the best of k of them, and the labels "
        "judge it against another answer of the same prompt. A blind choice wins 50 %. Gains are in standard "
        "deviations of the labelled strength within prompts, intervals are 95 % over prompts."
    )
    return Block(
        TITLE,
        text=(f"{finding(found)}.", about),
        figures=("logged_answers",),
        tables=(Table(HEADINGS, _rows(found), left=()),),
        findings=_findings(found),
    )
