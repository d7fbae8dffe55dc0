"""Layouts of other programs and public data sets: columns in, a translation of their rows (or None) out.

A translation is made from the columns of the source once, and then holds for all its rows. What may mean two things is
refused for the whole file (a DataError), what one row lacks costs that row (`RowRejected`). Each gives one of the forms
of `row_pairs`: `prompt`, `chosen`, `rejected` (, `target_margin`) of two answers, and `prompt`, `responses`, `ranks` or
`scores` of more, or of two that are a tie.

docs/data.md shows the columns of each layout, and which answer is the better one.

Where two answers become chosen and rejected, `model_a` and `model_b` become `chosen_model` and `rejected_model`.
"""

import re
from collections.abc import Callable
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.readers.columns import (
    ARENA_WINNERS,
    OPENAI_COLUMNS,
    PLACES,
    STRENGTHS,
    SWIFT_COLUMNS,
    TIES,
    WINNERS,
    Row,
    Translate,
    asked_twice,
    only,
    preferred,
    prompt_column,
    two_answers,
    without,
    word,
)
from rmcore.data.readers.fields import Reason, RowRejected, is_missing, json_object, json_or_text, list_value, number

_SIDE = re.compile(
    r"[ab]|(?:model|response|answer|completion|output|reply|text|conversation|option|assistant|candidate|choice)_?[ab12]"
)
_NO_STRENGTH = -100
"""Values that mean that no preference was given."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def winner(sample: Row) -> Translate | None:
    """A column that names the better of two answers: by its column, its letter, its side, or its model."""
    verdicts, compared = [name for name in WINNERS if name in sample], asked_twice(sample)
    if not verdicts or compared is None:
        return None
    column, (answers, prompt) = only(verdicts, "the column that says which answer is better"), compared
    return lambda row: preferred(row, answers, _better(row, column, answers), prompt, (column,))


def _better(row: Row, column: str, answers: tuple[str, str]) -> int | None:
    """0 where the first answer is better, 1 where the second is, None where neither is.

    A bare 1 or 2 names an answer where the answers are numbered. Next to lettered ones 1 may be the first of 1 and 2,
    the second of 0 and 1, or "yes, A", and any other number is a probability or a grade: the file is refused.
    """
    value = row.get(column)
    if is_missing(value):
        raise RowRejected(Reason.NOT_LABELLED)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowRejected(Reason.UNKNOWN_WINNER)
    if not isinstance(value, str) or _NUMBER.fullmatch(value.strip()):
        number_of_answer = float(value) if isinstance(value, str) else value
        if number_of_answer not in (1, 2) or answers[0].endswith("a"):
            raise DataError(
                f"{column} is {value!r:.40}, and which of {answers[0]} and {answers[1]} that is cannot be known: a "
                "probability, a grade, or a number that counts from 0 or from 1. Write "
                f"{answers[0]}, {answers[1]} or tie in that column."
            )
        return int(number_of_answer) - 1
    spelled = word(value)
    if spelled in TIES:
        return None
    if spelled in PLACES:
        return PLACES[spelled]
    if _SIDE.fullmatch(spelled):
        return "ab12".index(spelled[-1]) % 2
    by_name = [place for place, name in enumerate(("model_a", "model_b")) if row.get(name) == value]
    if len(by_name) != 1:
        raise RowRejected(Reason.UNKNOWN_WINNER)
    return by_name[0]


def arena(sample: Row) -> Translate | None:
    """LMArena's 55k battles: one of three columns is 1. Prompt and answers are JSON lists, a text for each turn."""
    compared = asked_twice(sample) if all(name in sample for name in ARENA_WINNERS[:2]) else None
    if compared is None:
        return None
    answers, prompt = compared

    def translate(row: Row) -> Row:
        flags = [number(row.get(name), Reason.UNKNOWN_WINNER) for name in ARENA_WINNERS]
        if flags == [None] * 3:
            raise RowRejected(Reason.NOT_LABELLED)
        if sorted(flag or 0.0 for flag in flags) != [0, 0, 1]:
            raise RowRejected(Reason.UNKNOWN_WINNER)
        better = (0, 1, None)[flags.index(1)]
        questions = None if prompt is None else _listed(row.get(prompt))
        if not isinstance(questions, list):
            return preferred(row, answers, better, prompt, ARENA_WINNERS)
        dialogues = {name: _turns(questions, _listed(row.get(name))) for name in answers}
        return preferred({**row, **dialogues}, answers, better, None, (*ARENA_WINNERS, prompt))

    return translate


def _listed(value: Any) -> Any:
    """The list that a JSON text holds, else the value itself."""
    listed = json_or_text(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    return listed if isinstance(listed, list) else value


def _turns(questions: list[Any], answers: Any) -> list[dict[str, Any]]:
    """A dialogue as messages. After its first turn each side has a context of its own, and is no pair then."""
    if len(list_value(answers)) != len(questions):
        raise RowRejected(Reason.MISSING_VALUE)
    return [
        {"role": role, "content": text}
        for turn in zip(questions, answers, strict=True)
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def strength(sample: Row) -> Translate | None:
    """HelpSteer2 and 3: from -3 (the first is much better) to 3 (the second is); its size is the margin.

    A share between 0 and 1 is none: all of them would prefer the second.
    """
    columns = [name for name in STRENGTHS if name in sample]
    numbered = [answers for answers in two_answers(sample) if answers[0].endswith("1")]
    prompt = prompt_column(sample) if columns and numbered else None
    if prompt is None:
        return None
    column, answers = only(columns, "the strength of the preference"), only(numbered, "the two answers")

    def translate(row: Row) -> Row:
        value = number(row.get(column), Reason.BAD_MARGIN)
        if value is None or value == _NO_STRENGTH:
            raise RowRejected(Reason.NOT_LABELLED)
        if 0 < value < 1:
            raise DataError(
                f"{column} is {value:g}: a probability, it seems, and a strength is below 0 where {answers[0]} is "
                f"better. Take 0.5 from all of them if it is the probability of {answers[1]}, or write winner = "
                f"{answers[0]}, {answers[1]} or tie."
            )
        margin = {"target_margin": abs(value)} if value else {}
        return preferred(row, answers, int(value > 0) if value else None, prompt, (column,)) | margin

    return translate


def openai(sample: Row) -> Translate | None:
    """OpenAI's format of preference tuning: messages, tools and the like in `input`."""

    def translate(row: Row) -> Row:
        asked = json_object(row.get("input"))
        if asked is None:
            raise RowRejected(Reason.MISSING_VALUE if row.get("input") is None else Reason.WRONG_TYPE)
        options = {name: value for name, value in asked.items() if name != "messages" and value not in (None, [])}
        sides = {"chosen": row.get("preferred_output"), "rejected": row.get("non_preferred_output")}
        return {**without(row, *OPENAI_COLUMNS), **options, "prompt": asked.get("messages"), **sides}

    return translate if all(name in sample for name in OPENAI_COLUMNS) else None


def swift(sample: Row) -> Translate | None:
    """ms-swift: whole dialogues, of which the rejected one may be written as its answer alone."""

    def translate(row: Row) -> Row:
        answer, dialogue = (row.get(name) for name in SWIFT_COLUMNS)
        turns = list_value(row.get("messages"))
        if answer is not None and dialogue is not None:
            raise RowRejected(Reason.ONE_SIDE_TWICE)
        if dialogue is None:
            dialogue = [*turns[:-1], {"role": "assistant", "content": answer}]
        return {**without(row, "messages", *SWIFT_COLUMNS), "chosen": turns, "rejected": dialogue}

    return translate if "messages" in sample and any(name in sample for name in SWIFT_COLUMNS) else None


def ultrafeedback(sample: Row) -> Translate | None:
    """Completions with their annotations: the mean of the aspects' ratings, or the overall score where none are there.

    Early copies hold overall scores of 10 that should be 1 (corrected by its authors in December 2023), ratings do not.
    """
    is_rated = isinstance(_first_object(sample.get("completions")).get("annotations"), dict)
    return _items(sample, "completions", ("response",), "scores", _mean_ratings if is_rated else _each("overall_score"))


def nectar(sample: Row) -> Translate | None:
    r"""Nectar (Zhu et al. 2023): answers that each carry their rank, and a prompt `\n\nHuman: …\n\nAssistant: `."""
    return _items(sample, "answers", ("answer", "rank"), "ranks", _each("rank"))


def _each(key: str) -> Callable[[list[dict[str, Any]]], list[Any]]:
    return lambda items: [item.get(key) for item in items]


def _items(
    sample: Row, column: str, keys: tuple[str, ...], kind: str, numbers: Callable[[list[dict[str, Any]]], list[Any]]
) -> Translate | None:
    """A column with a list of objects, one for each answer, which is under the first of `keys`."""
    prompt = prompt_column(sample) if {*keys} <= _first_object(sample.get(column)).keys() else None
    if prompt is None:
        return None

    def translate(row: Row) -> Row:
        items = list_value(row.get(column))
        if not all(isinstance(item, dict) for item in items):
            raise RowRejected(Reason.WRONG_TYPE)
        answers = {"prompt": row.get(prompt), "responses": _each(keys[0])(items), kind: numbers(items)}
        return without(row, prompt, column) | answers

    return translate


def _first_object(value: Any) -> dict[str, Any]:
    """The first of a list of objects; an empty one where it is no such list."""
    first = value[0] if isinstance(value, list) and value else None
    return first if isinstance(first, dict) else {}


def _mean_ratings(completions: list[dict[str, Any]]) -> list[float]:
    """Each completion's mean over the aspects that were rated (not "N/A") for all of them."""
    ratings = [_ratings(completion.get("annotations")) for completion in completions]
    aspects = [aspect for aspect in ratings[0] if all(aspect in rated for rated in ratings)] if ratings else []
    if not aspects:
        raise RowRejected(Reason.NOT_LABELLED)
    return [sum(rated[aspect] for aspect in aspects) / len(aspects) for rated in ratings]


def _ratings(annotations: Any) -> dict[str, float]:
    ratings = {}
    for aspect, entry in (annotations if isinstance(annotations, dict) else {}).items():
        try:
            rating = number(entry.get("Rating") if isinstance(entry, dict) else None, Reason.WRONG_TYPE)
        except RowRejected:
            continue
        if rating is not None:
            ratings[aspect] = rating
    return ratings
