"""Exports of annotation tools, translated into the rows that `layouts` reads: Label Studio and Argilla.

Several people may have labelled a row; it is unfolded into one for each label.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.observation import ANNOTATOR, annotator_of
from rmcore.data.readers.columns import (
    PLACES,
    TIES,
    Row,
    Translate,
    only,
    preferred,
    prompt_column,
    respelled,
    spelling,
    two_answers,
    without,
    word,
)
from rmcore.data.readers.fields import Reason, RowRejected

_NO_ANSWERS = ("draft", "discarded")
_BETTER = frozenset(
    ("better", "best", "prefer", "preferred", "preference", "preferences", "choose", "chosen", "choice", "select",
     "selected", "pick", "winner", "vote", "favorite", "favourite", "like", "liked", "good", "helpful", "helpfulness",
     "useful", "usefulness", "quality", "correct", "correctness", "accurate", "accuracy", "relevant", "relevance",
     "coherent", "coherence", "truthful", "truthfulness", "honest", "honesty", "harmless", "harmlessness", "safe",
     "safety", "clear", "clarity", "overall", "pairwise", "pw", "comparison", "compare")
)  # fmt: skip
"""Words by which a question says that it names the better answer; the last ones are those of Label Studio's examples,
whose annotators click on the one that they prefer."""
_GRADED = frozenset(("rating", "rate", "score", "grade", "stars", "points"))
_RANKED = frozenset(("rank", "ranks", "ranking", "order"))
_BESIDES = frozenset(
    ("a", "an", "all", "and", "answer", "answers", "are", "completion", "completions", "do", "does", "for", "how",
     "in", "is", "it", "model", "more", "most", "of", "on", "one", "or", "output", "outputs", "question", "replies",
     "reply", "response", "responses", "text", "texts", "the", "this", "to", "two", "what", "which", "would", "you",
     "your", "b")
)  # fmt: skip
"""Words of a question that say nothing of its direction. One with any further word may ask the opposite."""


def label_studio(sample: Row) -> Translate | None:
    """Label Studio's tasks: data, and annotations with a pairwise result."""
    is_export = isinstance(sample.get("annotations"), list) and isinstance(sample.get("data"), dict)
    return _translate_label_studio if is_export else None


def unfold_label_studio(row: Row) -> list[Row]:
    """One row for each annotation of a task."""
    annotations = row.get("annotations")
    if not isinstance(annotations, list) or not annotations:
        return [row]
    return [{**row, "annotations": [annotation]} for annotation in annotations]


def _translate_label_studio(row: Row) -> dict[str, Any]:
    """One annotation of a task: its pairwise result names the left or the right one of `to_name`."""
    data, annotations = row.get("data"), row.get("annotations")
    if not isinstance(data, dict):
        raise RowRejected(Reason.MISSING_VALUE)
    annotation = annotations[0] if isinstance(annotations, list) and annotations else None
    if not isinstance(annotation, dict) or annotation.get("was_cancelled"):
        raise RowRejected(Reason.NOT_LABELLED)
    entries = annotation.get("result")
    entries = entries if isinstance(entries, list) else []
    results = [entry for entry in entries if isinstance(entry, dict) and entry.get("type") == "pairwise"]
    if not results:
        raise RowRejected(Reason.NOT_LABELLED)
    _require_better(str(results[0].get("from_name") or "preferred"))
    value = results[0].get("value")
    selected = value.get("selected") if isinstance(value, dict) else None
    if len(results) > 1 or selected not in ("left", "right"):
        raise RowRejected(Reason.UNKNOWN_WINNER)
    data = respelled(data)
    compared = results[0].get("to_name")
    names = compared.split(",") if isinstance(compared, str) else compared if isinstance(compared, list) else []
    columns = {spelling(name): name for name in data}
    named_fields = [columns[spelling(str(name))] for name in names if spelling(str(name)) in columns]
    answers = [(named_fields[0], named_fields[1])] if len(named_fields) == 2 else two_answers(data)
    if not answers:
        raise RowRejected(Reason.MISSING_VALUE)
    sides = only(answers, "the two answers")
    who = annotation.get("completed_by")
    who = who.get("id") if isinstance(who, dict) else who
    if who is not None and annotator_of(data) is None:
        data[ANNOTATOR] = who
    return preferred(data, sides, PLACES[selected], prompt_column(data), ("pair_id",))


def argilla(sample: Row) -> Translate | None:
    """Argilla's records: fields, and responses that rank, choose or rate them."""
    nested = isinstance(sample.get("fields"), dict) and isinstance(sample.get("responses"), dict)
    flat = any(name.endswith(".responses") for name in sample)
    return _translate_argilla if nested or flat else None


def unfold_argilla(row: Row) -> list[Row]:
    """One row for each user, `{"fields", "metadata", "said": {question: value}, "user"}`; a draft says nothing."""
    fields, metadata, responses = row.get("fields"), row.get("metadata"), row.get("responses")
    if not isinstance(fields, dict) or not isinstance(responses, dict):
        fields = {name: value for name, value in row.items() if "." not in name and name not in ("id", "_server_id")}
        metadata, responses = None, _flat_responses(row)
    by_user: dict[str | None, dict[str, Any]] = {}
    for question, entries in responses.items():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                user = entry.get("user_id")
                said = by_user.setdefault(None if user is None else str(user), {})
                if entry.get("status") not in _NO_ANSWERS:
                    said[question] = entry.get("value")
    labels = by_user or {None: {}}
    return [{"fields": fields, "metadata": metadata, "said": said, "user": user} for user, said in labels.items()]


def _flat_responses(row: Row) -> dict[str, list[dict[str, Any]]]:
    """QUESTION.responses, .users and .status, lists in one order, as the nested form has them."""
    responses = {}
    for name in [name for name in row if name.endswith(".responses")]:
        columns = [row.get(name), row.get(f"{name}.users"), row.get(f"{name}.status")]
        lists = [column if isinstance(column, list) else [] for column in columns]
        responses[name.removesuffix(".responses")] = [
            dict(zip(("value", "user_id", "status"), entry, strict=True))
            for entry in islice(zip_longest(*lists), len(lists[0]))
        ]
    return responses


def _translate_argilla(row: Row) -> dict[str, Any]:
    """Translate what one user said of the answers: a ranking of them, the better one of two, or a rating of each."""
    fields, said = respelled(row["fields"]), row["said"]
    prompt = prompt_column(fields)
    answers = [name for name in fields if name != prompt]
    verdicts: dict[str, tuple[str, dict[str, Any]]] = {}
    raters: dict[str, str] = {}
    ratings: dict[str, Any] = {}
    tied: dict[str, Any] = {}
    for question, value in said.items():
        if ranked := _argilla_ranks(value, answers):
            verdicts[question] = ("ranks", ranked)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            rated = [name for name in answers if _named(name).search(word(question))]
            if len(rated) == 1 and rated[0] in ratings:
                raise DataError(f"two questions rate {rated[0]}: drop one of them from the Argilla export.")
            if len(rated) == 1:
                ratings[rated[0]], raters[rated[0]] = value, question
        if isinstance(value, str) and word(value) in TIES:
            two = two_answers(answers) or ([(answers[0], answers[1])] if len(answers) == 2 else [])
            tied = dict.fromkeys(two[0], 1) if len(two) == 1 else {}  # else it is not clear which they are
    if len(ratings) > 1:
        verdicts["the ratings"] = ("scores", ratings)
    if not verdicts and tied:
        verdicts["the tie"] = ("ranks", tied)
    if not verdicts:
        raise RowRejected(Reason.NOT_LABELLED)
    verdict = only(list(verdicts), "the preference")
    kind, numbers = verdicts[verdict]
    if kind == "scores":
        for name, question in raters.items():
            _require_better(question, _GRADED, of=name)
    elif verdict in said:
        _require_better(verdict, _RANKED if isinstance(said[verdict], list) else frozenset())
    metadata = row["metadata"] if isinstance(row["metadata"], dict) else {}
    unused = without({**without(fields, prompt, "pair_id", *numbers), **metadata}, "chosen", "rejected")
    responses = [fields[name] for name in numbers]
    asked = None if prompt is None else fields[prompt]
    translated = {**unused, "prompt": asked, "responses": responses, kind: list(numbers.values())}
    return translated if row["user"] is None or annotator_of(translated) else translated | {ANNOTATOR: row["user"]}


@lru_cache(maxsize=256)
def _require_better(question: str, also: frozenset[str] = frozenset(), *, of: str = "") -> None:
    """Refuse a question whose name does not say that the answer which it names, or grades highest, is the better one.

    Args:
        question: its name.
        also: words besides `_BETTER` by which such a question may say so.
        of: the field that it grades, if it grades one; its name in the question says nothing.

    Raises:
        DataError: says what to name it, and how to read a question that asks for the worse answer.
    """
    asked = word(re.sub("(?<=[a-z])(?=[A-Z])", "_", question))
    if of:
        asked = _named(of).sub("_", word(question))
    words = {word for word in re.split(r"[\W_]+", asked) if word and not word.isdigit()}
    says = _BETTER | also
    if words <= says | _BESIDES and not words.isdisjoint(says):
        return
    raise DataError(
        f"the question {question!r} does not say by its name that it asks for the better answer, as 'preferred' or "
        "'quality' do; if it asks for the worse one, every pair would be the wrong way round. Rename it to "
        f"{f'rating_{of}' if of else 'preferred'!r} in the file. If it asks for the worse one, or 1 is its best grade, "
        "turn the pairs after that:\n"
        "    rm-opt data convert RENAMED.json pairs.parquet\n"
        "    rm-opt run --data pairs.parquet --set data.chosen_column=rejected --set data.rejected_column=chosen"
    )


def _named(field: str) -> re.Pattern[str]:
    """Match the name of a field as a whole in that of a question: response_1 in "rating of response_1"."""
    return re.compile(rf"(?<![^_])({re.escape(word(field))}|{re.escape(spelling(field))})(?![^_])")


def _argilla_ranks(value: Any, answers: Sequence[str]) -> dict[str, Any] | None:
    """Field -> rank, from names in their order, from {value, rank}, or from the name of the better of two."""
    by_spelling = {spelling(name): name for name in answers}
    if isinstance(value, str):
        chosen = by_spelling.get(spelling(value))
        pairs = [pair for pair in two_answers(answers) if chosen in pair]
        return {name: 1 if name == chosen else 2 for name in pairs[0]} if pairs else None
    if not isinstance(value, list) or len(value) < 2:
        return None
    entries = [item if isinstance(item, dict) else {"value": item, "rank": rank} for rank, item in enumerate(value)]
    named = [by_spelling.get(spelling(str(entry.get("value")))) for entry in entries]
    ranks = {name: entry.get("rank") for name, entry in zip(named, entries, strict=True) if name is not None}
    return ranks if len(ranks) == len(entries) else None
