r"""Raw records to preference pairs and observations: every way in which public preference data is laid out.

A layout is recognised from the column names once for a source, and then holds for all its rows, so that a row that
lacks a value is a row with a missing value and not one of another layout. What cannot become a pair is refused with
one of a small fixed set of reasons; nothing is guessed and nothing is repaired.

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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from rmcore.config.data import PAIRS_PER_ROW
from rmcore.core.errors import DataError
from rmcore.data.observation import OVERALL, WEIGHT, Observation, annotator_of
from rmcore.data.pair import TOOLS, Message, PreferencePair, Prompt, as_answer, is_blank, plain_prompt
from rmcore.data.readers.columns import (
    ANSWER_COLUMNS,
    BEST_COLUMNS,
    BINARY_GRADES,
    GRADES,
    MARGIN_COLUMNS,
    SHP_COLUMNS,
    SIDE_COLUMNS,
    USUAL_COLUMNS,
    ColumnMap,
    Row,
    likely_prompt,
    mapping_to_paste,
)
from rmcore.data.readers.fields import (
    Reason,
    RowRejected,
    grade,
    json_object,
    json_ready,
    list_value,
    number,
    number_list,
    pair_id_value,
    text_value,
)
from rmcore.data.readers.foreign import FOREIGN, whole
from rmcore.data.readers.strict_pairs import strict_pairs
from rmcore.data.readers.turns import (
    SYSTEM,
    answer_of,
    asked_turns,
    continued,
    dialogue_turns,
    framed,
    message_list,
    turn_list,
)
from rmcore.data.readers.two_answers import Translate, only, prompt_column
from rmcore.data.survey import OVERALL_GRADES

SIDE_ROWS = "side rows"
GRADED_ROWS = "graded answers"
BEST_ROWS = "best of K"
_SIDE_REASONS = (("chosen", Reason.EMPTY_CHOSEN), ("rejected", Reason.EMPTY_REJECTED))


@dataclass(frozen=True, slots=True)
class RowPairs:
    """The pairs of one row, how many more it would give that `most` (see `recognise`) leaves out, and what it says."""

    pairs: list[PreferencePair]
    num_over_cap: int = 0
    observation: Observation | None = None
    """The judgement itself; None where that is `Observation.of_pair` of its one pair."""
    contradicts: bool = False
    """A text has two ranks: the row has its pairs, which go both ways, and no observation."""


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
    absent = [name for name in columns.usual_names() if name not in sample]
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
    return layout


def _fitting_more(row: Row, columns: ColumnMap, most: int) -> Layout | None:
    """The layout of rows of which no part is a pair: one best of several answers, or the grades of one answer."""
    if "chosen" in row and "rejected" in row:
        return None
    prompt = prompt_column(row)
    fitting = []
    best = [name for name in BEST_COLUMNS if name in row]
    if prompt is not None and best and any(name in row for name in ANSWER_COLUMNS):
        column = only(best, "the best answer")
        fitting.append(Layout(BEST_ROWS, partial(_parse_best, prompt=prompt, best=column, most=most), columns))
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
    parse = partial(_parse_graded, prompt=prompt, answer=answer, attributes=attributes)
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
        fitting.append(Layout("SHP", _one(_parse_shp), columns))
    if "prompt" in row and any(name in row for name in ANSWER_COLUMNS) and ("ranks" in row or "scores" in row):
        fitting.append(Layout("ranked answers", partial(_parse_ranked, most=most), columns))
    if _is_one_side(side_fields(row)):
        fitting.append(Layout(SIDE_ROWS, _one(_parse_prompt_pair), columns))
    for foreign in FOREIGN:
        translate = foreign.translation(row)
        if translate is not None:
            parse = partial(_parse_translated, translate=translate, most=most)
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


def _one(parse: Callable[[Row], PreferencePair]) -> Callable[[Row], RowPairs]:
    def parse_row(row: Row) -> RowPairs:
        pair = parse(row)
        return RowPairs([pair], observation=None if _weight(pair.metadata) == 1 else Observation.of_pair(pair))

    return parse_row


def _weight(carried: Mapping[str, Any]) -> float:
    weight = number(carried.get(WEIGHT), Reason.BAD_WEIGHT)
    if weight is not None and weight <= 0:
        raise RowRejected(Reason.BAD_WEIGHT)
    return 1.0 if weight is None else weight


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
        parse = partial(_parse_one_of, is_implicit="prompt" not in row, most=most)
        return Layout("one chosen and several rejected", parse, columns)
    if "prompt" in row:
        return Layout("plain strings" if is_text else "message lists", _one(_parse_prompt_pair), columns)
    if not is_text:
        return Layout("message lists", _one(_parse_implicit), columns)
    is_answer = isinstance(row["chosen"], str) and not row["chosen"].lstrip().startswith(("Human:", "Assistant:"))
    return None if is_answer and likely_prompt(row) else Layout("dialogues", _one(_parse_dialogue), columns)


def _parse_translated(row: Row, *, translate: Translate, most: int) -> RowPairs:
    translated = translate(row)
    if "responses" in translated:
        return _parse_ranked(translated, most=most, is_implicit="prompt" not in translated)
    return _one(_parse_prompt_pair if "prompt" in translated else _parse_implicit)(translated)


def _parse_prompt_pair(row: Row) -> PreferencePair:
    context, chosen, rejected = _sides(row)
    prompt, (chosen, rejected) = _whole_prompt(row, context, (chosen, rejected))
    return _pair(prompt, chosen, rejected, row, margin=_annotated_margin(row))


def _parse_implicit(row: Row) -> PreferencePair:
    context, chosen, rejected = _sides(row)
    return _pair(framed(context, row), chosen, rejected, row, margin=_annotated_margin(row))


def _parse_dialogue(row: Row) -> PreferencePair:
    turns = {name: dialogue_turns(text_value(row.get(name), empty)) for name, empty in _SIDE_REASONS}
    if turns["chosen"][:-1] != turns["rejected"][:-1]:
        raise RowRejected(Reason.PROMPTS_DIFFER)
    chosen, rejected = (text_value(turns[name][-1].content, empty) for name, empty in _SIDE_REASONS)
    return _pair(framed(turns["chosen"][:-1], row), chosen, rejected, row, margin=_annotated_margin(row))


def _parse_shp(row: Row) -> PreferencePair:
    """`labels` is 1 where A is preferred; the strength of the preference is the log ratio of the two scores."""
    asked = (Message("user", text_value(row.get("history"), Reason.EMPTY_PROMPT)),)
    label = number(row.get("labels"), Reason.WRONG_TYPE)
    if label not in (0.0, 1.0):
        raise RowRejected(Reason.MISSING_VALUE if label is None else Reason.WRONG_TYPE)
    chosen_column, rejected_column = ("human_ref_A", "human_ref_B") if label else ("human_ref_B", "human_ref_A")
    chosen = text_value(row.get(chosen_column), Reason.EMPTY_CHOSEN)
    rejected = text_value(row.get(rejected_column), Reason.EMPTY_REJECTED)
    ratio = number(row.get("score_ratio"), Reason.BAD_MARGIN)
    if ratio is not None and ratio <= 0:
        raise RowRejected(Reason.BAD_MARGIN)
    margin = _annotated_margin(row)
    if margin is None and ratio is not None:
        margin = math.log(ratio)
    chosen, rejected = (continued(asked, text) for text in (chosen, rejected))
    return _pair(framed(asked_turns(asked), row), chosen, rejected, row, margin=margin, used=SHP_COLUMNS)


def _parse_ranked(row: Row, *, most: int, is_implicit: bool = False) -> RowPairs:
    """The ranking of K answers, and its strictly ordered pairs, or `most` of them, each as likely as any other.

    With scores, the target margin is the difference of the two. Which pairs are kept: see `strict_pairs`.
    """
    column = next((name for name in ANSWER_COLUMNS if name in row), ANSWER_COLUMNS[0])
    answers = [_completion(answer, Reason.EMPTY_ANSWER) for answer in list_value(row.get(column))]
    ranks, scores = (number_list(row.get(name), len(answers)) for name in ("ranks", "scores"))
    if len(answers) < 2:
        raise RowRejected(Reason.FEWER_THAN_TWO_ANSWERS)
    strength = scores if ranks is None else [-rank for rank in ranks]
    if strength is None:
        raise RowRejected(Reason.MISSING_VALUE)
    contexts = {context for context, _ in answers}
    if len(contexts) > 1:
        raise RowRejected(Reason.PROMPTS_DIFFER)
    context = contexts.pop()
    texts = [text for _, text in answers]
    if is_implicit:
        prompt = framed(context, row)
    else:
        prompt, texts = _whole_prompt(row, context, texts)
    if scores is not None and _contradict(strength, scores):
        raise RowRejected(Reason.RANKS_CONTRADICT_SCORES)
    if len(set(texts)) < 2:
        raise RowRejected(Reason.IDENTICAL_SIDES)
    used = (column, "ranks", "scores", "pair_id")  # an id of the row is not an id of each of its pairs
    places, num_over_cap = strict_pairs(prompt, texts, strength, most)
    pairs = [
        _pair(prompt, texts[i], texts[j], row, margin=None if scores is None else scores[i] - scores[j], used=used)
        for i, j in places
    ]
    return _observed(RowPairs(pairs, num_over_cap), prompt, texts, strength, row, used)


def _parse_best(row: Row, *, prompt: str, best: str, most: int) -> RowPairs:
    """The best one of K answers is better than each of the others, of which nothing is said."""
    column = next((name for name in ANSWER_COLUMNS if name in row), ANSWER_COLUMNS[0])
    answers = list_value(row.get(column))
    place = _best_place(row.get(best), best, answers)
    extras = {name: value for name, value in row.items() if name not in (prompt, column, best)}
    return _one_better({**extras, "prompt": row.get(prompt)}, answers[place], answers, most=most)


def _parse_one_of(row: Row, *, is_implicit: bool, most: int) -> RowPairs:
    """The chosen answer is better than each of the rejected ones, of which nothing is said."""
    worse = row.get("rejected")
    answers = [row.get("chosen"), *(worse if isinstance(worse, list) else [worse])]
    extras = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    return _one_better(extras, answers[0], answers, is_implicit=is_implicit, most=most)


def _one_better(extras: Row, best: Any, answers: list[Any], *, most: int, is_implicit: bool = False) -> RowPairs:
    ranks = [1 if answer == best else 2 for answer in answers]
    row = {name: value for name, value in extras.items() if name != "scores"}
    ranked = _parse_ranked({**row, "responses": answers, "ranks": ranks}, most=most, is_implicit=is_implicit)
    said = ranked.observation
    if said is None or said.ranks is None or len(said.answers) < 3:
        return ranked
    return replace(ranked, observation=replace(said, top_only=True, observation_id=""))


def _best_place(value: Any, column: str, answers: list[Any]) -> int:
    """Which answer is best, counted from 0.

    Raises:
        DataError: it is counted from 1, as the number of answers shows; then all other rows are, too.
        RowRejected: it is none of them.
    """
    if isinstance(value, str) and value in answers:
        return answers.index(value)
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        raise RowRejected(Reason.NOT_LABELLED)
    if isinstance(value, bool):
        raise RowRejected(Reason.BAD_BEST)
    place = number(value, Reason.BAD_BEST)
    if place is not None and place == len(answers):
        raise DataError(
            f"{column} is {value!r} of {len(answers)} answers: it counts from 0 here, and from 1 in this file, or "
            "there is no such answer. Subtract 1 everywhere, or write the answer itself in that column."
        )
    if place is None or not place.is_integer() or not 0 <= place < len(answers):
        raise RowRejected(Reason.BAD_BEST)
    return int(place)


def asked_and_answered(row: Row, prompt: str = "prompt", answer: str = "response") -> tuple[Prompt, str]:
    """The prompt, with all that its row says of it, and the completion of a row of one answer.

    Raises:
        RowRejected: one of them is missing, blank, or none.
    """
    context, text = _completion(row.get(answer), Reason.EMPTY_ANSWER)
    turns, (text,) = _whole_prompt({**row, "prompt": row.get(prompt)}, context, (text,))
    if _asks_nothing(turns):
        raise RowRejected(Reason.EMPTY_PROMPT)
    return plain_prompt(turns), text


def _parse_graded(row: Row, *, prompt: str, answer: str, attributes: Mapping[str, str]) -> RowPairs:
    """The grades of one answer; `graded_rows` puts those of one prompt together and makes pairs of them."""
    asked, text = asked_and_answered(row, prompt, answer)
    given = {attribute: (grade(row.get(column)),) for column, attribute in attributes.items()}
    if all(value is None for (value,) in given.values()):
        raise RowRejected(Reason.NOT_LABELLED)
    if any(given[attributes[name]][0] not in (None, 0.0, 1.0) for name in BINARY_GRADES if name in attributes):
        raise RowRejected(Reason.NOT_A_LEVEL)
    observation = Observation(
        asked,
        (text,),
        grades=given,
        annotator=annotator_of(row),
        weight=_weight(row),
        metadata=_metadata(row, {prompt, "prompt", answer, *attributes}),
    )
    return RowPairs([], observation=observation)


def _observed(
    found: RowPairs, prompt: tuple[Message, ...], texts: list[str], strength: list[float], row: Row, used: Iterable[str]
) -> RowPairs:
    """Add what the row says of its answers; of those that are the same text and have the same rank one is kept."""
    by_text = dict(zip(texts, strength, strict=True))
    if any(by_text[text] != value for text, value in zip(texts, strength, strict=True)):
        return replace(found, contradicts=True)
    weight = _weight(row)
    if len(texts) == 2 and found.pairs and weight == 1:
        return found
    if _asks_nothing(prompt):
        raise RowRejected(Reason.EMPTY_PROMPT)
    rank_of = {value: rank for rank, value in enumerate(sorted(set(strength), reverse=True), start=1)}
    observation = Observation(
        plain_prompt(prompt),
        tuple(by_text),
        ranks=tuple(rank_of[value] for value in by_text.values()),
        annotator=annotator_of(row),
        weight=weight,
        metadata=_metadata(row, {"prompt", "chosen", "rejected", *MARGIN_COLUMNS, *used}),
    )
    return replace(found, observation=observation)


def _contradict(strength: list[float], scores: list[float]) -> bool:
    """Whether a stronger answer has a lower score than a weaker one."""
    highest_below = -math.inf
    for _, same in groupby(sorted(zip(strength, scores, strict=True)), key=itemgetter(0)):
        tied = [score for _, score in same]
        if tied[0] < highest_below:  # the lowest of them, as they are sorted
            return True
        highest_below = max(highest_below, tied[-1])
    return False


def _pair(
    prompt: tuple[Message, ...],
    chosen: str,
    rejected: str,
    row: Row,
    *,
    margin: float | None,
    used: Iterable[str] = (),
) -> PreferencePair:
    if _asks_nothing(prompt):
        raise RowRejected(Reason.EMPTY_PROMPT)
    if chosen == rejected:
        raise RowRejected(Reason.IDENTICAL_SIDES)
    if margin is not None and not math.isfinite(margin):  # the difference of two huge scores
        raise RowRejected(Reason.BAD_MARGIN)
    pair_id = "" if "pair_id" in used else pair_id_value(row.get("pair_id"))
    used = {"prompt", "chosen", "rejected", *MARGIN_COLUMNS, *used} | ({"pair_id"} if pair_id else set())
    return PreferencePair(plain_prompt(prompt), chosen, rejected, margin, _metadata(row, used), pair_id)


def _asks_nothing(prompt: tuple[Message, ...]) -> bool:
    return all(turn.role == TOOLS or is_blank(turn.text) for turn in prompt)


def _sides(row: Row) -> tuple[tuple[Message, ...], str, str]:
    """(shared earlier turns, chosen, rejected)."""
    (chosen_context, chosen), (rejected_context, rejected) = (
        _completion(row.get(name), empty, row.get(f"{name}_fields")) for name, empty in _SIDE_REASONS
    )
    if chosen_context != rejected_context:
        raise RowRejected(Reason.PROMPTS_DIFFER)
    return chosen_context, chosen, rejected


def _completion(value: Any, empty: Reason, fields: Any = None) -> tuple[tuple[Message, ...], str]:
    """(earlier turns, completion) of one side: a text, or a message list that ends with the assistant's turn.

    Args:
        value: of the side's column.
        empty: why it is refused where nothing is in it.
        fields: what the completion has besides its text, in a column of its own: so our own tables have it.
    """
    value = turn_list(value)
    if not isinstance(value, list | dict):
        return (), answer_of(text_value(value, None if fields else empty), fields)
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, dict) and all(part is None for name, part in last.items() if name != "role"):
        raise RowRejected(empty)  # a turn with nothing in it is no completion
    messages = message_list(value)
    if not messages:
        raise RowRejected(empty)
    if messages[-1].role != "assistant":
        raise RowRejected(Reason.NO_FINAL_ASSISTANT_TURN)
    if is_blank(messages[-1].text):
        raise RowRejected(empty)
    return asked_turns(messages[:-1]), as_answer(messages[-1])


def _whole_prompt(
    row: Row, context: tuple[Message, ...], answers: Sequence[str]
) -> tuple[tuple[Message, ...], list[str]]:
    """The prompt that a row's columns and the turns before its completions make up, and the completions.

    The sides usually repeat the prompt (UltraFeedback); a prompt of turns may also continue in them (TRL).
    """
    raw = row.get("prompt")
    if isinstance(raw, list | dict):
        asked = message_list(raw)
    else:
        asked = (Message("user", text_value(raw, Reason.EMPTY_PROMPT)),)
    turns, answers = asked_turns(asked), [continued(asked, answer) for answer in answers]
    if not context or isinstance(raw, list | dict) or len(turns) > 1:
        return framed(_joined(turns, context), row), answers
    if not any(turns[0].content.strip() in message.content for message in context if message.role == "user"):
        raise RowRejected(Reason.PROMPTS_DIFFER)
    return framed(context, row), answers


def _joined(prompt: tuple[Message, ...], context: tuple[Message, ...]) -> tuple[Message, ...]:
    """One dialogue of the prompt's turns and the sides', with those that both have once.

    The sides repeat the prompt, behind a system turn of their own perhaps, or its last turns, or go on behind it; or
    they are the whole dialogue, of which the prompt is the end.
    """
    own = next((place for place, message in enumerate(context) if message.role != "system"), len(context))
    if prompt in (context[: len(prompt)], context[own : own + len(prompt)], context[-len(prompt) :]):
        return context
    repeated = next(size for size in range(len(prompt), -1, -1) if prompt[len(prompt) - size :] == context[:size])
    if not repeated and context and (context[0].role == "system" or prompt[-1].role == context[0].role == "user"):
        raise RowRejected(Reason.PROMPTS_DIFFER)  # two questions, of which it is not known which one was answered
    return prompt + context[repeated:]


def _annotated_margin(row: Row) -> float | None:
    values = (number(row.get(name), Reason.BAD_MARGIN) for name in MARGIN_COLUMNS)
    return next((value for value in values if value is not None), None)


def _metadata(row: Row, used: set[str]) -> dict[str, Any]:
    """Whatever else the record carried, JSON-ready; a `metadata` object is taken as it is, null columns are left out.

    In our own tables `prompt_id` and `subset` are copies of what the pair holds anyway, for readers of the table.
    """
    used = used | {SYSTEM, TOOLS, "chosen_fields", "rejected_fields"}
    carried = json_object(row.get("metadata"))
    if carried is not None:
        used = used | {"metadata"} | ({"prompt_id", "subset"} if "pair_id" in row else set())
    extras = {name: value for name, value in row.items() if name not in used and value is not None}
    return {str(name): json_ready(value) for name, value in (*(carried or {}).items(), *extras.items())}
