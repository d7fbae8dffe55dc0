r"""The layout of a source: every way in which public preference data is laid out, recognised by its columns.

A layout is recognised from the column names once for a source, and then holds for all its rows, so that a row that
lacks a value is a row with a missing value and not one of another layout. Each is one function: the columns of a source
in, a translation of its rows into the forms of `row_pairs` out, or None where they are not of that layout.

All take a prompt of several turns, SHP's `history` as a transcript only, and one in the columns instruction and input
(Alpaca). In all of them a prompt that is one transcript, `\n\nHuman: ...\n\nAssistant:`, is read as its turns, a
column `system` is a system turn, and `tools` are what the answer may call (`turns`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.observation import OVERALL
from rmcore.data.readers import annotation_tools, foreign
from rmcore.data.readers.columns import (
    ANSWER_COLUMNS,
    BEST_COLUMNS,
    BINARY_GRADES,
    GRADES,
    SHP_COLUMNS,
    SIDE_COLUMNS,
    USUAL_COLUMNS,
    ColumnMap,
    Row,
    Translate,
    likely_prompt,
    mapping_to_paste,
    only,
    prompt_column,
    without,
)
from rmcore.data.readers.fields import (
    Reason,
    RowRejected,
    grade,
    is_missing,
    json_object,
    list_value,
    number,
    text_value,
)
from rmcore.data.readers.row_pairs import SIDES, RowPairs, annotated_margin, read_graded, read_row
from rmcore.data.readers.turns import dialogue_turns
from rmcore.data.survey import OVERALL_GRADES

SIDE_ROWS = "side rows"
GRADED_ROWS = "graded answers"
_ASKED: Row = dict.fromkeys(("prompt", "chosen", "rejected"))
_OF_PRODIGY = "answer"
_NOT_ACCEPTED = ("ignore", "reject")


def whole(row: Row) -> list[Row]:
    """A row that holds one label."""
    return [row]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a source are to be read: `columns` renames a row, `unfold` splits it into labels to `parse`."""

    name: str
    translation: Callable[[Row], Translate | None] = lambda sample: None
    """Given every column of the source with a typical value, how its rows are translated; None: they do not fit."""
    needs: str = ""
    """The columns, in words, of a layout that is another program's."""
    top_only: bool = False
    """Only the best of a row's answers is named."""
    unfold: Callable[[Row], list[Row]] = whole
    """A row's labels, where several people may have labelled it."""
    parse: Callable[[Row], RowPairs] = lambda row: RowPairs([])
    columns: ColumnMap = USUAL_COLUMNS


def _is_text(row: Row) -> bool:
    return isinstance(row["chosen"], str | bytes)


def _has_several(row: Row) -> bool:
    worse = row["rejected"]
    return isinstance(worse, list) and bool(worse) and isinstance(worse[0], str | list)


def _strings(sample: Row) -> Translate | None:
    return _asked if "prompt" in sample and _is_text(sample) and not _has_several(sample) else None


def _asked(row: Row) -> Row:
    return row if _ASKED.keys() <= row.keys() else {**_ASKED, **row}


def _messages(sample: Row) -> Translate | None:
    """Lists of {role, content} (UltraFeedback, TRL), which begin with the prompt where it is no column of its own."""
    if _is_text(sample) or _has_several(sample):
        return None
    return _asked if "prompt" in sample else lambda row: without(_asked(row), "prompt")


def _dialogues(sample: Row) -> Translate | None:
    r"""HH-RLHF (Bai et al. 2022, arXiv:2204.05862): both sides are `\n\nHuman: ...\n\nAssistant: ...`."""
    if "prompt" in sample or not _is_text(sample) or _has_several(sample):
        return None
    is_answer = isinstance(sample["chosen"], str) and not sample["chosen"].lstrip().startswith(("Human:", "Assistant:"))
    if is_answer and likely_prompt(sample):  # they are answers, and what they answer has another name
        return None

    def translate(row: Row) -> Row:
        turns = {side: dialogue_turns(text_value(row.get(side), empty)) for side, empty in SIDES}
        if turns["chosen"][:-1] != turns["rejected"][:-1]:
            raise RowRejected(Reason.PROMPTS_DIFFER)
        return without(row, "prompt", "chosen_fields", "rejected_fields") | turns

    return translate


def _one_of(sample: Row) -> Translate | None:
    """The chosen answer is better than each of a list of rejected ones, of which nothing is said."""
    if not _has_several(sample):
        return None

    def translate(row: Row) -> Row:
        worse = row.get("rejected")
        answers = [row.get("chosen"), *(worse if isinstance(worse, list) else [worse])]
        asked = {"prompt": row.get("prompt")} if "prompt" in sample else {}
        return without(row, "chosen", "rejected", "prompt") | asked | _best_of(answers, answers[0])

    return translate


def _best_of(answers: list[Any], best: Any) -> dict[str, Any]:
    return {"responses": answers, "ranks": [1 if answer == best else 2 for answer in answers], "scores": None}


def _best(sample: Row) -> Translate | None:
    """The best one of K answers is better than each of the others, of which nothing is said."""
    prompt, best = prompt_column(sample), [name for name in BEST_COLUMNS if name in sample]
    if prompt is None or not best or not any(name in sample for name in ANSWER_COLUMNS):
        return None
    which = only(best, "the best answer")

    def translate(row: Row) -> Row:
        column = _answers(row)
        answers = list_value(row.get(column))
        place = _best_place(row.get(which), which, answers)
        return without(row, prompt, column, which) | {"prompt": row.get(prompt)} | _best_of(answers, answers[place])

    return translate


def _answers(row: Row) -> str:
    return next((name for name in ANSWER_COLUMNS if name in row), ANSWER_COLUMNS[0])


def _best_place(value: Any, column: str, answers: list[Any]) -> int:
    """Which answer is best, counted from 0.

    Raises:
        DataError: it is counted from 1, as the number of answers shows; then all other rows are, too.
        RowRejected: it is none of them.
    """
    if isinstance(value, str) and value in answers:
        return answers.index(value)
    if is_missing(value):
        raise RowRejected(Reason.NOT_LABELLED)
    place = None if isinstance(value, bool) else number(value, Reason.BAD_BEST)
    if place is not None and place == len(answers):
        raise DataError(
            f"{column} is {value!r} of {len(answers)} answers: it counts from 0 here, and from 1 in this file, or "
            "there is no such answer. Subtract 1 everywhere, or write the answer itself in that column."
        )
    if place is None or not place.is_integer() or not 0 <= place < len(answers):
        raise RowRejected(Reason.BAD_BEST)
    return int(place)


def _ranked(sample: Row) -> Translate | None:
    """InstructGPT-style K-wise rankings (arXiv:2203.02155)."""
    orders = [name for name in ("ranks", "scores") if name in sample]
    if "prompt" not in sample or not orders or not any(name in sample for name in ANSWER_COLUMNS):
        return None
    only([orders[0], *(name for name in ("ranking", "order") if name in sample)], "how the answers are ranked")

    def translate(row: Row) -> Row:
        column = _answers(row)
        return {"prompt": None, **without(row, column, "chosen", "rejected"), "responses": row.get(column)}

    return translate


def _shp(sample: Row) -> Translate | None:
    """SHP (Ethayarajh et al. 2022, arXiv:2110.08420): `labels` is 1 where A is preferred.

    The strength of the preference is the log ratio of the two scores.
    """

    def translate(row: Row) -> Row:
        asked = text_value(row.get("history"), Reason.EMPTY_PROMPT)
        label = number(row.get("labels"), Reason.WRONG_TYPE)
        if label not in (0.0, 1.0):
            raise RowRejected(Reason.MISSING_VALUE if label is None else Reason.WRONG_TYPE)
        columns = ("human_ref_A", "human_ref_B") if label else ("human_ref_B", "human_ref_A")
        sides = {side: text_value(row.get(name), empty) for name, (side, empty) in zip(columns, SIDES, strict=True)}
        ratio = number(row.get("score_ratio"), Reason.BAD_MARGIN)
        if ratio is not None and ratio <= 0:
            raise RowRejected(Reason.BAD_MARGIN)
        margin = {} if ratio is None or annotated_margin(row) is not None else {"target_margin": math.log(ratio)}
        return {**without(row, *SHP_COLUMNS), "prompt": asked, **sides, **margin}

    return translate if all(name in sample for name in SHP_COLUMNS) else None


def _sides(sample: Row) -> Translate | None:
    """Rows of one side each, as trainers that batch by pair_id have them; `unpaired_rows` joins the two of a pair."""
    row = side_fields(sample)
    has_role = "role" in row or "label" in row
    is_side = "pair_id" in row and "prompt" in row and has_role and any(name in row for name in SIDE_COLUMNS)
    return dict if is_side else None


OF_PAIRS = (
    Layout("one chosen and several rejected", _one_of, top_only=True),
    Layout("plain strings", _strings),
    Layout("message lists", _messages),
    Layout("dialogues", _dialogues),
)
"""Where there are chosen and rejected; each excludes the others."""
FOREIGN = (
    Layout("two answers and a winner", foreign.winner, "prompt, response_a, response_b, winner (a, b or tie)"),
    Layout("LMArena", foreign.arena, "prompt, response_a, response_b, winner_model_a, winner_model_b, winner_tie"),
    Layout("HelpSteer preferences", foreign.strength, "prompt, response_1, response_2, preference_strength"),
    Layout("OpenAI preferences", foreign.openai, "input with messages, preferred_output, non_preferred_output"),
    Layout("ms-swift", foreign.swift, "messages, rejected_response or rejected_messages"),
    Layout("raw UltraFeedback", foreign.ultrafeedback, "instruction, completions with response and annotations"),
    Layout("Nectar", foreign.nectar, "prompt, answers with answer and rank"),
    Layout(
        "Label Studio",
        annotation_tools.label_studio,
        "annotations with a pairwise result, data with prompt and two answers (answer1, answer2)",
        unfold=annotation_tools.unfold_label_studio,
    ),
    Layout(
        "Argilla",
        annotation_tools.argilla,
        "fields with prompt and answers, responses that rank, choose or rate them",
        unfold=annotation_tools.unfold_argilla,
    ),
)
OF_OTHERS = (Layout("SHP", _shp), Layout("ranked answers", _ranked), Layout(SIDE_ROWS, _sides), *FOREIGN)
"""Exactly one has to fit."""
LAST = (Layout("best of K", _best, top_only=True),)
"""Rows of which no part is a pair, tried where none of the others fits; so are grades, `_graded`."""


def recognise(sample: Row, columns: ColumnMap = USUAL_COLUMNS) -> Layout:
    """The layout of a source.

    `chosen` and `rejected`, named so or by the user, win over all else. Otherwise exactly one layout has to fit. Names
    count as they stand; only where nothing fits so, as they are known in other capitals, with spaces or hyphens.

    Args:
        sample: every column of the source with a typical value.
        columns: names that the user gave.

    Raises:
        DataError: a named column is not there, or the columns fit no layout, or two.
    """
    absent = [name for name in columns.usual_names if name not in sample]
    if absent:
        raise _unrecognised(f"no column {absent[0]!r}", sample)
    usual = columns.with_prompt(sample)
    for is_last in (False, True):
        for is_spelled in (False, True):
            names = usual.for_source(sample, graded=is_last).with_prompt(sample) if is_spelled else usual
            if is_spelled and not names.spelled:
                continue
            layouts = _fitting(names.rename(sample), names, is_last=is_last)
            if len(layouts) > 1:
                raise DataError(
                    f"the columns {', '.join(map(repr, sample))} fit two layouts, {layouts[0].name!r} and "
                    f"{layouts[1].name!r}, which may give other pairs. Drop the columns of one, or, where a column "
                    f"holds the better and one the worse text, name them:\n    {mapping_to_paste(sample)}"
                )
            if layouts and sample.get(_OF_PRODIGY) in ("accept", *_NOT_ACCEPTED):
                return replace(layouts[0], parse=partial(_accepted, parse=layouts[0].parse))
            if layouts:
                return layouts[0]
    absent = [name for name in columns.grades if name not in sample]
    raise _unrecognised(f"no column {absent[0]!r}" if absent else "no layout fits the columns", sample)


def _fitting(row: Row, columns: ColumnMap, *, is_last: bool) -> list[Layout]:
    """The layouts that fit; where the user says that it is graded, it is, whatever else it may be."""
    are_pairs = "chosen" in row and "rejected" in row
    grades = _graded(row, columns.grades) if not are_pairs and (columns.grades or is_last) else None
    graded = [] if grades is None else [Layout(GRADED_ROWS, parse=grades, columns=columns)]
    if (graded and columns.grades) or (are_pairs and is_last):
        return graded
    fitting = []
    for known in LAST if is_last else OF_PAIRS if are_pairs else OF_OTHERS:
        translate = known.translation(row)
        if translate is not None:
            parse = partial(_read, translate=translate, top_only=known.top_only)
            fitting.append(replace(known, parse=parse, columns=columns))
    return fitting + graded


def _read(row: Row, translate: Translate, *, top_only: bool) -> RowPairs:
    return read_row(translate(row), top_only=top_only)


def _accepted(row: Row, parse: Callable[[Row], RowPairs]) -> RowPairs:
    """Return what a row of Prodigy's says if its annotator accepted it, and did not skip it or call it unusable."""
    if row.get(_OF_PRODIGY) in _NOT_ACCEPTED:
        raise RowRejected(Reason.NOT_LABELLED)
    return parse(row)


def _graded(row: Row, named: tuple[str, ...]) -> Callable[[Row], RowPairs] | None:
    """Grades of one answer, a number for each attribute: HelpSteer (arXiv:2311.09528), KTO (2402.01306).

    They count where the user named them, else where they have a name that is known and are numbers.
    """
    prompt, answer = prompt_column(row), next((name for name in SIDE_COLUMNS if name in row), None)
    graded = named or tuple(name for name in GRADES if name in row and _is_grade(name, row[name]))
    if prompt is None or answer is None or not graded or not all(name in row for name in graded):
        return None
    is_overall = len(graded) == 1 and graded[0] in {*OVERALL_GRADES, *BINARY_GRADES} - {"helpfulness"}
    attributes = {graded[0]: OVERALL} if is_overall else {name: name for name in graded}
    return partial(read_graded, prompt=prompt, answer=answer, attributes=attributes)


def _is_grade(name: str, value: Any) -> bool:
    """Whether a typical value of a column is one; of a binary one, whether it is one of two."""
    try:
        typical = grade(value)
    except RowRejected:
        return False
    return typical in (0.0, 1.0) if name in BINARY_GRADES else typical is not None or isinstance(value, float)


def side_fields(row: Row) -> dict[str, Any]:
    """The columns of a row that is one side; the keys of a `metadata` or `meta` object count as columns."""
    objects = {name: json_object(row.get(name)) for name in ("metadata", "meta")}
    columns = {name: value for name, value in row.items() if objects.get(name) is None}
    return {**(objects["metadata"] or {}), **(objects["meta"] or {}), **columns}


def _unrecognised(seen: str, sample: Row) -> DataError:
    there = ", ".join(map(repr, sample)) or "none"
    return DataError(
        f"{seen}: the columns are {there}. Where one holds the better and one the worse text, name them; next to two "
        "answers and a winner, the prompt alone (--prompt-column, --chosen-column, --rejected-column, --margin-column "
        f"in commands without --set):\n    {mapping_to_paste(sample)}\n"
        "Recognised by themselves are prompt, chosen, rejected (chosen and rejected alone where they are whole "
        "dialogues or message lists); history, human_ref_A, human_ref_B, labels; prompt, responses with ranks or "
        "scores; prompt, responses, best_index; one row a side, pair_id, role (or label), prompt, response; prompt, "
        f"response and grades ({', '.join(GRADES)}; others by data.grade_columns); and, as docs/data.md shows them, "
        f"{', '.join(known.name for known in FOREIGN)}. Of any other layout, write prompt, chosen and rejected (one "
        "text, or a list of them), or prompt, response_a, response_b and winner (a, b or tie)."
    )
