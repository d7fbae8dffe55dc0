"""CSV files for people who label: their rows, and what people fill in."""

import csv


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def fill(path, decide):
    """What a labeller does: `decide(row)` gives what is preferred, or nothing."""
    write_rows(path, [row | {"preferred": decide(row)} for row in rows_of(path)])
