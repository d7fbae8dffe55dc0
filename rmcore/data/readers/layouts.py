r"""The layout of a source: every way in which public preference data is laid out, recognised by its columns.

A layout is recognised from the column names once for a source, and then holds for all its rows, so that a row that
lacks a value is a row with a missing value and not one of another layout. `row_pairs` then reads the rows.

| layout | columns | known from |
| --- | --- | --- |
| plain strings | prompt, chosen, rejected | most CSV files, our own records |
| message lists | (prompt,) chosen, rejected as lists of {role, content} | UltraFeedback, TRL conversational |
| dialogues | chosen, rejected as `\n\nHuman: ...\n\nAssistant: ...` | HH-RLHF (Bai et al. 2022, arXiv:2204.05862) |
| SHP | history, human_ref_A, human_ref_B, labels (, score_ratio) | SHP (Ethayarajh et al. 2022, arXiv:2110.08420) |
| ranked answers | prompt, responses, ranks or scores | InstructGPT-style K-wise rankings (arXiv:2203.02155) |
| one chosen and several rejected | prompt, chosen, rejected as a list of answers | best-of-n labels |
| best of K | prompt, responses, best_index (from 0) or the best one's text | best-of-n labels |
| graded answers | prompt, response, a number for each attribute | HelpSteer (arXiv:2311.09528), KTO (2402.01306) |
| side rows | pair_id, role (chosen, rejected) or label (1, 0), prompt, response | trainers that batch by pair_id |

Layouts of other programs are in `foreign`, and are translated into these.

All take a prompt of several turns, SHP's `history` as a transcript only, and one in the columns instruction and input
(Alpaca). In all of them a prompt that is one transcript, `\n\nHuman: ...\n\nAssistant:`, is read as its turns, a
column `system` is a system turn, and `tools` are what the answer may call (`turns`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.observation import OVERALL
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
    likely_prompt,
    mapping_to_paste,
)
from rmcore.data.readers.fields import Reason, RowRejected, grade, json_object
from rmcore.data.readers.foreign import FOREIGN, whole
from rmcore.data.readers.row_pairs import (
    RowPairs,
    as_row_pairs,
    parse_best,
    parse_dialogue,
    parse_graded,
    parse_implicit,
    parse_one_of,
    parse_prompt_pair,
    parse_ranked,
    parse_shp,
    parse_translated,
)
from rmcore.data.readers.two_answers import only, prompt_column
from rmcore.data.survey import OVERALL_GRADES

SIDE_ROWS = "side rows"
GRADED_ROWS = "graded answers"
PAIRS_PER_ROW = 36
"""Most pairs of one row of ranked answers: all pairs of 9, the most that InstructGPT's labellers ranked (Ouyang et al.
2022, arXiv:2203.02155)."""
BEST_ROWS = "best of K"
_OF_PRODIGY = "answer"
_NOT_ACCEPTED = ("ignore", "reject")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a source are to be read: `columns` renames a row, `unfold` splits it into labels to `parse`."""

    name: str
    parse: Callable[[Row], RowPairs]
    columns: ColumnMap = USUAL_COLUMNS
    unfold: Callable[[Row], list[Row]] = whole
    needs: str = ""
    """The columns, in words, of a layout that is not our own."""


def recognise(sample: Row, columns: ColumnMap = USUAL_COLUMNS, *, most: int = PAIRS_PER_ROW) -> Layout:
    """The layout of a source.

    `chosen` and `rejected`, named so or by the user, win over all else. Otherwise exactly one layout has to fit. Names
    count as they stand; only where nothing fits so, as they are known in other capitals, with spaces or hyphens.

    Args:
        sample: every column of the source with a typical value.
        columns: names that the user gave.
        most: pairs that one row of several answers may give.

    Raises:
        DataError: a named column is not there, or the columns fit no layout, or two.
    """
    absent = [name for name in columns.usual_names if name not in sample]
    if absent:
        raise _unrecognised(f"no column {absent[0]!r}", sample)
    columns = columns.with_prompt(sample)
    layout = _fitting(columns.rename(sample), columns, most)
    if layout is None:
        spelled = columns.for_source(sample).with_prompt(sample)
        layout = _fitting(spelled.rename(sample), spelled, most) if spelled.spelled else None
    if layout is None:
        layout = _fitting_more(columns.rename(sample), columns, most)
    if layout is None:
        spelled = columns.for_source(sample, graded=True).with_prompt(sample)
        layout = _fitting_more(spelled.rename(sample), spelled, most) if spelled.spelled else None
    if layout is None:
        absent = [name for name in columns.grades if name not in sample]
        raise _unrecognised(f"no column {absent[0]!r}" if absent else "no layout fits the columns", sample)
    if sample.get(_OF_PRODIGY) in ("accept", *_NOT_ACCEPTED):
        return replace(layout, parse=partial(_accepted, parse=layout.parse))
    return layout


def _accepted(row: Row, parse: Callable[[Row], RowPairs]) -> RowPairs:
    """Return what a row of Prodigy's says if its annotator accepted it, and did not skip it or call it unusable."""
    if row.get(_OF_PRODIGY) in _NOT_ACCEPTED:
        raise RowRejected(Reason.NOT_LABELLED)
    return parse(row)


def _fitting_more(row: Row, columns: ColumnMap, most: int) -> Layout | None:
    """The layout of rows of which no part is a pair: one best of several answers, or the grades of one answer."""
    if "chosen" in row and "rejected" in row:
        return None
    prompt = prompt_column(row)
    fitting = []
    best = [name for name in BEST_COLUMNS if name in row]
    if prompt is not None and best and any(name in row for name in ANSWER_COLUMNS):
        column = only(best, "the best answer")
        fitting.append(Layout(BEST_ROWS, partial(parse_best, prompt=prompt, best=column, most=most), columns))
    graded = _graded_layout(row, columns, prompt)
    if graded is not None:
        fitting.append(graded)
    return _only_layout(fitting, row)


def _graded_layout(row: Row, columns: ColumnMap, prompt: str | None) -> Layout | None:
    """Grades count where the user named them, else where they have a name that is known and are numbers."""
    answer = next((name for name in SIDE_COLUMNS if name in row), None)
    found = columns.grades or tuple(name for name in GRADES if name in row and _is_grade(name, row[name]))
    if prompt is None or answer is None or not found or not all(name in row for name in found):
        return None
    is_overall = len(found) == 1 and found[0] in {*OVERALL_GRADES, *BINARY_GRADES} - {"helpfulness"}
    attributes = {found[0]: OVERALL} if is_overall else {name: name for name in found}
    parse = partial(parse_graded, prompt=prompt, answer=answer, attributes=attributes)
    return Layout(GRADED_ROWS, parse, columns)


def _is_grade(name: str, value: Any) -> bool:
    """Whether a typical value of a column is one; of a binary one, whether it is one of two."""
    try:
        typical = grade(value)
    except RowRejected:
        return False
    return typical in (0.0, 1.0) if name in BINARY_GRADES else typical is not None or isinstance(value, float)


def _fitting(row: Row, columns: ColumnMap, most: int) -> Layout | None:
    if "chosen" in row and "rejected" in row:
        return _pair_layout(row, columns, most)
    if columns.grades:  # the user says so, whatever else it may be
        graded = _graded_layout(row, columns, prompt_column(row))
        if graded is not None:
            return graded
    fitting = []
    if all(name in row for name in SHP_COLUMNS):
        fitting.append(Layout("SHP", as_row_pairs(parse_shp), columns))
    if "prompt" in row and any(name in row for name in ANSWER_COLUMNS) and ("ranks" in row or "scores" in row):
        fitting.append(Layout("ranked answers", partial(parse_ranked, most=most), columns))
    if _is_one_side(side_fields(row)):
        fitting.append(Layout(SIDE_ROWS, as_row_pairs(parse_prompt_pair), columns))
    for foreign in FOREIGN:
        translate = foreign.translation(row)
        if translate is not None:
            parse = partial(parse_translated, translate=translate, most=most)
            fitting.append(Layout(foreign.name, parse, columns, foreign.unfold, foreign.columns))
    return _only_layout(fitting, row)


def _only_layout(fitting: list[Layout], row: Row) -> Layout | None:
    if len(fitting) > 1:
        raise DataError(
            f"the columns {', '.join(map(repr, row))} fit two layouts, {fitting[0].name!r} and {fitting[1].name!r}, "
            "which may give other pairs. Drop the columns of one, or, where a column holds the better and one the "
            f"worse text, name them:\n    {mapping_to_paste(row)}"
        )
    return fitting[0] if fitting else None


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
        f"{', '.join(foreign.name for foreign in FOREIGN)}."
    )


def side_fields(row: Row) -> dict[str, Any]:
    """The columns of a row that is one side; the keys of a `metadata` or `meta` object count as columns."""
    objects = {name: json_object(row.get(name)) for name in ("metadata", "meta")}
    columns = {name: value for name, value in row.items() if objects.get(name) is None}
    return {**(objects["metadata"] or {}), **(objects["meta"] or {}), **columns}


def _is_one_side(row: Row) -> bool:
    has_role = "role" in row or "label" in row
    return "pair_id" in row and "prompt" in row and has_role and any(name in row for name in SIDE_COLUMNS)


def _pair_layout(row: Row, columns: ColumnMap, most: int) -> Layout | None:
    """The layout of chosen and rejected; None where they are answers, and what they answer has another name."""
    is_text = isinstance(row["chosen"], str | bytes)
    if isinstance(row["rejected"], list) and row["rejected"] and isinstance(row["rejected"][0], str | list):
        parse = partial(parse_one_of, is_implicit="prompt" not in row, most=most)
        return Layout("one chosen and several rejected", parse, columns)
    if "prompt" in row:
        return Layout("plain strings" if is_text else "message lists", as_row_pairs(parse_prompt_pair), columns)
    if not is_text:
        return Layout("message lists", as_row_pairs(parse_implicit), columns)
    is_answer = isinstance(row["chosen"], str) and not row["chosen"].lstrip().startswith(("Human:", "Assistant:"))
    return None if is_answer and likely_prompt(row) else Layout("dialogues", as_row_pairs(parse_dialogue), columns)
