"""Parts that commands share: help texts from the config, printing numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rmcore.core.files import write_json
from rmcore.reporting.html.blocks import Block, shown
from rmcore.reporting.html.cards import metric_texts


def setting(model: type[BaseModel], name: str, *flags: str) -> Any:
    """Make an option whose help and lower bound are those of the config field `name`."""
    field = model.model_fields[name]
    least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    return typer.Option(*flags, help=field.description, min=least)


def printable(text: str) -> str:
    """Put a question mark for what of a text cannot be printed: a data file must not drive the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def write_report_json(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a command's result for programs, where `--json` asks for it."""
    if path is not None:
        write_json(path, record)


def print_metrics(title: str, metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """Print metrics by name with their 95 % intervals, numbers as a report has them."""
    table = Table("metric", "value", "95 % interval", "pairs", title=title, title_justify="left")
    for name, entry in metrics.items():
        value, interval, _ = metric_texts(name, entry)
        table.add_row(escape(name), value, escape(interval), str(entry.get("num", "")))
    Console().print(table)


def print_block(block: Block) -> None:
    """Print what a block holds below its title: sentences, tables without what is folded, findings."""
    console = Console()
    for paragraph in block.text:
        print(paragraph)
    for one in block.tables:
        if not one.title:
            table = Table(*map(escape, one.headings))
            for row in one.rows:
                table.add_row(*(escape(shown(cell)) for cell in row))
            console.print(table)
    for line in block.findings:
        print(line)
