"""Observations as a Parquet table and back, without loss: the form in which they lie in the store beside the pairs.

| column | type | what |
| --- | --- | --- |
| observation_id, prompt_id | string | digests, see `rmcore.data.observation` |
| kind | string | a copy of what the other columns show, for readers of the table |
| prompt | list of {role, content} | a plain prompt is one user turn; read back, one user turn is a plain prompt |
| answers | list of string | the K answers |
| ranks | list of int32, may be null | 1 is best, equal ranks are ties; null where answers were graded |
| top_only | bool | of the ranks only 1 means something |
| grades | map of string to list of double | attribute -> K grades, null where one is missing; empty where ranked |
| annotator | string, may be null | who judged |
| weight | double | how often it counts |
| metadata | string | JSON object |
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmcore.data.observation import Observation
from rmcore.data.pair import Message, plain_prompt, prompt_messages
from rmcore.data.parquet_rows import Form, count_records, iter_records, write_records

SCHEMA = pa.schema(
    [
        pa.field("observation_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), nullable=False),
        pa.field("answers", pa.list_(pa.string()), nullable=False),
        pa.field("ranks", pa.list_(pa.int32())),
        pa.field("top_only", pa.bool_(), nullable=False),
        pa.field("grades", pa.map_(pa.string(), pa.list_(pa.float64())), nullable=False),
        pa.field("annotator", pa.string()),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)


def write_observations(observations: Iterable[Observation], path: Path) -> None:
    """Write observations, batch by batch, so that they may be a stream. The file appears whole or not at all.

    Raises:
        DataError: a text is not valid Unicode (a lone surrogate).
    """
    write_records(OBSERVATIONS, observations, path)


def read_observations(path: Path, limit: int | None = None) -> list[Observation]:
    """The first `limit` observations that `write_observations` wrote, or all: equal to those that it got.

    Raises:
        DataError: the file is missing, damaged, or not such a table.
    """
    return list(islice(iter_observations(path), limit))


def iter_observations(path: Path) -> Iterator[Observation]:
    """The observations that `write_observations` wrote, one after the other; memory holds some hundred of them.

    Raises:
        DataError: as `read_observations`.
    """
    return iter_records(OBSERVATIONS, path)


def count_observations(path: Path) -> int:
    """How many observations a file has that `write_observations` wrote.

    Raises:
        DataError: as `read_observations`.
    """
    return count_records(OBSERVATIONS, path)


@dataclass(frozen=True, slots=True)
class ObservationFile:
    """The observations of a file that `write_observations` wrote, read anew each time they are gone through.

    Raises:
        DataError: as `read_observations`, when it is read.
    """

    path: Path

    def __len__(self) -> int:
        return count_observations(self.path)

    def __iter__(self) -> Iterator[Observation]:
        return iter_observations(self.path)


def row_of_observation(observation: Observation) -> dict[str, Any]:
    """An observation as a row of `SCHEMA`."""
    return {
        "observation_id": observation.observation_id,
        "prompt_id": observation.prompt_id,
        "kind": str(observation.kind),
        "prompt": [message._asdict() for message in prompt_messages(observation.prompt)],
        "answers": list(observation.answers),
        "ranks": None if observation.ranks is None else list(observation.ranks),
        "top_only": observation.top_only,
        "grades": [(attribute, list(grades)) for attribute, grades in observation.grades.items()],
        "annotator": observation.annotator,
        "weight": observation.weight,
        "metadata": json.dumps(dict(observation.metadata)),
    }


def observation_of_row(row: Mapping[str, Any]) -> Observation:
    """A row of `SCHEMA` as the observation that it was."""
    return Observation(
        prompt=plain_prompt(tuple(Message(**turn) for turn in row["prompt"])),
        answers=tuple(row["answers"]),
        ranks=None if row["ranks"] is None else tuple(row["ranks"]),
        top_only=row["top_only"],
        grades={attribute: tuple(grades) for attribute, grades in row["grades"]},
        annotator=row["annotator"],
        weight=row["weight"],
        metadata=json.loads(row["metadata"]),
        observation_id=row["observation_id"],
    )


OBSERVATIONS = Form("observations", SCHEMA, row_of_observation, observation_of_row)
"""How observations lie in a table."""
