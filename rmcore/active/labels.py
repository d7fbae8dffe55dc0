"""Labels from people or a judge: a CSV that says nothing of the order that is expected, and its way back into pairs.

The CSV holds pair_id, prompt, response_a, response_b and an empty column `preferred`, to be filled with a or b. Which
response is called a is drawn for each pair, so a labeller who always takes the first one adds noise and no bias. Texts
that a spreadsheet may take for a formula have an apostrophe in front, which is taken away again.
"""

import csv
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file, exclusive, write_text
from rmcore.core.printing import for_spreadsheets, from_spreadsheets
from rmcore.data.pair import PreferencePair, answer_turn, dialogue_records, prompt_text, tools_of

COLUMNS = ("pair_id", "prompt", "response_a", "response_b", "preferred")
SHOWN = 5
"""Ids that an error names."""
INGEST_AGAIN = "Nothing was taken over; correct the file and ingest it again."


@dataclass(frozen=True, slots=True)
class Ingested:
    """The outcome of reading a CSV: new labels, rows left empty, and all labels in the file now.

    Of the rows that a judge was asked about, ties and those that it could not judge are no labels.
    """

    num_new: int
    num_empty: int
    num_labelled: int
    num_ties: int = 0
    num_unread: int = 0


@dataclass(frozen=True, slots=True)
class LabellingJudge:
    """Who answers the rows that people have left empty.

    margins: P pairs -> (P,) by how much `chosen` is better; 0 is a tie, NaN could not be judged.
    signature: columns of each of its labels, such as `annotator`.
    """

    margins: Callable[[Sequence[PreferencePair]], FloatArray]
    signature: Mapping[str, Any] = field(default_factory=dict)


def write_proposal(pairs: Sequence[PreferencePair], path: Path, *, seed: int) -> Path:
    """Write the pairs to label, in the given order; returns `path`.

    Raises:
        DataError: the file is there already: someone may be labelling in it.
    """
    if path.exists():
        raise DataError(f"{path} is there already, and may hold labels; name another file, or move that one away.")
    with atomic_file(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for pair in pairs:
            first, second = (pair.chosen, pair.rejected)[:: -1 if _swapped(pair, seed) else 1]
            # A lone \r survives csv, and no table that pandas writes again.
            row = (pair.pair_id, *map(plain, (prompt_text(pair.prompt), first, second)), "")
            writer.writerow(dict(zip(COLUMNS, map(for_spreadsheets, row), strict=True)))
    return path


def _swapped(pair: PreferencePair, seed: int) -> bool:
    """A coin for each pair, from its two texts: not from their order, which may be that of a label."""
    texts = "\0".join(sorted((pair.chosen, pair.rejected)))
    coin = hashlib.sha256(f"{seed} {pair.pair_id} {texts}".encode()).digest()[0] & 1
    return bool(coin) != (pair.chosen > pair.rejected)


def ingest(labels: Path, pool: Sequence[PreferencePair], out: Path, judge: LabellingJudge | None = None) -> Ingested:
    """Add the labels of a filled-in CSV to the JSONL file `out`, whole or not at all.

    Args:
        labels: as `write_proposal` writes it, with a or b in `preferred`; a row left empty is counted and may come
            later.
        pool: the pairs that were proposed from; texts are taken from here.
        out: pairs with pair_id, prompt, chosen, rejected; made where it is missing.
        judge: is asked about the rows left empty, once all others are found to be in order.

    Raises:
        DataError: see `read_preferences`; or an id is in `out` already. Nothing is written then.
    """
    known = {pair.pair_id: pair for pair in pool}
    preferences = read_preferences(labels, known, INGEST_AGAIN)
    out.parent.mkdir(parents=True, exist_ok=True)
    empty = [name for name, preference in preferences.items() if preference is None]
    judged: dict[str, float] = {}
    if judge is not None and empty:
        _refuse_labelled(empty, out, labels)  # before anything is spent on them
        judged = dict(zip(empty, judge.margins([known[name] for name in empty]).tolist(), strict=True))
    # A judge's NaN could not be read and its 0 is a tie: neither becomes a pair.
    answers = preferences | {name: margin for name, margin in judged.items() if margin < 0 or margin > 0}
    labelled = {name: answer for name, answer in answers.items() if answer is not None}
    signature = {} if judge is None else judge.signature
    with exclusive(out.with_name(f".{out.name}.lock")):
        before = _refuse_labelled(list(labelled), out, labels)
        records = [
            _record(known[name], is_chosen=answer > 0) | (dict(signature) if name in judged else {})
            for name, answer in labelled.items()
        ]
        lines = before + [json.dumps(record, ensure_ascii=False) for record in records]
        write_text(out, "".join(f"{line}\n" for line in lines))
    num_ties, num_unread = list(judged.values()).count(0.0), sum(map(math.isnan, judged.values()))
    num_empty = len(preferences) - len(labelled) - num_ties - num_unread
    return Ingested(len(labelled), num_empty, len(lines), num_ties, num_unread)


def read_preferences(
    labels: Path, pairs: Mapping[str, PreferencePair], remedy: str, *, ties: bool = False
) -> dict[str, float | None]:
    """Read which side of each pair of a filled-in CSV is preferred, in the order of its rows.

    Args:
        labels: as `write_proposal` writes it, filled in.
        pairs: the pairs that it may hold, by pair_id.
        remedy: sentences at the end of an error: what to do about it.
        ties: whether `tie` is an answer, too.

    Returns:
        By pair_id 1 where `chosen` is preferred, -1 where `rejected` is, 0 for a tie and None for a row left empty.

    Raises:
        DataError: the file cannot be read, or a column is missing or there twice; an id is unknown or there twice; a
            text differs from the pair's; or `preferred` is something else.
    """
    rows = read_proposal(labels)
    answers = ("a", "b", "tie", "") if ties else ("a", "b", "")
    counts = Counter(row["pair_id"] for row in rows)
    unknown = [name for name in counts if name not in pairs]
    _refuse("are of no pair that was proposed", unknown, labels, remedy)
    _refuse("are there more than once", [name for name, count in counts.items() if count > 1], labels, remedy)
    wrong = [f"{row['pair_id']} ({row['preferred']!r})" for row in rows if row["preferred"] not in answers]
    asked = "a, b or tie" if ties else "a or b"
    _refuse(f"have another answer than {asked} (leave what is undecided empty)", wrong, labels, remedy)
    changed = [row["pair_id"] for row in rows if not same_texts(row, pairs[row["pair_id"]])]
    _refuse("have other responses than the pairs that were proposed", changed, labels, remedy)
    return {row["pair_id"]: _preference(row, pairs[row["pair_id"]]) for row in rows}


def _preference(row: Mapping[str, str], pair: PreferencePair) -> float | None:
    if row["preferred"] in ("", "tie"):
        return 0.0 if row["preferred"] else None
    preferred = row["response_a" if row["preferred"] == "a" else "response_b"]
    return 1.0 if plain(preferred) == plain(pair.chosen) else -1.0


def _refuse_labelled(names: Sequence[str], out: Path, labels: Path) -> list[str]:
    """The lines of the file so far, which has none of these pairs."""
    # They end at `\n` alone: answers may hold U+2028, where `splitlines` splits.
    before = [line for line in out.read_bytes().decode("utf-8").split("\n") if line.strip()] if out.is_file() else []
    there = {_pair_id(line, out) for line in before}
    _refuse(f"are labelled in {out} already", [name for name in names if name in there], labels, INGEST_AGAIN)
    return before


def _pair_id(line: str, out: Path) -> str:
    try:
        return str(json.loads(line)["pair_id"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{out} has a line that is no label ({line[:80]}): it was damaged or edited. Correct or remove that line."
        ) from error


def read_proposal(labels: Path) -> list[dict[str, str]]:
    """Rows of a CSV that `write_proposal` wrote, by `COLUMNS`; what was filled in is without spaces and lower case.

    Raises:
        DataError: it cannot be read, or a column is missing or there twice.
    """
    try:
        with labels.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or [])
            missing = [name for name in COLUMNS if name not in names]
            repeated = [name for name in COLUMNS if names.count(name) > 1]
            rows = [] if missing else [{name: from_spreadsheets(row[name] or "") for name in COLUMNS} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{labels} cannot be read as CSV in UTF-8 ({error}); save it so.") from error
    if repeated:
        raise DataError(f"{labels} has the column {repeated[0]!r} twice: which one is meant is unknown. Remove one.")
    if missing:
        raise DataError(f"{labels} lacks the columns {', '.join(missing)}; fill in the file that was proposed.")
    return [row | {"preferred": row["preferred"].strip().lower()} for row in rows]


def _refuse(what: str, names: Sequence[str], labels: Path, remedy: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise DataError(f"{len(names)} rows of {labels} {what}: {', '.join(names[:SHOWN])}{more}. {remedy}")


def same_texts(row: Mapping[str, str], pair: PreferencePair) -> bool:
    """Whether both responses are the pair's; a CSV may come back with other line ends."""
    return sorted(map(plain, (row["response_a"], row["response_b"]))) == sorted(
        map(plain, (pair.chosen, pair.rejected))
    )


def plain(text: str) -> str:
    """A text with the line ends that every spreadsheet leaves alone."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _record(pair: PreferencePair, *, is_chosen: bool) -> dict[str, Any]:
    chosen, rejected = (pair.chosen, pair.rejected) if is_chosen else (pair.rejected, pair.chosen)
    if isinstance(pair.prompt, str):
        return {"pair_id": pair.pair_id, "prompt": pair.prompt, "chosen": chosen, "rejected": rejected}
    answers = {name: [answer_turn(text).record()] for name, text in (("chosen", chosen), ("rejected", rejected))}
    tools = tools_of(pair.prompt)
    record = {"pair_id": pair.pair_id, "prompt": dialogue_records(pair.prompt), **answers}
    return record if tools is None else record | {"tools": tools}
