"""Parts of layouts: which columns are the two answers and the prompt, and a row in one of the forms of `row_pairs`."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import PROMPTS, TWO_ANSWERS, Row

Translate = Callable[[Row], Row]
"""A row in, one that `row_pairs.read_row` reads out."""
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
    return str(found[0] if found[0] == "prompt" else only(found, "the prompt")) if found else None


def two_answers(columns: Collection[str]) -> list[tuple[str, str]]:
    """Which pairs of answer columns are there; none where there is a third answer."""
    third = {"a": "c", "1": "3"}
    return [
        (first, second)
        for first, second in TWO_ANSWERS
        if first in columns and second in columns and first[:-1] + third[first[-1]] not in columns
    ]


def asked_twice(sample: Row) -> tuple[tuple[str, str], str | None] | None:
    """The columns of two answers and of their prompt, None for whole conversations, which carry theirs."""
    found = two_answers(sample)
    if not found:
        return None
    answers, prompt = only(found, "the two answers"), prompt_column(sample)
    return None if prompt is None and not isinstance(sample[answers[0]], list) else (answers, prompt)


def without(row: Row, *used: str | None) -> dict[str, Any]:
    """The row without the columns that a layout uses itself."""
    return {name: value for name, value in row.items() if name not in used}


def preferred(
    row: Row, answers: tuple[str, str], better: int | None, prompt: str | None, used: Iterable[str | None] = ()
) -> dict[str, Any]:
    """The row with its answers as chosen and rejected, or as equally good where neither is better.

    Other columns of the two sides follow those that are chosen and rejected; in a tie they keep their names.
    """
    asked = {} if prompt is None else {"prompt": row.get(prompt)}
    unused = without(row, *answers, prompt, *used)
    if better is None:
        return without(unused, "scores") | {"responses": [row.get(name) for name in answers], "ranks": [1, 1]} | asked
    chosen, rejected = answers[better], answers[1 - better]
    sides = {f"_{chosen[-1]}": "chosen_", f"_{rejected[-1]}": "rejected_"}
    translated: dict[str, Any] = {}
    for name, value in unused.items():
        stem, ending = name[:-2], name[-2:]
        sided = ending in sides and all(stem + other in unused for other in sides)
        translated[sides[ending] + stem if sided else name] = value
    return translated | {"chosen": row.get(chosen), "rejected": row.get(rejected)} | asked
