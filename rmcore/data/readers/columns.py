"""Names of columns, those that layouts are known by and those that a user gave instead, and which are two answers."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError
from rmcore.data.observation import WEIGHT
from rmcore.data.survey import OVERALL_GRADES

Row = Mapping[str, Any]
Translate = Callable[[Row], Row]
"""A row in, one that `row_pairs.read_row` reads out."""
PLACES = {"left": 0, "right": 1, "first": 0, "second": 1}
TIES = frozenset(
    ("tie", "ties", "tied", "tie_bothbad", "tie_both_bad", "both_bad", "bothbad", "both_good", "both", "neither",
     "equal", "draw", "same", "no_preference")
)  # fmt: skip

MARGIN_COLUMNS = ("target_margin", "margin")
SHP_COLUMNS = ("history", "human_ref_A", "human_ref_B", "labels")
SIDE_COLUMNS = ("response", "text", "completion")
ANSWER_COLUMNS = ("responses", "answers", "completions")
LIST_COLUMNS = frozenset((*ANSWER_COLUMNS, "ranks", "scores"))
PROMPTS = ("prompt", "instruction", "question", "context")
"""Names of the prompt next to two or more answers; the first one wins, several of the others are refused."""
ALPACA_COLUMNS = ("instruction", "input")
CONVERSATIONS = ("messages", "conversations", "conversation")
_STEMS = ("response", "answer", "completion", "output", "reply", "text", "conversation")
TWO_ANSWERS = (("a", "b"), *((f"{stem}_{one}", f"{stem}_{other}") for stem in _STEMS for one, other in ("ab", "12")))
BEST_COLUMNS = ("best_index", "chosen_index", "best", "best_answer", "best_response")
"""Which of several answers is best: its number, counted from 0, or its text."""
BINARY_GRADES = ("label", "thumbs_up")
GRADES = (*OVERALL_GRADES, "correctness", "coherence", "complexity", "verbosity", *BINARY_GRADES)
WINNERS = ("winner", "preference", "preferred", "choice")
STRENGTHS = ("preference_strength", "overall_preference")
ARENA_WINNERS = ("winner_model_a", "winner_model_b", "winner_tie")
OPENAI_COLUMNS = ("input", "preferred_output", "non_preferred_output")
SWIFT_COLUMNS = ("rejected_response", "rejected_messages")
_OTHERS = ("pair_id", "role", "label", "metadata", "meta", "subset", "chosen", "rejected", "score_ratio")
_OF_PROGRAMS = ("model_a", "model_b", "annotations", "data", "fields")

_LIKELY = {
    "prompt_column": ("prompt", "instruction", "question", "query", "input", "context", "user", "task", "post"),
    "chosen_column": (
        *("chosen", "good", "better", "best", "accepted", "positive"),
        *("chosenresponse", "preferredresponse", "betterresponse", "goodresponse", "responsechosen"),
    ),
    "rejected_column": (
        *("rejected", "bad", "worse", "worst", "dispreferred", "negative"),
        *("rejectedresponse", "dispreferredresponse", "worseresponse", "badresponse", "responserejected"),
    ),
}
"""Spellings that are offered as a mapping and never taken by themselves."""
_SEPARATORS = re.compile(r"[\s_()-]+")


def word(text: str) -> str:
    """A name or value in small letters, with one underscore for spaces, hyphens and brackets."""
    return _SEPARATORS.sub("_", text.lower()).strip("_")


@lru_cache(maxsize=256)
def spelling(name: str) -> str:
    """Reduce all spellings of a name to one: `responsea` for response_a, Response A and response-a."""
    return word(name).replace("_", "")


_KNOWN = {
    spelling(name): name
    for name in chain(
        *TWO_ANSWERS, PROMPTS, MARGIN_COLUMNS, SHP_COLUMNS, SIDE_COLUMNS, LIST_COLUMNS, WINNERS, STRENGTHS,
        ARENA_WINNERS, OPENAI_COLUMNS, _OTHERS, _OF_PROGRAMS,
    )
}  # fmt: skip
_KNOWN_GRADED = {**_KNOWN, **{spelling(name): name for name in (*GRADES, *BEST_COLUMNS)}}
"""Only where nothing else fits: in a file of pairs they are columns as any other."""


def known_names(
    columns: Iterable[str], taken: Collection[str] = (), known: Mapping[str, str] = _KNOWN
) -> dict[str, str]:
    """Column -> the name that it is known by, for those that are spelled otherwise.

    Args:
        columns: as the source has them. A name that is there as it should be means itself.
        taken: names that the user gave to other columns.
        known: spelling -> name.

    Raises:
        DataError: two columns are spellings of one name.
    """
    columns = list(columns)
    spellings: dict[str, str] = {}
    for column in columns:
        name = known.get(spelling(column), column)
        if name in columns or name in taken:
            continue
        if name in spellings:
            raise DataError(
                f"the columns {spellings[name]!r} and {column!r} may both be {name}: rename or drop one of them."
            )
        spellings[name] = column
    return {column: name for name, column in spellings.items()}


def respelled(row: Row) -> dict[str, Any]:
    """The row under the names that its columns are known by."""
    names = known_names(row)
    return {names.get(column, column): value for column, value in row.items()}


@dataclass(frozen=True)
class ColumnMap:
    """Names of the columns, where they are not the usual ones; None keeps the usual name.

    `spelled` holds the columns that are known names in another spelling, see `for_source`. With `joins_input` the
    prompt is the instruction and, on a line of its own, the input (Alpaca), as LLaMA-Factory joins them.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: str | None = None
    weight: str | None = None
    grades: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    joins_input: bool = False

    @classmethod
    def from_config(cls, config: DataConfig) -> "ColumnMap":
        """The map that a data configuration names."""
        return cls(
            config.prompt_column,
            config.chosen_column,
            config.rejected_column,
            config.margin_column,
            config.weight_column,
            config.grade_columns or (),
        )

    def for_source(self, columns: Iterable[str], *, graded: bool = False) -> "ColumnMap":
        """The map that also takes columns in another spelling: capitals, spaces, hyphens; `graded`: of grades, too.

        Raises:
            DataError: two columns are spellings of one name.
        """
        usual = self.usual_names
        others = (name for name in columns if name not in usual and name not in self.grades)
        spelled = known_names(others, usual.values(), _KNOWN_GRADED if graded else _KNOWN)
        return replace(self, spelled=spelled)

    def with_prompt(self, sample: Row) -> "ColumnMap":
        """The map that also finds a prompt in two columns (Alpaca), or in a conversation that the sides answer.

        Args:
            sample: every column of the source with a typical value.
        """
        row = self.rename(sample)
        if "prompt" in row:
            return self
        first, second = (row.get(name) for name in ALPACA_COLUMNS)
        is_text = isinstance(first, str) and isinstance(second, str | None)
        if is_text and "input" in row and not any(name in row for name in PROMPTS if name not in ALPACA_COLUMNS):
            return replace(self, joins_input=True)
        asked = [name for name in CONVERSATIONS if _ends_with_a_question(sample.get(name))]
        if len(asked) == 1 and "chosen" in row and "rejected" in row:
            return replace(self, prompt=asked[0])
        return self

    @cached_property
    def usual_names(self) -> dict[str, str]:
        """Named column -> the usual name that it stands for."""
        names = {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected, "target_margin": self.margin}
        names[WEIGHT] = self.weight
        return {column: usual for usual, column in names.items() if column is not None}

    def rename(self, row: Row) -> dict[str, Any]:
        """The row under the usual names; a column that a named one displaces is dropped."""
        usual = self.usual_names
        renamed = {self.spelled.get(name, name): value for name, value in row.items() if name not in usual}
        renamed |= {usual[name]: row[name] for name in usual if name in row}
        if self.joins_input:
            texts = [text for name in ALPACA_COLUMNS if (text := renamed.pop(name, None)) not in (None, "")]
            renamed["prompt"] = "\n".join(texts) if all(isinstance(text, str) for text in texts) else texts
        return renamed


USUAL_COLUMNS = ColumnMap()


def _ends_with_a_question(value: Any) -> bool:
    """Whether a value is turns of which the last one is not the assistant's: what two sides answer."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and last.get("role") not in (None, "assistant")


def likely_prompt(columns: Iterable[str]) -> bool:
    """Whether a column is called as prompts often are."""
    return any(spelling(column) in _LIKELY["prompt_column"] for column in columns)


def mapping_to_paste(columns: Iterable[str]) -> str:
    """The options that name the columns, to be completed by the user: COLUMN where none is likely."""
    columns = list(columns)
    options = []
    for option, spellings in _LIKELY.items():
        likely = [column for column in columns if spelling(column) in spellings]
        named = likely[0] if len(likely) == 1 and likely[0].isprintable() else "COLUMN"
        options.append(f"--set {shlex.quote(f'data.{option}={named}')}")
    return " ".join(options)


def only(candidates: Sequence[Any], what: str) -> Any:
    """The only one of several that may be meant.

    Raises:
        DataError: there are two.
    """
    if len(candidates) > 1:
        named = " and ".join(" with ".join(name) if isinstance(name, tuple) else name for name in candidates[:2])
        raise DataError(f"{named} may both be {what}, and which one is meant is unknown: drop or rename one.")
    return candidates[0]


def prompt_column(columns: Collection[str]) -> str | None:
    """Find the column of the prompt next to answers; None where there is none.

    Raises:
        DataError: two may be it.
    """
    prompts = [name for name in PROMPTS if name in columns]
    return str("prompt" if "prompt" in prompts else only(prompts, "the prompt")) if prompts else None


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
    pairs_of_columns = two_answers(sample)
    if not pairs_of_columns:
        return None
    answers, prompt = only(pairs_of_columns, "the two answers"), prompt_column(sample)
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
