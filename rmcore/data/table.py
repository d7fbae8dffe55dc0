"""Pairs and observations as Parquet tables and back, without loss: how the store keeps prepared splits.

| column | type | what |
| --- | --- | --- |
| pair_id, prompt_id | string | digests of the pair and of its conversation's opening, see `rmcore.data.pair` |
| prompt | list of {role, content, fields} | a plain prompt is one user turn, and is read back as such; fields is JSON |
| chosen, rejected | string | the completions |
| chosen_fields, rejected_fields | string, may be null | JSON object: what the completion has besides its text |
| target_margin | double, may be null | annotated strength |
| subset | string, may be null | copy of `metadata["subset"]`, for readers of the table |
| metadata | string | JSON object |

The same columns are what `rm-opt data convert` writes, as Parquet or as JSONL: the file that every command reads
without a word of advice. Read by `rmcore.data.readers.sources.load_pairs` it gives equal pairs, ids and metadata
included. The table of observations:

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
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file
from rmcore.data.observation import Observation
from rmcore.data.pair import CHOSEN_PROBABILITY, Answer, Message, PreferencePair, Prompt, as_answer, plain_prompt
from rmcore.data.parquet_rows import RecordFile, RecordSchema, write_records

if TYPE_CHECKING:
    import pandas as pd

TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("fields", pa.string())]))
"""A prompt as a column."""
SCHEMA = pa.schema(
    [
        pa.field("pair_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", TURNS, nullable=False),
        pa.field("chosen", pa.string(), nullable=False),
        pa.field("rejected", pa.string(), nullable=False),
        pa.field("chosen_fields", pa.string()),
        pa.field("rejected_fields", pa.string()),
        pa.field("target_margin", pa.float64()),
        pa.field("subset", pa.string()),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)

OBSERVATION_SCHEMA = pa.schema(
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


def write_pairs(pairs: Iterable[PreferencePair], path: Path) -> None:
    """Write pairs, batch by batch, so that `pairs` may be a stream. The file appears whole or not at all.

    Raises:
        DataError: a text is not valid Unicode (a lone surrogate).
    """
    write_records(PAIRS, pairs, path)


def read_pairs(path: Path, limit: int | None = None) -> list[PreferencePair]:
    """The first `limit` pairs that `write_pairs` wrote, or all: equal to those that it got.

    Raises:
        DataError: the file is missing, damaged, or not such a table.
    """
    return list(islice(RecordFile(PAIRS, path), limit))


def row_of_prompt(prompt: Prompt) -> list[dict[str, str | None]]:
    """A prompt as a value of `TURNS`."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt, "fields": None}]
    return [{"role": turn.role, "content": turn.content, "fields": turn.fields or None} for turn in prompt]


def prompt_of_row(turns: Sequence[Mapping[str, Any]]) -> Prompt:
    """A value of `TURNS` as the prompt that it was."""
    if len(turns) == 1 and turns[0]["role"] == "user" and not turns[0]["fields"]:
        return str(turns[0]["content"])
    return plain_prompt(tuple(Message(turn["role"], turn["content"], turn["fields"] or "") for turn in turns))


def row_of_answer(completion: str) -> tuple[str, str | None]:
    """A completion as its text and its further fields."""
    turn = completion.turn if isinstance(completion, Answer) else None
    return (completion, None) if turn is None else (turn.content, turn.fields or None)


def answer_of_row(content: str, fields: str | None) -> str:
    """A completion of its text and its further fields."""
    return as_answer(Message("assistant", content, fields)) if fields else content


NO_METADATA = "{}"


def row_of_pair(pair: PreferencePair) -> dict[str, Any]:
    """A pair as a row of `SCHEMA`."""
    subset = pair.metadata.get("subset")
    (chosen, chosen_fields), (rejected, rejected_fields) = row_of_answer(pair.chosen), row_of_answer(pair.rejected)
    return {
        "pair_id": pair.pair_id,
        "prompt_id": pair.prompt_id,
        "prompt": row_of_prompt(pair.prompt),
        "chosen": chosen,
        "rejected": rejected,
        "chosen_fields": chosen_fields,
        "rejected_fields": rejected_fields,
        "target_margin": pair.target_margin,
        "subset": None if subset is None else str(subset),
        "metadata": json.dumps(dict(pair.metadata)) if pair.metadata else NO_METADATA,
    }


def pair_of_row(row: Mapping[str, Any]) -> PreferencePair:
    """A row of `SCHEMA` as the pair that it was."""
    return PreferencePair.stored(
        prompt=prompt_of_row(row["prompt"]),
        chosen=answer_of_row(row["chosen"], row["chosen_fields"]),
        rejected=answer_of_row(row["rejected"], row["rejected_fields"]),
        target_margin=row["target_margin"],
        metadata={} if row["metadata"] == NO_METADATA else json.loads(row["metadata"]),
        pair_id=row["pair_id"],
    )


PAIRS = RecordSchema("pairs", SCHEMA, row_of_pair, pair_of_row)
"""How pairs lie in a table."""


def row_of_observation(observation: Observation) -> dict[str, Any]:
    """An observation as a row of `OBSERVATION_SCHEMA`."""
    answers, fields = zip(*map(row_of_answer, observation.answers), strict=True)
    return {
        "observation_id": observation.observation_id,
        "prompt_id": observation.prompt_id,
        "kind": str(observation.kind),
        "prompt": row_of_prompt(observation.prompt),
        "answers": list(answers),
        "answer_fields": [one or "" for one in fields] if any(fields) else None,
        "ranks": None if observation.ranks is None else list(observation.ranks),
        "top_only": observation.top_only,
        "grades": [(attribute, list(grades)) for attribute, grades in observation.grades.items()],
        "annotator": observation.annotator,
        "weight": observation.weight,
        "metadata": json.dumps(dict(observation.metadata)),
    }


def observation_of_row(row: Mapping[str, Any]) -> Observation:
    """A row of `OBSERVATION_SCHEMA` as the observation that it was."""
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


OBSERVATIONS = RecordSchema("observations", OBSERVATION_SCHEMA, row_of_observation, observation_of_row)
"""How observations lie in a table."""


def check_target(out: Path, source: str, *, force: bool) -> None:
    """Refuse, before anything is read, what cannot or should not be written.

    Raises:
        DataError: another extension, the source itself, a folder, or a file that is there already and not to be
            overwritten.
    """
    if out.suffix.lower() not in (".parquet", ".jsonl"):
        raise DataError(f"{out} ends neither in .parquet nor in .jsonl, which are the forms written: name it so.")
    if out.is_dir():
        raise DataError(f"{out} is a folder, and a file is to be written: name a file.")
    read = Path(source).expanduser()
    if out.exists() and read.exists() and out.samefile(read):
        raise DataError(f"{out} is the source itself, which would be lost: name another file.")
    if out.exists() and not force:
        raise DataError(f"{out} is there already: name another file, or give --force to overwrite it.")


def write_converted(pairs: Sequence[PreferencePair], out: Path) -> None:
    """Write pairs to a `.parquet` or `.jsonl` file, whole or not at all."""
    if out.suffix.lower() == ".parquet":
        write_pairs(pairs, out)
        return
    with atomic_file(out) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(pair.to_dict(), ensure_ascii=False) + "\n" for pair in pairs)


def rewards_table(pairs: Sequence[PreferencePair], rewards: np.ndarray) -> "pd.DataFrame":
    """Put rewards next to what metrics need of their pairs: the columns of `rmcore.evaluation.rewards.COLUMNS`.

    Args:
        pairs: P of them.
        rewards: (P, 2) logits, chosen first.
    """
    import pandas as pd

    scored = np.asarray(rewards, dtype=np.float64)
    return pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt_id": [pair.prompt_id for pair in pairs],
            "subset": [pair.metadata.get("subset") for pair in pairs],
            "reward_chosen": scored[:, 0],
            "reward_rejected": scored[:, 1],
            "chosen_chars": [len(pair.chosen) for pair in pairs],
            "rejected_chars": [len(pair.rejected) for pair in pairs],
            CHOSEN_PROBABILITY: pd.array([pair.metadata.get(CHOSEN_PROBABILITY) for pair in pairs], dtype="Float64"),
        }
    )
