"""benchmarks/gpu.sh's results as Markdown: a table a part and machine, from the records of gpu.jsonl alone."""

from collections.abc import Sequence
from typing import Any

OF_THE_RECORD = ("part", "unit", "on", "status", "reason", "error", "lines", "seconds")
"""Fields that are no column of their own."""


def report(records: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    """The whole page."""
    lines = ["# What a GPU showed", "", "Written by `benchmarks/gpu.sh`; gpu.jsonl has the same numbers unrounded."]
    for on in dict.fromkeys(record["on"] for record in records):
        lines += ["", f"## {on}", "", "| part | status | s | reason |", "| --- | --- | ---: | --- |"]
        own = [record for record in records if record["on"] == on]
        for part in parts:
            ends = [one for one in own if one["part"] == part and "unit" not in one]
            end = ends[-1] if ends else {"status": "not run", "reason": "", "seconds": ""}
            first = next(iter(end["reason"].splitlines()), "")
            lines.append(f"| {part} | {end['status']} | {end['seconds']} | {_cell(first)} |")
        for part in parts:
            # A unit that failed and was done later stands here once, as it was last.
            units = {one["unit"]: one for one in own if one["part"] == part and "unit" in one}
            lines += _section(part, list(units.values())) if units else []
        for one in own:
            if one["status"] == "failed" and (told := one.get("error") or one["reason"]):
                lines += ["", f"{one['part']}, {one.get('unit', 'the part')}:", "", "```", told, "```"]
    return "\n".join(lines) + "\n"


def _section(part: str, units: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for one in units for name in one if name not in OF_THE_RECORD))
    # What all units say alike is said once.
    alike = {}
    if len(units) > 1:
        for name in columns:
            values = [one.get(name) for one in units]
            if isinstance(values[0], str) and all(value == values[0] for value in values):
                alike[name] = values[0]
    columns = [name for name in columns if name not in alike]
    lines = ["", f"### {part}", ""]
    lines += [f"{name}: {value}" for name, value in alike.items()] + [""] * bool(alike)
    lines.append(f"| unit | status | s | {' | '.join(columns)} |".replace("|  |", "|"))
    lines.append("| --- | --- | ---: |" + " --- |" * len(columns))
    for one in units:
        status = one["status"] + (f": {one['reason']}" if one.get("reason") else "")
        cells = [one["unit"], status, one["seconds"], *(one.get(name, "") for name in columns)]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    told = [line for one in units for line in one.get("lines", ())]
    return lines + ([""] if told else []) + [f"- {line}" for line in told]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
