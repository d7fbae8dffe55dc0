"""Rows with two answers in columns of their own: which these are, where the prompt is, the row as a pair or a tie."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import PROMPTS, TWO_ANSWERS, Row

Translate = Callable[[Row], dict[str, Any]]
"""A row in, one that `rmcore.data.readers.layouts` reads out."""
SIDES = {"left": 0, "right": 1, "first": 0, "second": 1}
TIES = frozenset(
    ("tie", "ties", "tied", "tie_bothbad", "tie_both_bad", "both_bad", "bothbad", "both_good", "both", "neither",
     "equal", "draw", "same", "no_preference")
)  # fmt: skip


def only(found: Sequence[Any], what: str) -> Any:
    """The only one of several that may be meant.

    Raises:
        DataError: there are two.
    """
    if len(found) > 1:
        named = " and ".join(" with ".join(one) if isinstance(one, tuple) else one for one in found[:2])
        raise DataError(f"{named} may both be {what}, and which one is meant is unknown: drop or rename one.")
    return found[0]


def prompt_column(columns: Collection[str]) -> str | None:
    """Find the column of the prompt next to answers; None where there is none.

    Raises:
        DataError: two may be it.
    """
    found = [name for name in PROMPTS if name in columns]
    if found[:1] == ["prompt"] or not found:
        return found[0] if found else None
    return str(only(found, "the prompt"))


def two_answers(columns: Collection[str]) -> list[tuple[str, str]]:
    """Which pairs of answer columns are there; none where there is a third answer."""
    third = {"a": "c", "1": "3"}
    return [
        (first, second)
        for first, second in TWO_ANSWERS
        if first in columns and second in columns and first[:-1] + third[first[-1]] not in columns
    ]


def prompt_of_two(sample: Row, first: str) -> tuple[bool, str | None]:
    """(whether a prompt is to be had, its column): whole conversations carry theirs."""
    prompt = prompt_column(sample)
    return prompt is not None or isinstance(sample[first], list), prompt


def preferred(
    row: Row, answers: tuple[str, str], better: int, prompt: str | None, used: Iterable[str] = ()
) -> dict[str, Any]:
    """The row with its answers as chosen and rejected; other columns of the two sides follow them."""
    chosen, rejected = answers[better], answers[1 - better]
    sides = {f"_{chosen[-1]}": "chosen_", f"_{rejected[-1]}": "rejected_"}
    unused = {name: value for name, value in row.items() if name not in {*answers, prompt, *used}}
    translated: dict[str, Any] = {}
    for name, value in unused.items():
        stem, ending = name[:-2], name[-2:]
        sided = ending in sides and all(stem + other in unused for other in sides)
        translated[sides[ending] + stem if sided else name] = value
    translated |= {"chosen": row.get(chosen), "rejected": row.get(rejected)}
    return translated if prompt is None else translated | {"prompt": row.get(prompt)}


def tied(row: Row, answers: tuple[str, str], prompt: str | None, used: Iterable[str] = ()) -> dict[str, Any]:
    """The row with its answers as equally good; other columns of the two sides keep their names."""
    translated = {name: value for name, value in row.items() if name not in {*answers, prompt, *used, "scores"}}
    translated |= {"responses": [row.get(name) for name in answers], "ranks": [1, 1]}
    return translated if prompt is None else translated | {"prompt": row.get(prompt)}
