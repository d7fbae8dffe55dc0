"""Parts that commands share: help texts from the config, printing numbers and findings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rmcore.core.files import write_json
from rmcore.core.printing import printable, printable_lines
from rmcore.reporting.html.blocks import Block, cell_text
from rmcore.reporting.html.cards import metric_texts

PIPED_WIDTH = 160
"""Columns where no terminal says how many there are."""


def setting(model: type[BaseModel], name: str, *flags: str, **shown: Any) -> Any:
    """Make an option whose help and lower bound are those of the config field `name`; `shown` is as typer has it."""
    field = model.model_fields[name]
    least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    return typer.Option(*flags, help=field.description, min=least, **shown)


def wide_console() -> Console:
    """Where tables are printed: a pipe has no width, and 80 columns would break what is read from it."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


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
    wide_console().print(table)


def print_block(block: Block, *, is_whole: bool = False) -> None:
    """Print what a block holds below its title: sentences, tables and findings.

    Args:
        block: to show; its texts may come from data.
        is_whole: whether folded tables, with all small print, and its parts are printed, too, below their titles.
    """
    console = wide_console()
    for paragraph in block.text:
        print(printable_lines(paragraph))
    for one in block.tables:
        if is_whole or not one.title:
            if one.title:
                print(f"\n{printable(one.title)}")
            table = Table(*map(escape, one.headings), show_header=any(one.headings))
            for row in one.rows:
                table.add_row(*(printable_lines(escape(cell_text(cell, bool(one.title)))) for cell in row))
            console.print(table)
    for finding in block.findings:
        print(printable_lines(finding))
    for part in block.parts if is_whole else ():
        print(f"\n{printable(part.title)}")
        print_block(part, is_whole=True)


def print_verdict(verdict: Mapping[str, Any], more: Mapping[str, Any] | None) -> None:
    """Show a verdict with its evidence level, what speaks against it, and the next step."""
    print(f"verdict     {verdict['headline']}")
    for reason in verdict["reasons"]:
        print(f"            - {reason}")
    print(f"evidence    level {verdict['rung']} of 4: {verdict['evidence']}")
    if more is not None:
        level = f" (evidence level {more['rung']})" if more["rung"] > verdict["rung"] else ""
        print(f"next step   {more['evidence']}{level}:")
        print(f"            {more['command']}")
        print(f"            costs {more['cost']}")
        if "so_far" in more:
            print(f"so far      {more['so_far']}")
