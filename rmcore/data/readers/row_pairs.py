"""The pairs and the judgement that a row of each layout holds; `layouts` says which layout a row has.

What cannot become a pair is refused with one of a small fixed set of reasons; nothing is guessed or repaired. Each
`parse_…` raises RowRejected with that reason.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.observation import WEIGHT, Observation, annotator_of
from rmcore.data.pair import TOOLS, Message, PreferencePair, Prompt, as_answer, is_blank, plain_prompt
from rmcore.data.readers.columns import ANSWER_COLUMNS, BINARY_GRADES, MARGIN_COLUMNS, SHP_COLUMNS, Row
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
from rmcore.data.readers.two_answers import Translate

_OF_PAIRS = frozenset(("prompt", "chosen", "rejected", *MARGIN_COLUMNS))
"""Columns that a pair itself takes; its metadata hold the others."""
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


def as_row_pairs(parse: Callable[[Row], PreferencePair]) -> Callable[[Row], RowPairs]:
    """Return a parser of rows that give one pair each, whose judgement is that pair's own."""

    def parse_row(row: Row) -> RowPairs:
        pair = parse(row)
        return RowPairs([pair], observation=None if _weight(pair.metadata) == 1 else Observation.of_pair(pair))

    return parse_row


def _weight(carried: Mapping[str, Any]) -> float:
    weight = number(carried.get(WEIGHT), Reason.BAD_WEIGHT)
    if weight is not None and weight <= 0:
        raise RowRejected(Reason.BAD_WEIGHT)
    return 1.0 if weight is None else weight


def parse_translated(row: Row, *, translate: Translate, most: int) -> RowPairs:
    """Return what a row of another program's layout says, once it is translated into one of ours."""
    translated = translate(row)
    if "responses" in translated:
        return parse_ranked(translated, most=most, is_implicit="prompt" not in translated)
    return as_row_pairs(parse_prompt_pair if "prompt" in translated else parse_implicit)(translated)


def parse_prompt_pair(row: Row) -> PreferencePair:
    """Return the pair of a row with a prompt of its own."""
    context, chosen, rejected = _sides(row)
    prompt, (chosen, rejected) = _whole_prompt(row, context, (chosen, rejected))
    return _pair(prompt, chosen, rejected, row, margin=_annotated_margin(row))


def parse_implicit(row: Row) -> PreferencePair:
    """Return the pair of a row whose two message lists begin with the prompt."""
    context, chosen, rejected = _sides(row)
    return _pair(framed(context, row), chosen, rejected, row, margin=_annotated_margin(row))


def parse_dialogue(row: Row) -> PreferencePair:
    """Return the pair of a row whose two transcripts begin with the prompt."""
    turns = {name: dialogue_turns(text_value(row.get(name), empty)) for name, empty in _SIDE_REASONS}
    if turns["chosen"][:-1] != turns["rejected"][:-1]:
        raise RowRejected(Reason.PROMPTS_DIFFER)
    chosen, rejected = (text_value(turns[name][-1].content, empty) for name, empty in _SIDE_REASONS)
    return _pair(framed(turns["chosen"][:-1], row), chosen, rejected, row, margin=_annotated_margin(row))


def parse_shp(row: Row) -> PreferencePair:
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


def parse_ranked(row: Row, *, most: int, is_implicit: bool = False) -> RowPairs:
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


def parse_best(row: Row, *, prompt: str, best: str, most: int) -> RowPairs:
    """The best one of K answers is better than each of the others, of which nothing is said."""
    column = next((name for name in ANSWER_COLUMNS if name in row), ANSWER_COLUMNS[0])
    answers = list_value(row.get(column))
    place = _best_place(row.get(best), best, answers)
    extras = {name: value for name, value in row.items() if name not in (prompt, column, best)}
    return _one_better({**extras, "prompt": row.get(prompt)}, answers[place], answers, most=most)


def parse_one_of(row: Row, *, is_implicit: bool, most: int) -> RowPairs:
    """The chosen answer is better than each of the rejected ones, of which nothing is said."""
    worse = row.get("rejected")
    answers = [row.get("chosen"), *(worse if isinstance(worse, list) else [worse])]
    extras = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    return _one_better(extras, answers[0], answers, is_implicit=is_implicit, most=most)


def _one_better(extras: Row, best: Any, answers: list[Any], *, most: int, is_implicit: bool = False) -> RowPairs:
    ranks = [1 if answer == best else 2 for answer in answers]
    row = {name: value for name, value in extras.items() if name != "scores"}
    ranked = parse_ranked({**row, "responses": answers, "ranks": ranks}, most=most, is_implicit=is_implicit)
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


def parse_graded(row: Row, *, prompt: str, answer: str, attributes: Mapping[str, str]) -> RowPairs:
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
        metadata=_metadata(row, frozenset((prompt, "prompt", answer, *attributes))),
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
        metadata=_metadata(row, _OF_PAIRS.union(used)),
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
    prompt: tuple[Message, ...], chosen: str, rejected: str, row: Row, *, margin: float | None, used: Iterable[str] = ()
) -> PreferencePair:
    if _asks_nothing(prompt):
        raise RowRejected(Reason.EMPTY_PROMPT)
    if chosen == rejected:
        raise RowRejected(Reason.IDENTICAL_SIDES)
    if margin is not None and not math.isfinite(margin):  # the difference of two huge scores
        raise RowRejected(Reason.BAD_MARGIN)
    pair_id = "" if "pair_id" in used else pair_id_value(row.get("pair_id"))
    used = _OF_PAIRS.union(used, ("pair_id",) if pair_id else ())
    return PreferencePair(plain_prompt(prompt), chosen, rejected, margin, _metadata(row, used), pair_id)


def _asks_nothing(prompt: tuple[Message, ...]) -> bool:
    return all(turn.role == TOOLS or is_blank(turn.text) for turn in prompt)


def _sides(row: Row) -> tuple[tuple[Message, ...], str, str]:
    """(shared earlier turns, chosen, rejected)."""
    chosen_context, chosen = _completion(row.get("chosen"), Reason.EMPTY_CHOSEN, row.get("chosen_fields"))
    rejected_context, rejected = _completion(row.get("rejected"), Reason.EMPTY_REJECTED, row.get("rejected_fields"))
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
    if not isinstance(value, list | dict):
        return (), answer_of(text_value(value, None if fields else empty), fields)
    value = turn_list(value)
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
    turns, answers = asked_turns(asked), list(answers)
    if turns is not asked:
        answers = [continued(asked, answer) for answer in answers]
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
    if not context:
        return prompt
    own = next((place for place, message in enumerate(context) if message.role != "system"), len(context))
    if prompt in (context[: len(prompt)], context[own : own + len(prompt)], context[-len(prompt) :]):
        return context
    repeated = next(size for size in range(len(prompt), -1, -1) if prompt[len(prompt) - size :] == context[:size])
    if not repeated and (context[0].role == "system" or prompt[-1].role == context[0].role == "user"):
        raise RowRejected(Reason.PROMPTS_DIFFER)  # two questions, of which it is not known which one was answered
    return prompt + context[repeated:]


def _annotated_margin(row: Row) -> float | None:
    for name in MARGIN_COLUMNS:
        if (value := number(row.get(name), Reason.BAD_MARGIN)) is not None:
            return value
    return None


def _metadata(row: Row, used: frozenset[str]) -> dict[str, Any]:
    """Whatever else the record carried, JSON-ready; a `metadata` object is taken as it is, null columns are left out.

    In our own tables `prompt_id` and `subset` are copies of what the pair holds anyway, for readers of the table.
    """
    used = used | {SYSTEM, TOOLS, "chosen_fields", "rejected_fields"}
    if row.keys() <= used:
        return {}
    carried = json_object(row.get("metadata"))
    if carried is not None:
        used = used | {"metadata"} | ({"prompt_id", "subset"} if "pair_id" in row else set())
    extras = {name: value for name, value in row.items() if name not in used and value is not None}
    return {str(name): json_ready(value) for name, value in (*(carried or {}).items(), *extras.items())}
