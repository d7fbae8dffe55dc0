"""Labels from people: a CSV that says nothing of the order that is expected, and its way back into pairs.

The CSV holds pair_id, prompt, response_a, response_b and an empty column `preferred`, to be filled with a or b. Which
response is called a is drawn for each pair, so a labeller who always takes the first one adds noise and no bias.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file, exclusive, write_text
from rmcore.data.pair import PreferencePair, Prompt, prompt_messages, prompt_text

COLUMNS = ("pair_id", "prompt", "response_a", "response_b", "preferred")
SHOWN = 5
"""Ids that an error names."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """The outcome of reading a CSV: new labels, rows left empty, and all labels in the file now."""

    num_new: int
    num_empty: int
    num_labelled: int


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
            writer.writerow(dict(zip(COLUMNS, row, strict=True)))
    return path


def _swapped(pair: PreferencePair, seed: int) -> bool:
    """A coin for each pair, from its two texts: not from their order, which may be that of a label."""
    texts = "\0".join(sorted((pair.chosen, pair.rejected)))
    coin = hashlib.sha256(f"{seed} {pair.pair_id} {texts}".encode()).digest()[0] & 1
    return bool(coin) != (pair.chosen > pair.rejected)


def ingest(labels: Path, pool: Sequence[PreferencePair], out: Path) -> Ingested:
    """Add the labels of a filled-in CSV to the JSONL file `out`, whole or not at all.

    Args:
        labels: as `write_proposal` writes it, with a or b in `preferred`; a row left empty is counted and may come
            later.
        pool: the pairs that were proposed from; texts are taken from here.
        out: pairs with pair_id, prompt, chosen, rejected; made where it is missing.

    Raises:
        DataError: a column is missing or there twice; an id is unknown, twice in the CSV or in `out` already; a text
            differs from the pool's; or `preferred` is something else. Nothing is written then.
    """
    rows = read_proposal(labels)
    known = {pair.pair_id: pair for pair in pool}
    _refuse("are not in the pool", [row["pair_id"] for row in rows if row["pair_id"] not in known], labels)
    counts = Counter(row["pair_id"] for row in rows)
    _refuse("are there more than once", [name for name, count in counts.items() if count > 1], labels)
    wrong = [f"{row['pair_id']} ({row['preferred']!r})" for row in rows if row["preferred"] not in ("a", "b", "")]
    _refuse("prefer neither a nor b (leave what is undecided empty)", wrong, labels)
    changed = [row["pair_id"] for row in rows if not same_texts(row, known[row["pair_id"]])]
    _refuse("have other responses than the pool", changed, labels)
    labelled = [row for row in rows if row["preferred"]]
    out.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(out.with_name(f".{out.name}.lock")):
        before = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
        there = {json.loads(line)["pair_id"] for line in before}
        _refuse(
            f"are labelled in {out} already", [row["pair_id"] for row in labelled if row["pair_id"] in there], labels
        )
        lines = before + [json.dumps(_record(row, known[row["pair_id"]]), ensure_ascii=False) for row in labelled]
        write_text(out, "".join(f"{line}\n" for line in lines))
    return Ingested(len(labelled), len(rows) - len(labelled), len(lines))


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
            rows = [] if missing else [{name: row[name] or "" for name in COLUMNS} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{labels} cannot be read as CSV in UTF-8 ({error}); save it so.") from error
    if repeated:
        raise DataError(f"{labels} has the column {repeated[0]!r} twice: which one is meant is unknown. Remove one.")
    if missing:
        raise DataError(f"{labels} lacks the columns {', '.join(missing)}; fill in the file that was proposed.")
    return [row | {"preferred": row["preferred"].strip().lower()} for row in rows]


def _refuse(what: str, names: Sequence[str], labels: Path) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise DataError(
            f"{len(names)} rows of {labels} {what}: {', '.join(names[:SHOWN])}{more}. Nothing was taken over; correct "
            "the file and ingest it again."
        )


def same_texts(row: Mapping[str, str], pair: PreferencePair) -> bool:
    """Whether both responses are the pair's; a CSV may come back with other line ends."""
    return sorted(map(plain, (row["response_a"], row["response_b"]))) == sorted(
        map(plain, (pair.chosen, pair.rejected))
    )


def plain(text: str) -> str:
    """A text with the line ends that every spreadsheet leaves alone."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _record(row: Mapping[str, str], pair: PreferencePair) -> dict[str, Any]:
    preferred = row["response_a"] if row["preferred"] == "a" else row["response_b"]
    chosen, rejected = pair.chosen, pair.rejected
    if plain(chosen) != plain(preferred):
        chosen, rejected = rejected, chosen
    if isinstance(pair.prompt, str):
        return {"pair_id": pair.pair_id, "prompt": pair.prompt, "chosen": chosen, "rejected": rejected}
    answers = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"pair_id": pair.pair_id, "prompt": _turns(pair.prompt), **answers}


def _turns(prompt: Prompt) -> list[dict[str, str]]:
    return [message._asdict() for message in prompt_messages(prompt)]
