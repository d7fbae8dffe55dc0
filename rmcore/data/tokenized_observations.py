"""Tokenized observations on disk: what a training on more than pairs draws its steps from, whatever their number.

As `rmcore.data.tokenized` for pairs: a batch at a time into Arrow files that are mapped into memory; several processes
of one host share the work. Grades are numbers here already, by the `Coding` of the training.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.observation import Observation
from rmcore.data.rendering import DroppedPair, Renderer, TokenizedPair, TokenizedSide
from rmcore.data.survey import LARGEST_TIE, Scale
from rmcore.data.tokenized import Records, Sorted, TokenizedOnDisk, json_lines, read_counts, write_share

OBSERVATIONS_A_BATCH = 256
"""Observations that are tokenized, and lie in the file, together."""
EQUAL_AFTER_CUT = "two answers are the same within max_seq_len"
EQUAL_TOKENS = "two answers are the same tokens"
CUT = "an answer is longer than max_seq_len"
TOO_MANY_TIED = f"more than {LARGEST_TIE} answers are called equal"
NOTHING_LEFT = "no grade that training has"


Observations = Records[Observation]


class CodedGrade(NamedTuple):
    """One grade: of which answer, of which attribute of the coding, and its code (`Scale.code`)."""

    answer: int
    attribute: int
    code: float


@dataclass(frozen=True, slots=True)
class Coding:
    """How judgements become numbers."""

    scales: tuple[Scale, ...] = ()

    def grades(self, observation: Observation) -> list[CodedGrade]:
        """The grades of the attributes that have a scale, and are on it."""
        coded = []
        for number, scale in enumerate(self.scales):
            for answer, grade in enumerate(observation.grades.get(scale.attribute, ())):
                if grade is None:
                    continue
                code = scale.code(grade)
                if code is not None:
                    coded.append(CodedGrade(answer, number, code))
        return coded

    def judge(self, observation: Observation, sides: Sequence[TokenizedSide]) -> "TokenizedObservation":
        """Put an observation's judgement next to the tokens of its answers."""
        return TokenizedObservation(
            observation.observation_id,
            tuple(sides),
            observation.ranks,
            observation.top_only,
            tuple(self.grades(observation)),
            observation.weight,
        )

    def num_off_scale(self, observation: Observation) -> int:
        """How many grades of these attributes are none that training has."""
        given = [(scale, observation.grades.get(scale.attribute, ())) for scale in self.scales]
        return sum(grade is not None and scale.code(grade) is None for scale, grades in given for grade in grades)


@dataclass(frozen=True, slots=True)
class TokenizedObservation:
    """Token ids of the K answers to one prompt, each a whole side, and the judgement of them."""

    observation_id: str
    sides: tuple[TokenizedSide, ...]
    ranks: tuple[int, ...] | None
    top_only: bool
    grades: tuple[CodedGrade, ...]
    weight: float

    @property
    def num_terms(self) -> float:
        """How much it counts in a step: terms of the likelihood times weight."""
        return self.weight * (len(self.grades) if self.ranks is None else 1)

    @property
    def pair_id(self) -> str:
        """The name of it in messages, as a pair has one."""
        return self.observation_id


_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("cut", pa.list_(pa.int32()), nullable=False),
        pa.field("judgement", pa.string(), nullable=False),
    ]
)


class TokenizedObservations(TokenizedOnDisk[TokenizedObservation, pa.RecordBatch]):
    """N tokenized observations in the order of their source, read as they are needed."""

    def _hold(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def _at(self, batch: pa.RecordBatch, row: int) -> TokenizedObservation:
        return _read(batch, row)

    def lengths(self) -> list[list[int]]:
        """For each observation the tokens of its K sides."""
        return [row for batch in self._batches for row in batch.column("lengths").to_pylist()]

    def digest_lines(self) -> Iterator[bytes]:
        """Bytes that depend on all observations and their order."""
        for batch in self._batches:
            for column in batch.columns:
                yield repr(column.to_pylist()).encode()


def _read(batch: pa.RecordBatch, row: int) -> TokenizedObservation:
    tokens = batch.column("tokens")[row].values.to_numpy()
    ends = np.cumsum(batch.column("lengths")[row].values.to_numpy())
    cut = batch.column("cut")[row].as_py()
    said = json.loads(batch.column("judgement")[row].as_py())
    sides = (TokenizedSide(ids.tolist(), num) for ids, num in zip(np.split(tokens, ends[:-1]), cut, strict=True))
    return TokenizedObservation(
        said["id"],
        tuple(sides),
        None if said["ranks"] is None else tuple(said["ranks"]),
        said["top_only"],
        tuple(CodedGrade(*grade) for grade in said["grades"]),
        said["weight"],
    )


def side_lengths(observations: Sequence[TokenizedObservation]) -> list[list[int]]:
    """For each observation, in memory or on disk, the tokens of its K sides."""
    if isinstance(observations, TokenizedObservations):
        return observations.lengths()
    return [[len(side.ids) for side in one.sides] for one in observations]


def implied_pairs(observations: Sequence[TokenizedPair | TokenizedObservation]) -> list[TokenizedPair]:
    """One pair of each observation, its best ranked answer and its worst: none of ties and grades; pairs stay."""
    pairs = []
    for one in observations:
        if isinstance(one, TokenizedPair):
            pairs.append(one)
        elif one.ranks is not None and min(one.ranks) < max(one.ranks):
            best, worst = one.ranks.index(min(one.ranks)), one.ranks.index(max(one.ranks))
            pairs.append(TokenizedPair(one.observation_id, one.sides[best], one.sides[worst]))
    return pairs


class ReadObservations(NamedTuple):
    """The observations that can be used after tokenizing, and what is known of the others."""

    observations: TokenizedObservations
    cut: dict[str, int]
    """Counts as `rendering.count_cut` gives them, of the observations that are used; these count as pairs."""
    num_left_out: int
    records: Sequence[Path]

    def left_out(self) -> Iterator[dict[str, Any]]:
        """A record of each that is left out, in the order of the source: row, pair_id (its own), reason."""
        return merge(*map(json_lines, self.records), key=itemgetter("row"))


def write_observations_tokenized(
    renderer: Renderer,
    observations: Observations,
    folder: Path,
    coding: Coding,
    *,
    over_length: Literal["cut", "drop"],
    share: tuple[int, int] = (0, 1),
    report: Report = silent,
) -> None:
    """Tokenize this process's share of the observations into `folder`, for `open_observations_tokenized`.

    Left out, each with a reason, is what cannot be read, loses what its answers differ in to the tokenizer or the
    length limit, or has a grade or a tie that the coding does not have.

    Args:
        renderer: of the model.
        observations: all of them; the same ones in every process.
        folder: of this host alone.
        coding: of the training.
        over_length: an observation with a side over the limit: cut that side, or leave the observation out.
        share: number of this process, from 0, and number of processes of this host.
        report: told of the observations that this process has passed.
    """

    def tokenize(batch: list[Observation], first: int) -> Sorted:
        sides = iter(renderer.try_sides([(one.prompt, answer) for one in batch for answer in one.answers]))
        cut, rows = Counter[str](), list[dict[str, Any] | DroppedPair]()
        for one in batch:
            coded = _coded(one, list(islice(sides, len(one.answers))), coding, over_length)
            if isinstance(coded, str):
                rows.append(DroppedPair(one.observation_id, coded, {}))
            else:
                rows.append(_row(coded))
                lost = [side.num_cut for side in coded.sides if side.num_cut]
                cut.update(num_pairs=1, num_cut_pairs=bool(lost), num_cut_sides=len(lost), num_cut_tokens=sum(lost))
        report(first + len(batch), len(observations), "observations tokenized")
        return rows, cut

    write_share(folder, _SCHEMA, observations, OBSERVATIONS_A_BATCH, share, tokenize)


def open_observations_tokenized(folder: Path, num_observations: int, *, parts: int = 1) -> ReadObservations:
    """Open what `parts` processes have written of `num_observations` observations.

    Raises:
        DataError: there were some, and none is left.
    """
    cut, reasons, records = read_counts(folder, parts)
    read = TokenizedObservations([folder / f"{number}.arrow" for number in range(parts)])
    if num_observations and not read:
        why = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(5))
        raise DataError(
            f"none of the {num_observations} observations can be trained on ({why}). Raise model.max_seq_len, or look "
            "at the file with: rm-opt data check FILE"
        )
    return ReadObservations(read, cut, reasons.total(), records)


def _coded(
    one: Observation, found: Sequence[TokenizedSide | DataError], coding: Coding, over_length: Literal["cut", "drop"]
) -> TokenizedObservation | str:
    """The observation as it is trained on, or why it is left out."""
    sides = [side for side in found if isinstance(side, TokenizedSide)]
    if len(sides) < len(found):
        return str(next(side for side in found if isinstance(side, DataError)))
    if over_length == "drop" and any(side.num_cut for side in sides):
        return CUT
    times = Counter(tuple(side.ids) for side in sides)
    if len(times) < len(sides):
        was_cut = any(side.num_cut for side in sides if times[tuple(side.ids)] > 1)
        return EQUAL_AFTER_CUT if was_cut else EQUAL_TOKENS
    if one.ranks is not None and not one.top_only and max(Counter(one.ranks).values()) > LARGEST_TIE:
        return TOO_MANY_TIED
    judged = coding.judge(one, sides)
    return NOTHING_LEFT if judged.ranks is None and not judged.grades else judged


def _row(one: TokenizedObservation) -> dict[str, Any]:
    judgement = {
        "id": one.observation_id,
        "ranks": one.ranks,
        "top_only": one.top_only,
        "grades": one.grades,
        "weight": one.weight,
    }
    return {
        "tokens": [token for side in one.sides for token in side.ids],
        "lengths": [len(side.ids) for side in one.sides],
        "cut": [side.num_cut for side in one.sides],
        "judgement": json.dumps(judgement),
    }
