"""Rewards of a source that may be larger than memory, part by part: what was scored survives a kill.

Each part's rewards are a file of their own beside the output until the last one is there. The same command continues
with the parts that are missing, and a part is written whole or not at all, so no row is lost and none is there twice.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import atomic_file, exclusive, is_free, write_json
from rmcore.core.progress import Report, silent
from rmcore.data.parts import Part, SourceInParts
from rmcore.ensembles.score import score_pairs_table, score_responses_table
from rmcore.models.reward_model import BradleyTerryRM

PARTS_SUFFIX = ".parts"
JOB_FILE = "job.json"


class Scorer(Protocol):
    """Gives the rewards of parts, in whatever order."""

    def scored(self, parts: Iterable[Part]) -> Iterator[tuple[int, pd.DataFrame]]:
        """The number of each part and its rewards; parts are taken as they can be computed."""


class LocalScorer:
    """Scores in this process, one part after the other."""

    def __init__(self, rm: BradleyTerryRM) -> None:
        self.rm = rm

    def scored(self, parts: Iterable[Part]) -> Iterator[tuple[int, pd.DataFrame]]:
        """See `Scorer.scored`."""
        for part in parts:
            yield part.number, score_part(self.rm, part)


def score_part(rm: BradleyTerryRM, part: Part) -> pd.DataFrame:
    """The rewards of one part, as `score_pairs_table` or `score_responses_table` gives them; empty if none is readable.

    Raises:
        ModelError: a reward is not finite.
    """
    try:
        if part.pairs:
            return score_pairs_table(rm, part.pairs)[0]
        return score_responses_table(rm, part.responses, first_row=part.first_row)
    except DataError:  # of the whole source it is said at the end
        return pd.DataFrame()


def score_source(
    source: SourceInParts, scorer: Scorer, out: Path, job: Mapping[str, Any], *, report: Report = silent
) -> int:
    """Score a source into the Parquet file `out`; rows that it has then. Continues what was begun there.

    Args:
        source: what is scored.
        scorer: by what.
        out: file for the rewards, in the order of the source.
        job: what decides the rewards and the cut into parts; JSON-ready.
        report: called as report(rows done, rows read so far, "scored").

    Raises:
        ConfigError: another job was begun for that file, or somebody works on it.
        DataError: the source cannot be read, or none of its rows by the model.
        ModelError: a reward is not finite.
    """
    folder = out.with_name(out.name + PARTS_SUFFIX)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    if not is_free(lock):
        raise ConfigError(f"another process scores into {out}; wait for it, or name another file.")
    with exclusive(lock):
        _take_up(folder, job, out)
        rows: dict[int, int] = {}
        read = 0

        def missing() -> Iterator[Part]:
            nonlocal read
            for part in source:
                read += len(part)
                place = _place(folder, part.number)
                if place.is_file():
                    rows[part.number] = pq.read_metadata(place).num_rows
                    report(sum(rows.values()), read, "scored")
                else:
                    yield part

        for number, table in scorer.scored(missing()):
            with atomic_file(_place(folder, number)) as temporary:
                table.to_parquet(temporary)
            rows[number] = len(table)
            report(sum(rows.values()), read, "scored")
        if not sum(rows.values()):
            raise DataError(f"none of the rows of {source.source} can be read as this model reads text.")
        _join([_place(folder, number) for number in sorted(rows) if rows[number]], out)
    shutil.rmtree(folder)
    return sum(rows.values())


def _take_up(folder: Path, job: Mapping[str, Any], out: Path) -> None:
    path = folder / JOB_FILE
    if path.is_file():
        began = json.loads(path.read_text())
        if differing := [name for name in job if began.get(name) != job[name]]:
            raise ConfigError(
                f"{folder} holds the beginning of another job for {out}: {', '.join(differing)} differ. Name another "
                "output, or remove that folder."
            )
    write_json(path, dict(job))


def _place(folder: Path, number: int) -> Path:
    return folder / f"part_{number:07d}.parquet"


def _join(parts: list[Path], out: Path) -> None:
    """Write the parts into one file, one at a time. A column that has no value in some part has the others' type."""
    schema = pa.unify_schemas([pq.read_schema(part) for part in parts])
    with atomic_file(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part).cast(schema))
