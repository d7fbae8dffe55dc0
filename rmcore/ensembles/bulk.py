"""Rewards of a source that may be larger than memory, part by part: what was scored survives a kill.

Each part's rewards are a file of their own next to the output until the last one is there. The same command continues
with the parts that are missing, and a part is written whole or not at all, so no row is lost and none is there twice.

The columns of the source come behind the rewards. What type each has only the whole source tells, so a part has them as
one JSON object a row.
"""

import csv
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import atomic_file, remove_abandoned, remove_folder, try_exclusive, write_json
from rmcore.core.printing import for_spreadsheets
from rmcore.core.progress import Report, report_left_out, silent
from rmcore.data.pair import CHOSEN_PROBABILITY, PreferencePair, prompt_text
from rmcore.data.parts import Part, SourceInParts
from rmcore.ensembles.score import SideScorer, score_readable_pairs, score_readable_responses

PARTS_SUFFIX = ".parts"
JOB_FILE = "job.json"
GIVEN = "given_columns"
"""Column of a part's file: what else is in the row of the source, as one JSON object."""
LEFT_OUT = b"rm_left_out"
"""Metadata of a part's file: [how many of its rows the model could not read, the first one with its reason]."""


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The rewards of one part."""

    number: int
    table: pd.DataFrame
    """As `score_pairs_table` or `score_readable_responses` gives them, and `GIVEN`; empty where none can be read."""
    num_left_out: int
    """Rows that the model cannot read."""
    first_left_out: str
    """The first of them, with the reason."""


class Scorer(Protocol):
    """Gives the rewards of parts, in whatever order."""

    def scored(self, parts: Iterable[Part]) -> Iterator[ScoredPart]:
        """The rewards of each part; parts are taken as they can be computed."""


class LocalScorer:
    """Scores in this process, one part after the other."""

    def __init__(self, rm: SideScorer) -> None:
        self.rm = rm

    def scored(self, parts: Iterable[Part]) -> Iterator[ScoredPart]:
        """See `Scorer.scored`."""
        for part in parts:
            yield score_part(self.rm, part)


def score_part(rm: SideScorer, part: Part) -> ScoredPart:
    """Score one part.

    Raises:
        ModelError: a reward is not finite.
    """
    try:
        if part.pairs:
            table, _, read = score_readable_pairs(rm, part.pairs)
            left_out = [f"pair {one.pair_id}: {one.reason}" for one in read.dropped]
            given = [_columns_of(pair) for pair in read.pairs]
        else:
            table, left_out = score_readable_responses(rm, part.responses, part.rows)
            given = [part.columns[place] for place in table.index]
    except DataError as error:  # none of this part; whether that is so of all is known at the end
        return ScoredPart(part.number, pd.DataFrame(), len(part), str(error))
    table = table.assign(**{GIVEN: [json.dumps(columns) for columns in given]})
    return ScoredPart(part.number, table, len(left_out), left_out[0] if left_out else "")


def _columns_of(pair: PreferencePair) -> dict[str, Any]:
    texts = {"prompt": prompt_text(pair.prompt), "chosen": str(pair.chosen), "rejected": str(pair.rejected)}
    further = {name: value for name, value in pair.metadata.items() if name not in ("subset", CHOSEN_PROBABILITY)}
    return {**texts, "target_margin": pair.target_margin, **further}


def score_source(
    source: SourceInParts, scorer: Scorer, out: Path, job: Mapping[str, Any], *, report: Report = silent
) -> int:
    """Score a source into the file `out`; rows that it has then. Continues what was begun there.

    Rows that the model cannot read are left out, and said on stderr at the end.

    Args:
        source: what is scored.
        scorer: by what.
        out: file for the rewards, in the order of the source: Parquet, or JSON lines or CSV where its name says so.
        job: what decides the rewards and the cut into parts; JSON-ready.
        report: called as report(rows done, rows read so far, "scored").

    Raises:
        ConfigError: another job has scored parts for that file, or is working on it.
        DataError: the source cannot be read, or none of its rows by the model.
        ModelError: a reward is not finite.
    """
    folder = out.with_name(out.name + PARTS_SUFFIX)
    folder.mkdir(parents=True, exist_ok=True)
    with try_exclusive(folder / ".lock") as is_ours:
        if not is_ours:
            raise ConfigError(f"another process scores into {out}; wait for it, or name another file.")
        _resume(folder, job, out)
        try:
            places, unreadable = _score_missing(source, scorer, folder, report)
        finally:
            if not any(folder.glob("part_*")):
                shutil.rmtree(folder)
        if not places:
            shutil.rmtree(folder, ignore_errors=True)
            raise DataError(
                f"none of the rows of {source.source} can be read as this model reads text; {unreadable[1]}"
            )
        num_rows = sum(pq.read_metadata(place).num_rows for place in places)
        _join(places, out)
        remove_abandoned(folder.parent, lambda name: name == folder.name)
        remove_folder(folder)
    if unreadable[0]:
        report_left_out(unreadable[0], "rows", unreadable[1])
    return num_rows


def _score_missing(
    source: SourceInParts, scorer: Scorer, folder: Path, report: Report
) -> tuple[list[Path], tuple[int, str]]:
    """Score what is not there yet: the parts that have rows, in order, and what was left out of all."""
    rows: dict[int, int] = {}
    left_out: dict[int, tuple[int, str]] = {}
    read = 0

    def note(number: int) -> None:
        metadata = pq.read_metadata(_place(folder, number))
        rows[number] = metadata.num_rows
        left_out[number] = tuple(json.loads(metadata.metadata[LEFT_OUT]))
        report(sum(rows.values()), read, "scored")

    def missing() -> Iterator[Part]:
        nonlocal read
        for part in source:
            read += len(part)
            if _place(folder, part.number).is_file():
                note(part.number)
            else:
                yield part

    for scored in scorer.scored(missing()):
        with atomic_file(_place(folder, scored.number)) as temporary:
            table = pa.Table.from_pandas(scored.table, preserve_index=False)
            left = json.dumps([scored.num_left_out, scored.first_left_out]).encode()
            pq.write_table(table.replace_schema_metadata((table.schema.metadata or {}) | {LEFT_OUT: left}), temporary)
        note(scored.number)
    numbers = sorted(rows)
    firsts = [left_out[number][1] for number in numbers if left_out[number][0]]
    total = sum(count for count, _ in left_out.values())
    return [_place(folder, number) for number in numbers if rows[number]], (total, firsts[0] if firsts else "")


def _resume(folder: Path, job: Mapping[str, Any], out: Path) -> None:
    """Note the job; parts that are there are kept if they are its own, and refused if they are another's."""
    path, parts = folder / JOB_FILE, list(folder.glob("part_*"))
    if parts and not path.is_file():  # whose they are is not known
        for part in parts:
            part.unlink()
    elif parts:
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
    schemas = [pq.read_schema(part).remove_metadata() for part in parts]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    schema = schema.remove(schema.get_field_index(GIVEN))
    given = _types(row for part in parts for row in _given(pq.read_table(part, columns=[GIVEN])))
    names = {name: _free(name, (*schema.names, *given)) if name in schema.names else name for name in given}

    def joined(part: Path) -> pa.Table:
        whole = pq.read_table(part)
        rows, table = list(_given(whole)), whole.drop_columns([GIVEN]).replace_schema_metadata(None).cast(schema)
        for name, kind in given.items():
            values = [_as(kind, row.get(name)) for row in rows]
            table = table.append_column(names[name], pa.array(values, kind))
        return table

    tables = map(joined, parts)
    with atomic_file(out) as temporary:
        if out.suffix.lower() in (".jsonl", ".csv"):
            _write_text(tables, temporary, is_csv=out.suffix.lower() == ".csv")
            return
        first = next(tables)
        with pq.ParquetWriter(temporary, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)


def _given(table: pa.Table) -> Iterator[dict[str, Any]]:
    return map(json.loads, table[GIVEN].to_pylist())


def _free(name: str, taken: Collection[str]) -> str:
    """The name of a column of the source that is called like one of ours."""
    while name in taken:
        name = f"input_{name}"
    return name


def _types(rows: Iterable[Mapping[str, Any]]) -> dict[str, pa.DataType]:
    """Column -> its type: truth values, whole numbers of 64 bits, numbers, or text, where the others are JSON.

    Whole numbers and others are numbers in one column where float64 has all of them, and text where it has not.
    """
    kinds: dict[str, set[pa.DataType]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).update(() if value is None else (_type(value),))
    return {
        name: _NUMBERS.get(frozenset(types)) or (next(iter(types)) if len(types) == 1 else pa.string())
        for name, types in kinds.items()
    }


_SMALL = pa.decimal128(16)
"""Stands for whole numbers that float64 has exactly, until all of a column are known."""
_NUMBERS = {
    frozenset({_SMALL}): pa.int64(),
    frozenset({_SMALL, pa.int64()}): pa.int64(),
    frozenset({_SMALL, pa.float64()}): pa.float64(),
}


def _type(value: Any) -> pa.DataType:
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return _SMALL if abs(value) <= 2**53 else pa.int64() if -(2**63) <= value < 2**63 else pa.string()
    return pa.float64() if isinstance(value, float) else pa.string()


def _as(kind: pa.DataType, value: Any) -> Any:
    if value is None or kind != pa.string() or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _write_text(tables: Iterable[pa.Table], path: Path, *, is_csv: bool) -> None:
    """Write tables as JSON lines or CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for number, table in enumerate(tables):
            if is_csv and not number:
                writer.writerow(table.column_names)
            for row in table.to_pylist():
                if is_csv:
                    writer.writerow(map(for_spreadsheets, row.values()))
                else:
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
