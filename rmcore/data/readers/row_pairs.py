"""The pairs and the judgement of a row in one of two forms, into which `layouts` puts the rows of every layout.

| form | columns |
| --- | --- |
| a pair | chosen, rejected (, target_margin) |
| several answers | responses, ranks or scores |

Both have a `prompt`, or begin each answer with it. What cannot become a pair is refused with one of a small fixed set
of reasons; nothing is guessed or repaired.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from rmcore.data.observation import WEIGHT, Observation, annotator_of
from rmcore.data.pair import (
    TOOLS,
    Message,
    PreferencePair,
    Prompt,
    as_answer,
    content_id,
    is_blank,
    plain_prompt,
    prompt_text,
)
from rmcore.data.readers.columns import BINARY_GRADES, MARGIN_COLUMNS, Row
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
from rmcore.data.readers.turns import SYSTEM, answer_of, asked_turns, continued, framed, message_list, turn_list

_ALWAYS = frozenset((SYSTEM, TOOLS, "chosen_fields", "rejected_fields"))
_OF_PAIRS = _ALWAYS | {"prompt", "chosen", "rejected", *MARGIN_COLUMNS}
"""Columns that a pair itself takes; its metadata hold the others."""
_OF_ANSWERS = _OF_PAIRS | {
    "responses",
    "ranks",
    "scores",
    "pair_id",
}  # the id of a row is not that of each of its pairs
PAIRS_PER_ROW = 36
"""Most pairs of one row of ranked answers: all pairs of 9, the most that InstructGPT's labellers ranked (Ouyang et al.
2022, arXiv:2203.02155)."""
SIDES = (("chosen", Reason.EMPTY_CHOSEN), ("rejected", Reason.EMPTY_REJECTED))


@dataclass(frozen=True, slots=True)
class RowPairs:
    """The pairs of one row, how many more it would give that `PAIRS_PER_ROW` leaves out, and what it says."""

    pairs: list[PreferencePair]
    num_over_cap: int = 0
    observation: Observation | None = None
    """The judgement itself; None where that is `Observation.of_pair` of its one pair."""
    contradicts: bool = False
    """A text has two ranks: the row has its pairs, which go both ways, and no observation."""


def read_row(row: Row, *, top_only: bool = False) -> RowPairs:
    """Return what a row of one of the two forms says.

    Args:
        row: with chosen and rejected, or several answers.
        top_only: of the ranks of three or more answers only 1 means something.

    Raises:
        RowRejected: says why it gives no pair.
    """
    if not ("chosen" in row and "rejected" in row):
        return _read_answers(row, top_only=top_only)
    sides = [_completion(row[side], empty, row.get(f"{side}_fields")) for side, empty in SIDES]
    prompt, (chosen, rejected) = _prompt_and_answers(row, sides)
    pair = _pair(prompt, chosen, rejected, row, annotated_margin(row), _OF_PAIRS)
    return RowPairs([pair], observation=None if _weight(pair.metadata) == 1 else Observation.of_pair(pair))


def _read_answers(row: Row, *, top_only: bool) -> RowPairs:
    """The ranking of K answers and its pairs; with scores, the target margin is the difference of the two."""
    answers = [_completion(answer, Reason.EMPTY_ANSWER) for answer in list_value(row.get("responses"))]
    ranks, scores = (number_list(row.get(name), len(answers)) for name in ("ranks", "scores"))
    if len(answers) < 2:
        raise RowRejected(Reason.FEWER_THAN_TWO_ANSWERS)
    strength = scores if ranks is None else [-rank for rank in ranks]
    if strength is None:
        raise RowRejected(Reason.MISSING_VALUE)
    prompt, texts = _prompt_and_answers(row, answers)
    if scores is not None and _contradict(strength, scores):
        raise RowRejected(Reason.RANKS_CONTRADICT_SCORES)
    by_text = dict(zip(texts, strength, strict=True))
    if len(by_text) < 2:
        raise RowRejected(Reason.IDENTICAL_SIDES)
    places, num_over_cap = strict_pairs(prompt, texts, strength, PAIRS_PER_ROW)
    pairs = [
        _pair(prompt, texts[i], texts[j], row, None if scores is None else scores[i] - scores[j], _OF_ANSWERS)
        for i, j in places
    ]
    if any(by_text[text] != value for text, value in zip(texts, strength, strict=True)):
        return RowPairs(pairs, num_over_cap, contradicts=True)
    weight = _weight(row)
    if len(texts) == 2 and pairs and weight == 1:
        return RowPairs(pairs, num_over_cap)
    if _asks_nothing(prompt):
        raise RowRejected(Reason.EMPTY_PROMPT)
    rank_of = {value: rank for rank, value in enumerate(sorted(set(strength), reverse=True), start=1)}
    observation = Observation(
        plain_prompt(prompt),
        tuple(by_text),  # of answers that are the same text one is kept
        ranks=tuple(rank_of[value] for value in by_text.values()),
        top_only=top_only and len(by_text) > 2,
        annotator=annotator_of(row),
        weight=weight,
        metadata=_metadata(row, _OF_ANSWERS),
    )
    return RowPairs(pairs, num_over_cap, observation)


def asked_and_answered(row: Row, prompt: str = "prompt", answer: str = "response") -> tuple[Prompt, str]:
    """The prompt, with all that its row says of it, and the completion of a row of one answer.

    Raises:
        RowRejected: one of them is missing, blank, or none.
    """
    completion = _completion(row.get(answer), Reason.EMPTY_ANSWER)
    turns, (text,) = _prompt_and_answers({**row, "prompt": row.get(prompt)}, [completion])
    if _asks_nothing(turns):
        raise RowRejected(Reason.EMPTY_PROMPT)
    return plain_prompt(turns), text


def read_graded(row: Row, *, prompt: str, answer: str, attributes: Mapping[str, str]) -> RowPairs:
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
        metadata=_metadata(row, _ALWAYS | {prompt, "prompt", answer, *attributes}),
    )
    return RowPairs([], observation=observation)


def annotated_margin(row: Row) -> float | None:
    """The margin that a row itself names."""
    for name in MARGIN_COLUMNS:
        if (value := number(row.get(name), Reason.BAD_MARGIN)) is not None:
            return value
    return None


def _weight(carried: Mapping[str, Any]) -> float:
    weight = number(carried.get(WEIGHT), Reason.BAD_WEIGHT)
    if weight is not None and weight <= 0:
        raise RowRejected(Reason.BAD_WEIGHT)
    return 1.0 if weight is None else weight


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
    prompt: tuple[Message, ...], chosen: str, rejected: str, row: Row, margin: float | None, used: frozenset[str]
) -> PreferencePair:
    if _asks_nothing(prompt):
        raise RowRejected(Reason.EMPTY_PROMPT)
    if chosen == rejected:
        raise RowRejected(Reason.IDENTICAL_SIDES)
    if margin is not None and not math.isfinite(margin):  # the difference of two huge scores
        raise RowRejected(Reason.BAD_MARGIN)
    pair_id = "" if "pair_id" in used else pair_id_value(row.get("pair_id"))
    metadata = _metadata(row, used | {"pair_id"} if pair_id else used)
    return PreferencePair(plain_prompt(prompt), chosen, rejected, margin, metadata, pair_id)


def _asks_nothing(prompt: tuple[Message, ...]) -> bool:
    return all(turn.role == TOOLS or is_blank(turn.text) for turn in prompt)


Completion = tuple[tuple[Message, ...], str]
"""Earlier turns, and the text that answers them."""


def _completion(value: Any, empty: Reason, fields: Any = None) -> Completion:
    """One side: a text, or messages of which the last one is the assistant's.

    Args:
        value: of the side's column; a tuple holds turns that are read already.
        empty: why it is refused where nothing is in it.
        fields: what the completion has besides its text, in a column of its own: so our own tables have it.
    """
    if not isinstance(value, list | dict | tuple):
        return (), answer_of(text_value(value, None if fields else empty), fields)
    if not isinstance(value, tuple):
        value = turn_list(value)
        last = value[-1] if isinstance(value, list) and value else None
        if isinstance(last, dict) and all(part is None for name, part in last.items() if name != "role"):
            raise RowRejected(empty)  # a turn with nothing in it is no completion
        value = message_list(value)
    if not value:
        raise RowRejected(empty)
    if value[-1].role != "assistant":
        raise RowRejected(Reason.NO_FINAL_ASSISTANT_TURN)
    if is_blank(value[-1].text):
        raise RowRejected(empty)
    return asked_turns(value[:-1]), as_answer(value[-1])


def _prompt_and_answers(row: Row, completions: Sequence[Completion]) -> tuple[tuple[Message, ...], list[str]]:
    """The prompt that a row's columns and the turns before its completions make up, and the completions.

    The sides usually repeat the prompt (UltraFeedback); a prompt of turns may also continue in them (TRL).
    """
    context, answers = completions[0][0], [text for _, text in completions]
    if any(other != context for other, _ in completions[1:]):
        raise RowRejected(Reason.PROMPTS_DIFFER)
    if "prompt" not in row:
        return framed(context, row), answers
    raw = row["prompt"]
    if isinstance(raw, list | dict):
        asked = message_list(raw)
    else:
        asked = (Message("user", text_value(raw, Reason.EMPTY_PROMPT)),)
    turns = asked_turns(asked)
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
    first_turn = next((position for position, message in enumerate(context) if message.role != "system"), len(context))
    if prompt in (context[: len(prompt)], context[first_turn : first_turn + len(prompt)], context[-len(prompt) :]):
        return context
    repeated = next(size for size in range(len(prompt), -1, -1) if prompt[len(prompt) - size :] == context[:size])
    if not repeated and (context[0].role == "system" or prompt[-1].role == context[0].role == "user"):
        raise RowRejected(Reason.PROMPTS_DIFFER)  # two questions, of which it is not known which one was answered
    return prompt + context[repeated:]


def _metadata(row: Row, used: frozenset[str]) -> dict[str, Any]:
    """Whatever else the record carried, JSON-ready; a `metadata` object is taken as it is, null columns are left out.

    In our own tables `prompt_id` and `subset` are copies of what the pair holds anyway, for readers of the table.
    """
    if row.keys() <= used:
        return {}
    carried = json_object(row.get("metadata"))
    if carried is not None:
        used = used | {"metadata"} | ({"prompt_id", "subset"} if "pair_id" in row else set())
    extras = {name: value for name, value in row.items() if name not in used and value is not None}
    return {str(name): json_ready(value) for name, value in (*(carried or {}).items(), *extras.items())}


def of_sides(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a pair: fields that both sides share as they are, others as chosen_NAME and rejected_NAME."""
    metadata: dict[str, Any] = {}
    for name in {**chosen, **rejected}:
        values = {f"chosen_{name}": chosen.get(name), f"rejected_{name}": rejected.get(name)}
        metadata |= {name: chosen.get(name)} if chosen.get(name) == rejected.get(name) else values
    return {name: value for name, value in metadata.items() if value is not None}


def strict_pairs(
    prompt: Prompt, texts: Sequence[str], strength: Sequence[float], most: int
) -> tuple[list[tuple[int, int]], int]:
    """Choose the pairs of answers of different texts of which one is strictly stronger.

    The choice depends on what is given alone, so it is the same anywhere in a file.

    Args:
        prompt: what was answered.
        texts: (K,) answers.
        strength: (K,) more is better.
        most: pairs that are wanted; of more a random choice is kept, in order.

    Returns:
        (place of the better, place of the worse) of each pair, in the order of the better ones, then of the worse; and
        how many are left out.
    """
    num_worse = _num_worse(strength, texts)
    ends = list(accumulate(num_worse))  # the pairs in order: those that the first answer wins, then the second's, ...
    numbers: Iterable[int] = range(ends[-1])
    if ends[-1] > most:
        identity = content_id(prompt_text(prompt), *texts, *map(repr, strength))
        numbers = sorted(random.Random(identity).sample(range(ends[-1]), most))  # noqa: S311 - data, not cryptography
    pairs = []
    for i, places in groupby(numbers, partial(bisect_right, ends)):
        worse = [j for j in range(len(texts)) if strength[j] < strength[i] and texts[j] != texts[i]]
        pairs += [(i, worse[place - ends[i] + num_worse[i]]) for place in places]
    return pairs, ends[-1] - len(pairs)


def _num_worse(strength: Sequence[float], texts: Sequence[str]) -> list[int]:
    """For each answer, how many others of another text it is strictly stronger than; in memory of K and not K x K."""
    of_text: dict[str, list[float]] = {}
    for text, value in zip(texts, strength, strict=True):
        of_text.setdefault(text, []).append(value)
    everyone = sorted(strength)
    for values in of_text.values():
        values.sort()
    return [
        bisect_left(everyone, value) - bisect_left(of_text[text], value)
        for text, value in zip(texts, strength, strict=True)
    ]
