"""Preference rows that are hard to write, and a file of them in every form."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq

from rmcore.data.readers.columns import USUAL_COLUMNS
from rmcore.data.readers.layouts import recognise

ROWS = [
    {
        "prompt": f"Frage {i}: wie heißt,\n„{i}“?",
        "chosen": [
            {"role": "user", "content": f"Frage {i}: wie heißt,\n„{i}“?"},
            {"role": "assistant", "content": "ja"},
        ],
        "rejected": [
            {"role": "user", "content": f"Frage {i}: wie heißt,\n„{i}“?"},
            {"role": "assistant", "content": "no"},
        ],
        "margin": i / 4,
        "subset": "α",
    }
    for i in range(1200)
]
FORMATS = ["parquet", "json", "jsonl", "csv", "pretty.json", "lines.json"]


def pairs_of(row, columns=USUAL_COLUMNS):
    """The pairs of one record, in the layout that its own columns decide."""
    layout = recognise(row, columns)
    return layout.parse(layout.columns.rename(row)).pairs


def pair_of(row):
    """The only pair of a record."""
    (pair,) = pairs_of(row)
    return pair


def lines(rows, path):
    """Write rows as JSON Lines, in ASCII, which lone surrogates need; gives the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def put(content, path):
    """Write a text in UTF-8, bytes as they are, rows as JSON Lines, a table as Parquet; gives the path as text."""
    if isinstance(content, list):
        return lines(content, path)
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def write(rows, path):
    """Write rows in the form that the name asks for."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    with (gzip.open if path.name.endswith(".gz") else open)(path, "wt", encoding="utf-8", newline="") as file:
        if name.endswith("csv"):
            writer = csv.writer(file)
            writer.writerow(rows[0])
            writer.writerows([v if isinstance(v, str) else json.dumps(v) for v in row.values()] for row in rows)
        elif name.endswith(("jsonl", "lines.json")):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            json.dump(rows, file, indent=2 if "pretty" in name else None)
    return path
