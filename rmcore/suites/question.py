"""A question of a benchmark, and what every score here is made of: weighted means over questions.

All scores are functions of question weights (B, Q), so that a score, its interval and the difference of two models come
from the same code. Questions of one cluster (the same prompt, most often) are drawn together.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.data.pair import Prompt, plain_prompt, prompt_messages
from rmcore.data.readers.fields import RowRejected
from rmcore.data.readers.files import is_file_name, read_file
from rmcore.data.readers.records import RawRecord
from rmcore.data.readers.sources import iter_records
from rmcore.data.readers.turns import framed, message_list
from rmcore.evaluation.ranking import ratio

Rewards = Sequence[FloatArray]
"""Rewards of each question's answers, in their order; NaN where the model could not read one."""
Scores = Callable[[FloatArray], dict[str, FloatArray]]
"""Question weights (B, Q) -> named scores (B,), `overall` first; NaN where no question counts."""
OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its answers, of which the first `num_good` are right."""

    id: str
    prompt: Prompt
    answers: tuple[str, ...]
    num_good: int
    group: str
    """Subset, domain or category, as the benchmark counts it."""
    cluster: str
    """Questions that are no independent observations have one cluster."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Places of a right and a wrong answer that are compared, where the benchmark drew some."""
    wins_ties: bool = False
    """Whether equal rewards count as right, because the rule then names the answer that happens to be it."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark: where its data are, what they must hold, and how it is scored."""

    name: str
    title: str
    terms: str
    """Licence of the data, and what else a user of them should know."""
    rule: str
    """How it is scored, in a sentence."""
    read: Callable[["Row"], Question | None]
    """Gives the question of a row; None where its labels say that no answer is better."""
    scores: Callable[[Sequence[Question], Rewards], Scores]
    hub: str = ""
    """Data set on the Hugging Face hub that is read where no file is named; empty: there is none that can be."""
    split: str = "train"
    expected: Mapping[str, int] = field(default_factory=dict)
    """Questions of each group in the whole set; empty where that is not known, as of a set of one's own."""
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Groups that a score is over, of those that are neither over one group of its name nor over all."""
    files: str = "*"
    """Names of the files of a folder that are its data."""
    num_rows: int = 0
    """Rows of the whole set, where its groups' numbers are not known; 0: it is whole as it is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a benchmark's files, with named errors for what is missing in it."""

    fields: Mapping[str, Any]
    number: int
    file: Path | None
    """The file that it is from; None of a set of the hub."""
    suite: str

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        """A text; a completion may be empty.

        Raises:
            DataError: there is none of that name.
        """
        value = self.fields.get(name)
        if not isinstance(value, str) or not (value.strip() or may_be_empty):
            raise self.wrong(f"{name!r} is {'missing' if value is None else 'no text'}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of one text or more.

        Raises:
            DataError: there is none of that name.
        """
        value = self.fields.get(name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) for one in value):
            raise self.wrong(f"{name!r} is {'missing' if value is None else 'no list of texts'}")
        return tuple(value)

    def prompt(self, name: str, others: Collection[str] = ()) -> Prompt:
        """A text, or the turns of a dialogue, each with `role` and `content`.

        Args:
            name: its column.
            others: columns that say more of it, see `rmcore.data.readers.turns.framed`.

        Raises:
            DataError: it is neither, or they cannot be read.
        """
        asked = self._asked(name)
        more = {column: self.fields[column] for column in others if column in self.fields}
        try:
            return plain_prompt(framed(prompt_messages(asked), more))
        except RowRejected as rejection:
            raise self.wrong(str(rejection.reason)) from rejection

    def _asked(self, name: str) -> Prompt:
        value = self.fields.get(name)
        if isinstance(value, str):
            return self.text(name)
        try:
            turns = message_list(value)
        except RowRejected:
            turns = ()
        if not turns:
            raise self.wrong(f"{name!r} is neither a text nor a list of turns with 'role' and 'content'")
        return plain_prompt(turns)

    def wrong(self, what: str) -> DataError:
        """Say where something is not as the benchmark has it."""
        place = f" of {self.file.name}" if self.file else ""
        return DataError(
            f"{self.suite}: in row {self.number}{place} {what}; the columns there are "
            f"{', '.join(map(str, self.fields)) or '(none)'}. This is not the benchmark's own file: see its form in "
            "docs/benchmarks.md, or name another suite."
        )


def read_questions(suite: Suite, source: str, *, partial: bool = False) -> tuple[list[Question], dict[str, int]]:
    """Read a benchmark from a file, a folder of its files, a `datasets` folder, or the hub.

    Args:
        suite: the benchmark.
        source: where its data are.
        partial: accept a set of which rows are missing; without it, it is an error.

    Returns:
        The questions, and how many are missing of each group of which some are.

    Raises:
        DataError: it cannot be read, has another form, is not whole, or has more than the set.
    """
    read = [suite.read(row) for row in _rows(suite, source)]
    questions = [one for one in read if one is not None]
    found, ids = Counter(one.group for one in questions), Counter(one.id for one in questions)
    for one in questions:
        if len(one.answers) < 2 or not 0 < one.num_good < len(one.answers):
            raise DataError(
                f"{suite.name}: question {one.id} has {len(one.answers)} answers, {one.num_good} of them right: there "
                "is nothing to choose. The file is damaged, or of another benchmark."
            )
    if not suite.expected:
        _require_some(suite, source, questions, ids)
        if not suite.num_rows or len(read) == suite.num_rows:
            return questions, {}
        if not partial or len(read) > suite.num_rows:
            raise DataError(
                f"{suite.name}: {source} has {len(read):,} rows and the whole set {suite.num_rows:,}, so its score "
                "could not be compared with published ones. Fetch it again, or score a part with rm-opt benchmark "
                "--partial."
            )
        return questions, {"rows": suite.num_rows - len(read)}
    if unknown := sorted(set(found) - set(suite.expected)):
        raise DataError(
            f"{suite.name}: {source} has the groups {', '.join(unknown[:5])}, which the benchmark has not "
            f"({', '.join(suite.expected)}). Is it the right file, and the right version of the set?"
        )
    surplus = [f"{name} {found[name]} of {wanted}" for name, wanted in suite.expected.items() if found[name] > wanted]
    surplus += [f"question {name} {count} times" for name, count in ids.items() if count > 1]
    if surplus:
        raise DataError(
            f"{suite.name}: {source} has more than the set ({'; '.join(surplus[:4])}): name one of its files, or a "
            "folder that holds each question once."
        )
    missing = {name: wanted - found[name] for name, wanted in suite.expected.items() if found[name] < wanted}
    if not questions or (missing and not partial):
        lacking = [f"{name} {found[name]} of {suite.expected[name]}" for name in missing]
        raise DataError(
            f"{suite.name}: {source} is not the whole set ({'; '.join(lacking[:6])}), so its score could not be "
            "compared with published ones. Fetch it again, or score what is there with rm-opt benchmark --partial."
        )
    return questions, missing


def _require_some(suite: Suite, source: str, questions: Sequence[Question], ids: Mapping[str, int]) -> None:
    if not questions:
        raise DataError(f"{suite.name}: {source} has no row, so there is nothing to score.")
    if twice := [name for name, count in ids.items() if count > 1]:
        raise DataError(f"{suite.name}: {source} has question {twice[0]} {ids[twice[0]]} times; name it once.")


def digest(questions: Sequence[Question]) -> str:
    """Hex digits that depend on all that is scored: prompts and answers in their order."""
    every = [(one.id, one.prompt, one.answers) for one in questions]
    return sha256(json.dumps(every).encode("utf-8", "surrogatepass")).hexdigest()


def _rows(suite: Suite, source: str) -> Iterator[Row]:
    path = Path(source).expanduser()
    if not path.is_dir() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        for record in iter_records(source, split=suite.split):
            yield _row(suite, record, path.resolve() if path.is_file() else None)
        return
    files = [
        one
        for one in sorted(path.rglob("*"))
        if one.is_file() and is_file_name(one.name) and fnmatch(one.name, suite.files) and not _is_hidden(one, path)
    ]
    if not files:
        raise DataError(f"{suite.name}: the folder {source} has no file that is of this set ({suite.files}).")
    for file in files:
        for record in read_file(file):
            yield _row(suite, record, file.resolve())


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _row(suite: Suite, record: RawRecord, file: Path | None) -> Row:
    row = Row(record.fields or {}, record.row, file, suite.name)
    if record.fields is None:
        raise row.wrong(f"nothing can be read ({record.problem})")
    return row


def clusters(questions: Sequence[Question]) -> tuple[IntArray, int]:
    """The cluster of each question, (Q,) from 0, and how many there are."""
    names = {name: place for place, name in enumerate(sorted({one.cluster for one in questions}))}
    return np.array([names[one.cluster] for one in questions], dtype=np.int64), len(names)


def mean(values: FloatArray, mask: BoolArray, weights: FloatArray) -> FloatArray:
    """(B,) weighted mean of (Q,) values over the questions of a mask; NaN where none counts."""
    used = weights[:, mask]
    return ratio(used @ values[mask], used.sum(axis=1))


def groups_of(questions: Sequence[Question]) -> dict[str, BoolArray]:
    """(Q,) masks of the questions of each group, in the order of their first questions."""
    names = np.array([one.group for one in questions], dtype=object)
    return {name: names == name for name in dict.fromkeys(names.tolist())}


def by_group(right: FloatArray, questions: Sequence[Question], *, of_groups: bool) -> Scores:
    """Give the share that is right in each group, and overall: of all questions, or as the mean of the groups.

    Args:
        right: (Q,) 1 or 0.
        questions: the Q questions.
        of_groups: whether `overall` is the mean of the groups.
    """
    masks, every = groups_of(questions), np.ones(len(questions), dtype=bool)

    def scores(weights: FloatArray) -> dict[str, FloatArray]:
        groups = {name: mean(right, mask, weights) for name, mask in masks.items()}
        overall = np.mean(list(groups.values()), axis=0) if of_groups else mean(right, every, weights)
        return {OVERALL: overall, **groups}

    return scores


def best_is_right(questions: Sequence[Question], rewards: Rewards) -> FloatArray:
    """(Q,) 1 where every right answer is above all others, else 0: equal rewards and NaN are wrong."""
    return np.array(
        [
            float(np.min(own[: one.num_good]) > np.max(own[one.num_good :]))
            for one, own in zip(questions, rewards, strict=True)
        ]
    )
