"""Observations as a Parquet table and back, without loss: the form in which they lie in the store next to the pairs.

| column | type | what |
| --- | --- | --- |
| observation_id, prompt_id | string | digests, see `rmcore.data.observation` |
| kind | string | a copy of what the other columns show, for readers of the table |
| prompt | list of {role, content, fields} | as in the table of pairs |
| answers | list of string | the K answers |
| answer_fields | list of string, may be null | JSON objects: what the answers have besides their texts |
| ranks | list of int32, may be null | 1 is best, equal ranks are ties; null where answers were graded |
| top_only | bool | of the ranks only 1 means something |
| grades | map of string to list of double | attribute -> K grades, null where one is missing; empty where ranked |
| annotator | string, may be null | who judged |
| weight | double | how often it counts |
| metadata | string | JSON object |
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmcore.data.observation import Observation
from rmcore.data.pair import answer_turn
from rmcore.data.parquet_rows import Form, count_records, iter_records
from rmcore.data.table import TURNS, answer_of_row, prompt_of_row, row_of_prompt

SCHEMA = pa.schema(
    [
        pa.field("observation_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("prompt", TURNS, nullable=False),
        pa.field("answers", pa.list_(pa.string()), nullable=False),
        pa.field("answer_fields", pa.list_(pa.string())),
        pa.field("ranks", pa.list_(pa.int32())),
        pa.field("top_only", pa.bool_(), nullable=False),
        pa.field("grades", pa.map_(pa.string(), pa.list_(pa.float64())), nullable=False),
        pa.field("annotator", pa.string()),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)


def iter_observations(path: Path) -> Iterator[Observation]:
    """Yield the observations of a table, equal to those that were written; memory holds some hundred of them.

    Raises:
        DataError: the file is missing, damaged, or not such a table.
    """
    return iter_records(OBSERVATIONS, path)


def count_observations(path: Path) -> int:
    """Count the observations of a table.

    Raises:
        DataError: as `iter_observations`.
    """
    return count_records(OBSERVATIONS, path)


@dataclass(frozen=True, slots=True)
class ObservationFile:
    """The observations of a table, read again each time they are iterated over.

    Raises:
        DataError: as `iter_observations`, when it is read.
    """

    path: Path

    def __len__(self) -> int:
        return count_observations(self.path)

    def __iter__(self) -> Iterator[Observation]:
        return iter_observations(self.path)


def row_of_observation(observation: Observation) -> dict[str, Any]:
    """An observation as a row of `SCHEMA`."""
    answers = [answer_turn(answer) for answer in observation.answers]
    return {
        "observation_id": observation.observation_id,
        "prompt_id": observation.prompt_id,
        "kind": str(observation.kind),
        "prompt": row_of_prompt(observation.prompt),
        "answers": [answer.content for answer in answers],
        "answer_fields": [answer.fields for answer in answers] if any(answer.fields for answer in answers) else None,
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
        prompt=prompt_of_row(row["prompt"]),
        answers=tuple(map(answer_of_row, row["answers"], row["answer_fields"] or [""] * len(row["answers"]))),
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
